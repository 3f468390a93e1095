"""Ctrl-C and SIGTERM as a request to save and stop."""

import os
import signal
import sys
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
    """Within the block the first SIGINT or SIGTERM sets the request; a second SIGINT ends the process at once."""
    request = StopRequest()

    def handle(number: int, _frame) -> None:
        if request and number == signal.SIGINT:
            # Unwinding would wait for, or crash in, threads of compilers and writers. A checkpoint is whole or not
            # there at all, so nothing is lost by leaving at once.
            print("interrupted", file=sys.stderr, flush=True)
            os._exit(1)
        request.name = signal.Signals(number).name

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
