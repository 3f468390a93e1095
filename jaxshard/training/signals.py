"""Ctrl-C and SIGTERM as a request to save and stop."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


class StopRequest:
    """Becomes true when a signal has asked the run to stop; `name` says which."""

    def __init__(self) -> None:
        self.name: str | None = None

    def __bool__(self) -> bool:
        return self.name is not None


@contextmanager
def stop_on_signal() -> Iterator[StopRequest]:
    """Within the block the first SIGINT or SIGTERM sets the request; a second SIGINT interrupts at once."""
    request = StopRequest()

    def handle(number: int, _frame) -> None:
        if request and number == signal.SIGINT:
            raise KeyboardInterrupt
        request.name = signal.Signals(number).name

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
