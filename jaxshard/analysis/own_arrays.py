"""What a function of the user's own takes and gives: arrays in several copies, arguments whose memory could be reused.

Shardings and donation are read from the compiled function, so that what the compiler chose for outputs counts.
"""

import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding, Sharding

from jaxshard.analysis.reasons import SCALARS
from jaxshard.parallel.rules import Replicated


@dataclass(frozen=True)
class Undonated:
    """An argument that an output could take the place of, and which is not donated."""

    path: str
    number: int
    """Of the argument, as `donate_argnums` counts."""
    bytes: int
    """On one device."""
    like: str
    """The output."""


@dataclass(frozen=True)
class _Array:
    path: str
    number: int
    shape: tuple[int, ...]
    dtype: Any
    sharding: Sharding
    donated: bool

    @property
    def local(self) -> tuple[int, ...]:
        return self.sharding.shard_shape(self.shape)

    @property
    def bytes(self) -> int:
        return math.prod(self.local) * self.dtype.itemsize

    @property
    def form(self) -> tuple[Any, ...]:
        """What is equal where one array can take another's place."""
        return self.shape, self.dtype, self.local

    @property
    def copies(self) -> int:
        return len(self.sharding.device_set) * math.prod(self.local) // max(1, math.prod(self.shape))


def held_in_copies(function: Callable[..., Any], executable: jax.stages.Compiled) -> list[Replicated]:
    """Arguments and outputs of which several devices hold the same part, those that take most first."""
    found = []
    for array in (*_arguments(function, executable), *_outputs(executable)):
        if array.copies > 1 and math.prod(array.shape) > SCALARS:
            found.append(Replicated(array.path, array.bytes, _why(array)))
    return sorted(found, key=lambda leaf: -leaf.bytes)


def _why(array: _Array) -> str:
    count = len(array.sharding.device_set)
    if array.copies == count:
        return f"every one of {count} devices holds all of it"
    over = ""
    if isinstance(array.sharding, NamedSharding):
        entries = (entry for entry in array.sharding.spec if entry is not None)
        used = {axis for entry in entries for axis in ((entry,) if isinstance(entry, str) else entry)}
        over = " and ".join(axis for axis, size in array.sharding.mesh.shape.items() if size > 1 and axis not in used)
    return f"{array.copies} devices hold the same part" + (f": it is whole over {over}" if over else "")


def undonated(function: Callable[..., Any], executable: jax.stages.Compiled) -> list[Undonated]:
    """Arguments that are not donated though an output has their shape, type and sharding: one for each such output."""
    arguments, outputs = list(_arguments(function, executable)), list(_outputs(executable))
    taken = Counter(array.form for array in arguments if array.donated)
    free: dict[Any, list[_Array]] = {}
    for output in outputs:
        if taken[output.form]:
            taken[output.form] -= 1
        elif math.prod(output.shape) > SCALARS:
            free.setdefault(output.form, []).append(output)
    found = []
    for array in arguments:
        if not array.donated and free.get(array.form):
            found.append(Undonated(array.path, array.number, array.bytes, free[array.form].pop(0).path))
    return found


def _arguments(function: Callable[..., Any], executable: jax.stages.Compiled) -> Iterator[_Array]:
    """Positional arguments that the function reads."""
    leaves = jax.tree_util.tree_leaves_with_path(executable.args_info[0])
    shardings = jax.tree.leaves(executable.input_shardings[0], is_leaf=lambda x: x is None)
    names = _names(function)
    for (path, info), sharding in zip(leaves, shardings, strict=True):
        number = path[0].idx
        rest = jax.tree_util.keystr(path[1:], simple=True, separator=".")
        name = names[number] if number < len(names) else f"argument {number}"
        if sharding is not None:  # one that is not read has none
            yield _Array(
                f"{name}.{rest}" if rest else name, number, info.shape, info.dtype, sharding, bool(info.donated)
            )


def _names(function: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _outputs(executable: jax.stages.Compiled) -> Iterator[_Array]:
    leaves = jax.tree_util.tree_leaves_with_path(executable.out_info)
    for (path, info), sharding in zip(leaves, jax.tree.leaves(executable.output_shardings), strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        yield _Array(f"output {name}".strip(), -1, info.shape, info.dtype, sharding, donated=False)
