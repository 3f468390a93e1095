"""The one exception for mistakes that the user can mend."""

import difflib
import os
from collections.abc import Iterable
from pathlib import Path


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


def obstacle(folder: Path) -> str:
    """Returns what stands in the way of a folder, or of making it, and what helps; "" when nothing is seen to."""
    for place in (folder, *folder.parents):
        if not os.path.lexists(place):
            continue
        link = f"a symbolic link to {os.readlink(place)}, which is " if place.is_symlink() else ""
        if not os.path.exists(place):
            return f"{place} is {link}not there: make it, or remove the link"
        if not os.path.isdir(place):
            return f"{place} is {link}a file and no folder"
        if not os.access(place, os.W_OK | os.X_OK):
            return f"this user may not write into {place}"
        return ""
    return ""
