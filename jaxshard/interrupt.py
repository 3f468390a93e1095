"""Ctrl-C before a command begins. Imports nothing that takes time: the imports are what it guards."""

import os
import signal


def leave_at_once() -> None:
    """From now on Ctrl-C ends the process with one word: nothing has begun that would have to be put in order.

    An exception would not do: raised while modules are imported, it may be swallowed or come out as another error.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where the signal is ignored, as by nohup
        signal.signal(signal.SIGINT, _leave)


def raise_from_now() -> None:
    """From now on Ctrl-C raises KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(_number, _frame) -> None:
    os.write(2, b"interrupted\n")
    os._exit(1)
