"""What `plan` says on stderr while the compiler is asked: about which layout, and for how long already."""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from jaxshard.console import duration
from jaxshard.planner.confirm import Question
from jaxshard.planner.search import words

EVERY = 20.0
"""Seconds of a compilation between two signs of life."""


class Progress:
    """Lines about questions to the compiler; `asking` is a context manager for each."""

    def __init__(self, every: float = EVERY):
        self._since = time.monotonic()
        self._every = every

    @contextmanager
    def asking(self, question: Question) -> Iterator[None]:
        """Says what is asked, and again and again that it is still being asked."""
        with _stderr() as stream:
            target = question.found.target.name
            layout = words(question.scored.candidate)
            line = f"asking the compiler for {target}: {question.number} of at most {question.most}: {layout}"
            spent = self._spent()
            print(f"{line} ({spent} so far)" if question.number > 1 else line, file=stream, flush=True)
            done = threading.Event()

            def tick() -> None:
                """Until `done`."""
                while not done.wait(self._every):
                    print(f"  still compiling, {self._spent()} since the first", file=stream, flush=True)

            thread = threading.Thread(target=tick, daemon=True)
            thread.start()
            try:
                yield
            finally:
                done.set()
                thread.join()

    def _spent(self) -> str:
        return duration(time.monotonic() - self._since)


@contextmanager
def _stderr() -> Iterator[TextIO]:
    """stderr as it is now: while a compiler runs, the file descriptor leads elsewhere (`absent.captured_stderr`)."""
    try:
        copy = os.dup(sys.stderr.fileno())
    except (OSError, ValueError):  # no file, as under a test
        yield sys.stderr
        return
    with os.fdopen(copy, "w", encoding="utf-8", errors="replace") as stream:
        yield stream
