"""What a folder of checkpoints holds, from its JSON alone: no Orbax, no arrays, no devices.

    <folder>/<step>/state   the arrays, under flat names such as "params.blocks.attention.query"
    <folder>/<step>/meta    JSON: the caller's values, and name, shape and type of every array

A folder that is named by a number is complete unless something has touched it since it was renamed to that name.
"""

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jaxshard.errors import InputError, nearest

_PARTS = ("state/_METADATA", "state/manifest.ocdbt", "meta/metadata")


@dataclass(frozen=True)
class SavedArray:
    """One array of a checkpoint: its name, shape and type, as in `params.head.norm.scale float32 [64]`."""

    path: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True)
class Description:
    """What a checkpoint holds.

    Attributes:
        step: finished updates.
        arrays: in the order of their names.
        meta: the values that were saved beside them.
    """

    step: int
    arrays: tuple[SavedArray, ...]
    meta: dict[str, Any]

    @property
    def bytes(self) -> int:
        """Bytes of all arrays, before compression."""
        return sum(array.bytes for array in self.arrays)


def complete_steps(folder: Path) -> list[int]:
    """Steps of the complete checkpoints in a folder, oldest first; [] where there is no such folder."""
    try:
        names = [path.name for path in folder.iterdir() if path.name.isdecimal()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(int(name) for name in names if _is_complete(folder / name))


def _is_complete(path: Path) -> bool:
    return all((path / part).is_file() for part in _PARTS)


def describe(folder: Path, step: int | None = None) -> Description:
    """Reads what a checkpoint holds, from its JSON alone: no arrays are read and no device is started.

    Args:
        folder: the folder of checkpoints.
        step: which one; None is the newest.

    Raises:
        InputError: there is no such checkpoint, or its JSON is damaged.
    """
    steps = complete_steps(folder)
    if not steps:
        raise InputError(f"{folder} holds no complete checkpoint; train first, or name another --output")
    step = steps[-1] if step is None else step
    if step not in steps:
        raise InputError(
            f"{folder} holds no complete checkpoint of step {step}; there are {', '.join(map(str, steps))}"
        )
    try:
        saved = json.loads((folder / str(step) / "meta" / "metadata").read_text())
        arrays = tuple(SavedArray(path, tuple(shape), dtype) for path, (dtype, shape) in saved["arrays"].items())
        return Description(step, arrays, saved["meta"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(folder, step, error) from error


def check_fit(
    folder: Path, found: Description, wanted: Mapping[str, Any], partial: bool, padded: Mapping[str, dict[int, int]]
) -> None:
    """Compares a checkpoint with what is asked for, before anything is read: Orbax would cast or pad in silence."""
    saved = {array.path: array for array in found.arrays}
    wrong = []
    for path, x in wanted.items():
        here = SavedArray(path, tuple(x.shape), x.dtype.name)
        if path not in saved:
            wrong.append(f"{path} ({here}) is not in it{nearest(path, saved)}")
            continue
        there = saved[path]
        # A padded dim may have any size that holds the true one.
        same = len(there.shape) == len(here.shape) and all(
            a == b or min(a, b) >= padded.get(path, {}).get(i, math.inf)
            for i, (a, b) in enumerate(zip(there.shape, here.shape, strict=True))
        )
        if not same or there.dtype != here.dtype:
            wrong.append(f"{path} is {there} in it and {here} here")
    if not partial:
        wrong += [f"{path} ({saved[path]}) is only in it" for path in saved if path not in wanted]
    if wrong:
        more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise InputError(
            f"checkpoint {found.step} in {folder} does not fit this configuration: {'; '.join(wrong[:3])}{more}. "
            "Use the configuration that it was trained with (config.yaml beside it), or another --output"
        )


def damaged(folder: Path, step: int, error: BaseException) -> InputError:
    others = [other for other in complete_steps(folder) if other != step]
    return InputError(
        f"checkpoint {step} in {folder} is damaged: {reason(error)}; move {folder / str(step)} away to use "
        f"{f'the one of step {others[-1]}' if others else 'an earlier one (there is none here)'}"
    )


def reason(error: BaseException) -> str:
    """The cause in a few words; tensorstore hides the system's error number in a long text."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    code = re.search(r"os_error_code='(\d+)'", str(error))
    return os.strerror(int(code[1])) if code else " ".join(str(error).split())[:300]
