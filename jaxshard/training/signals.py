"""Ctrl-C and SIGTERM as a request to save and stop."""

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_STOPS = (signal.SIGINT, signal.SIGTERM)
_END = b"\0"


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
        request.name = request.name or signal.Signals(number).name

    before = {number: signal.signal(number, handle) for number in _STOPS}
    try:
        with _leave_on_second_interrupt():
            yield request
    finally:
        for number, handler in before.items():
            # None: one that Python has not set and cannot set again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextmanager
def _leave_on_second_interrupt() -> Iterator[None]:
    """Ends the process in a thread: a handler waits while native code, such as a compiler, holds the main thread."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    watch = threading.Thread(target=_watch, args=(reader,), name="second_interrupt", daemon=True)
    watch.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        writer.send(_END)
        watch.join()
        writer.close()
        reader.close()


def _watch(signals: socket.socket) -> None:
    """Reads the number of each signal as it comes, a byte each."""
    asked = False
    while (number := signals.recv(1)) != _END:
        if asked and number[0] == signal.SIGINT:
            # Unwinding would wait for, or crash in, threads of compilers and writers. A checkpoint is whole or not
            # there at all, so that leaving at once damages none.
            os.write(2, b"interrupted: nothing was saved after the last complete checkpoint\n")
            os._exit(1)
        asked = asked or number[0] in _STOPS
