"""The one exception for mistakes that the user can mend."""

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """Bad input: the command line prints the message alone and exits with code 2.

    The message says what was found, why it cannot work, and the nearest fix.
    """


class RunError(RuntimeError):
    """A run that cannot go on: the command line prints the message alone and exits with code 1."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """Returns " (did you mean 'x'?)" for the closest valid name, or "" when none is close."""
    close = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""
