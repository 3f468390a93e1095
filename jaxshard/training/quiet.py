"""Keeps Orbax's noise off the terminal."""

import logging
import sys
import traceback
import warnings
from types import TracebackType
from typing import Any


def quieten() -> None:
    """Silences what Orbax logs and warns: whatever matters in it is raised too, and told once."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_not_from_orbax)
    # After an error the writes that had not begun are given up.
    warnings.filterwarnings("ignore", r"coroutine '.*' was never awaited", RuntimeWarning)
    previous = sys.unraisablehook
    if getattr(previous, "quiet", False):
        return

    def hook(unraisable: Any) -> None:
        # Of several reads or writes that fail together, the later ones find nobody waiting for them any more.
        error = unraisable.exc_value
        if str(error) != "Event loop is closed" and not _from_orbax(unraisable.exc_traceback, str(error)):
            previous(unraisable)

    hook.quiet = True
    sys.unraisablehook = hook


def _not_from_orbax(record: logging.LogRecord) -> bool:
    # asyncio reports in its own name the later of several errors, or a task that ends with its event loop.
    stack = record.exc_info[2] if record.exc_info else None
    return not _from_orbax(stack, record.pathname, record.getMessage())


def _from_orbax(stack: TracebackType | None, *texts: str) -> bool:
    """Whether Orbax, or tensorstore below it, is named in the texts or by a frame of the stack."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(stack)]
    return any(name in text for text in (*texts, *files) for name in ("orbax", "tensorstore"))
