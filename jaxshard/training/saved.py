"""What a folder of checkpoints holds, from its JSON alone: no Orbax, no arrays, no devices.

    <folder>/<step>/state   the arrays, under flat names such as "params.blocks.attention.query"
    <folder>/<step>/meta    JSON: the caller's values; name, type, shape and checksum of every array; its own checksum

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

from jaxshard.config.file import record_checksum
from jaxshard.errors import InputError, nearest

_PARTS = ("state/_METADATA", "state/manifest.ocdbt", "meta/metadata")


@dataclass(frozen=True)
class SavedArray:
    """One array of a checkpoint: its name, shape and type, as in `params.head.norm.scale float32 [64]`.

    Attributes:
        checksum: of the whole array; None in checkpoints from before there were checksums.
        unpadded: of the array without its padding, where it has some.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    checksum: str | None = None
    unpadded: str | None = None

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
    return [step for step, lacks in _steps(folder).items() if not lacks]


def incomplete_steps(folder: Path) -> dict[int, str]:
    """Steps of the folders that lack a part of a checkpoint, oldest first, with the first part that each lacks."""
    return {step: lacks for step, lacks in _steps(folder).items() if lacks}


def named_steps(folder: Path) -> list[int]:
    """Steps of all folders that are named as checkpoints are, complete or not, oldest first."""
    return list(_steps(folder))


def _steps(folder: Path) -> dict[int, str]:
    """Steps by which folders are named as a save names them (not 007), with the first part that is missing, or ""."""
    try:
        steps = sorted(int(path.name) for path in folder.iterdir() if re.fullmatch("0|[1-9][0-9]*", path.name))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    missing = lambda path: next((part for part in _PARTS if not (path / part).is_file()), "")
    return {step: missing(folder / str(step)) for step in steps}


def doubts(folder: Path, step: int) -> list[str]:
    """What to say when the checkpoint of a step is used: newer ones that are passed over, and what is not verified."""
    said = [
        f"checkpoint {other} in {folder} is not complete and is passed over for that of step {step}: {lacks} is missing"
        for other, lacks in incomplete_steps(folder).items()
        if other > step
    ]
    if any(array.checksum is None for array in describe(folder, step).arrays):
        said.append(f"checkpoint {step} has no checksums (an older version saved it): its numbers are not verified")
    return said


def content(step: int, arrays: Mapping[str, SavedArray], meta: Mapping[str, Any]) -> dict[str, Any]:
    """What is written as JSON beside the arrays."""
    rows = {path: [x.dtype, list(x.shape), *filter(None, (x.checksum, x.unpadded))] for path, x in arrays.items()}
    body = {"step": step, "arrays": rows, "meta": dict(meta)}
    return body | {"checksum": record_checksum(body)}


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
        rows = saved["arrays"].items()
        arrays = tuple(SavedArray(path, tuple(shape), dtype, *sums) for path, (dtype, shape, *sums) in rows)
        body = {name: value for name, value in saved.items() if name != "checksum"}
        # One without any checksum was saved before there were some.
        summed = any(array.checksum for array in arrays) or saved.keys() != {"arrays", "meta"}
        if summed and saved.get("checksum") != record_checksum(body):
            raise ValueError("meta/metadata has changed since it was written (its checksum differs)")
        if saved.get("step", step) != step:
            raise ValueError(f"it was saved as step {saved['step']}, and its folder has another name since")
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
    """The message for a checkpoint that cannot be used, with the one that can be used instead."""
    others = complete_steps(folder)
    older, newer = [other for other in others if other < step], [other for other in others if other > step]
    other = (older or newer or [None])[-1]
    instead = "there is no other one in this folder: bring back a copy of it, or train again"
    if other is not None:
        instead = f"use the one of step {other} (train --resume {other}; eval and generate: --checkpoint {other})"
    return InputError(f"checkpoint {step} in {folder} is damaged: {reason(error)}; {instead}")


def reason(error: BaseException) -> str:
    """The cause in a few words; tensorstore hides the system's error number in a long text."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    code = re.search(r"os_error_code='(\d+)'", str(error))
    return os.strerror(int(code[1])) if code else " ".join(str(error).split())[:300]
