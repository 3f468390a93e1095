"""Sharding rules: logical axes of a weight -> mesh axes. Parallelism is these tables; the step has no branches.

A weight is declared once, with a name for every dim: ("layers", "embed", "heads", "head_dim"). The table
`WEIGHT_RULES` says on which mesh axis a name lies; that gives tensor and pipeline parallelism. ZeRO is the same
weight with the `data` axis added on one more dim, in one table after another:

| --zero | parameters | gradients | optimizer state |
|--------|------------|-----------|-----------------|
| 0      | base       | base      | base            |
| 1      | base       | base (*)  | base + data     |
| 2      | base       | base+data | base + data     |
| 3      | base+data  | base+data | base + data     |

(*) While gradients are accumulated. Without accumulation ZeRO-1 reduces them straight into base + data, as ZeRO-2.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxshard.errors import InputError
from jaxshard.parallel.axes import ACTIVATION_RULES, WEIGHT_RULES, ZERO_AXIS, ZERO_TABLES, MeshShape


@dataclass(frozen=True)
class Replicated:
    """A weight, or what the optimizer holds for it, that stays whole on an axis although the rules ask to shard it."""

    path: str
    bytes: int
    why: str
    by_zero: bool = False
    """It is ZeRO that asks; else the weight's own axes."""

    def as_json(self) -> dict[str, Any]:
        """As `explain --json` prints it."""
        return {"path": self.path, "bytes": self.bytes, "why": self.why}


def spec_entry(axes: Sequence[str]) -> str | tuple[str, ...] | None:
    """One dim's entry of a PartitionSpec from the mesh axes that shard it."""
    return None if not axes else axes[0] if len(axes) == 1 else tuple(axes)


def base_axes(shape: Sequence[int], logical: Sequence[str | None], mesh: MeshShape) -> list[tuple[str, ...]]:
    """Mesh axes of every dim under the weight rules; a dim that does not divide drops its axes from the left.

    Returns one tuple of mesh axes a dim. A mesh axis is never used for two dims of one weight.
    """
    assert len(shape) == len(logical), (shape, logical)
    used: set[str] = set()
    result = []
    for size, name in zip(shape, logical, strict=True):
        wanted = tuple(axis for axis in WEIGHT_RULES.get(name or "", ()) if mesh[axis] > 1 and axis not in used)
        while wanted and size % mesh.ways(wanted):
            wanted = wanted[1:]
        used.update(wanted)
        result.append(wanted)
    return result


def add_data_axis(
    shape: Sequence[int], logical: Sequence[str | None], axes: Sequence[tuple[str, ...]], mesh: MeshShape
) -> list[tuple[str, ...]] | None:
    """Adds the ZeRO axis on the largest dim that divides: one that is whole yet, else one that is sharded already.

    The layers dim is never taken: a loop over layers would have to gather the whole stack at once.
    Returns None where no dim divides.
    """
    ways = mesh[ZERO_AXIS]
    if ways == 1:
        return list(axes)
    local = [size // mesh.ways(dim) for size, dim in zip(shape, axes, strict=True)]
    free = [i for i, size in enumerate(local) if logical[i] != "layers" and size % ways == 0]
    if not free:
        return None
    best = max(free, key=lambda i: (not axes[i], local[i], -i))
    return [(*dim, ZERO_AXIS) if i == best else dim for i, dim in enumerate(axes)]


@dataclass(frozen=True)
class WeightSpecs:
    """PartitionSpecs of one weight in each of its roles."""

    base: PartitionSpec
    parameters: PartitionSpec
    gradients: PartitionSpec
    optimizer: PartitionSpec


def weight_specs(shape: Sequence[int], logical: Sequence[str | None], mesh: MeshShape, zero: int) -> WeightSpecs:
    """Applies the tables to one weight."""
    axes = base_axes(shape, logical, mesh)
    sharded = add_data_axis(shape, logical, axes, mesh) or axes
    base = PartitionSpec(*map(spec_entry, axes))
    spread = PartitionSpec(*map(spec_entry, sharded))
    tables = ZERO_TABLES[zero]
    pick = lambda name: spread if name in tables else base
    return WeightSpecs(base, pick("parameters"), pick("gradients"), pick("optimizer"))


@dataclass(frozen=True)
class Held:
    """One array of the state, as far as it decides what may stay whole.

    Attributes:
        path: of the weight that it belongs to, or "" where it belongs to none.
        kind: its column in the tables above: parameters or optimizer (masters and moments).
        shape, axes: of the whole array; moments may lack dims of their weight.
        itemsize: bytes of a number.
    """

    path: str
    kind: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    itemsize: int

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


def replicated(arrays: Sequence[Held], mesh: MeshShape, zero: int) -> list[Replicated]:
    """Says of a state where it stays whole although the rules ask to shard it, weight by weight.

    Bytes are those of the parameter where its own axes do not divide, and of all arrays that --zero asks to split and
    that cannot be: with ZeRO-1 and 2 masters and moments, with ZeRO-3 parameters too. Moments count by their own
    shapes: Adafactor's rows may lack the one dim of a matrix that divides.
    """
    weights = {array.path: array for array in arrays if array.kind == "parameters"}
    found: list[Replicated] = []
    whole: dict[tuple[str, tuple[int, ...]], int] = {}
    for array in arrays:
        axes = base_axes(array.shape, array.axes, mesh)
        if array.kind == "parameters":
            found += _off_their_axes(array, axes, mesh)
        asked = array.kind in ZERO_TABLES[zero] and array.path and math.prod(array.shape) > 1 and mesh[ZERO_AXIS] > 1
        if asked and add_data_axis(array.shape, array.axes, axes, mesh) is None:
            key = array.path, array.shape
            whole[key] = whole.get(key, 0) + array.bytes
    for (path, shape), size in whole.items():
        what = f"{shape}" if path in weights and weights[path].shape == shape else f"its moments {shape}"
        why = f"no dim of {what} divides by {ZERO_AXIS} = {mesh[ZERO_AXIS]} (ZeRO-{zero})"
        found.append(Replicated(path, size, why, by_zero=True))
    order = {path: i for i, path in enumerate(weights)}
    return sorted(found, key=lambda leaf: order.get(leaf.path, len(order)))


def _off_their_axes(weight: Held, axes: Sequence[tuple[str, ...]], mesh: MeshShape) -> list[Replicated]:
    found = []
    for dim, name, got in zip(weight.shape, weight.axes, axes, strict=True):
        for axis in WEIGHT_RULES.get(name or "", ()):
            ways = mesh[axis]
            if ways > 1 and axis not in got:
                why = f"{name} = {dim} does not divide by {axis} = {ways}"
                found.append(Replicated(weight.path, weight.bytes, why))
    return found


def check_replicated(found: Sequence[Replicated], state_bytes: int, allowed: Sequence[str]) -> None:
    """Refuses a layout that leaves more than 1 % of the state replicated against --zero.

    Args:
        found: what stays whole.
        state_bytes: of the whole state: parameters, masters and moments.
        allowed: paths of weights that may stay whole, with what belongs to them.

    Raises:
        InputError: names the leaves and how to allow them.
    """
    bad = [leaf for leaf in found if leaf.by_zero and leaf.path not in allowed]
    total = sum(leaf.bytes for leaf in bad)
    if total > 0.01 * state_bytes:
        names = "; ".join(f"{leaf.path}: {leaf.why}" for leaf in bad[:3])
        paths = dict.fromkeys((*allowed, *(leaf.path for leaf in bad)))
        share = f"{100 * total / state_bytes:.1f} %"
        raise InputError(
            f"{total:,} of {state_bytes:,} bytes of parameters, masters and moments ({share}) "
            f"cannot be sharded as --zero asks: {names}. Change dp, or allow them: --parallel.allow_replicated "
            f"'[{', '.join(paths)}]'"
        )


def activation_spec(
    axes: Sequence[str | None], sizes: Sequence[int], mesh: MeshShape, extra: dict[str, tuple[str, ...]]
) -> PartitionSpec:
    """PartitionSpec of an activation; a dim that its axes do not divide stays whole on them."""
    rules = ACTIVATION_RULES | extra
    entries = []
    for name, size in zip(axes, sizes, strict=True):
        wanted = tuple(axis for axis in rules.get(name or "", ()) if mesh[axis] > 1)
        while wanted and size % mesh.ways(wanted):
            wanted = wanted[1:]
        entries.append(spec_entry(wanted))
    return PartitionSpec(*entries)


def local_shape(shape: Sequence[int], spec: PartitionSpec, mesh: MeshShape) -> tuple[int, ...]:
    """Shape of one device's slice."""
    result = []
    for size, entry in zip(shape, tuple(spec) + (None,) * (len(shape) - len(spec)), strict=True):
        axes = () if entry is None else (entry,) if isinstance(entry, str) else entry
        result.append(size // mesh.ways(axes))
    return tuple(result)


def bytes_per_device(abstract: Any, specs: Any, mesh: MeshShape) -> int:
    """Bytes that one device holds of a pytree of shapes under a parallel pytree of specs."""
    leaves = jax.tree.leaves(abstract)
    flat = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    return sum(
        math.prod(local_shape(leaf.shape, spec, mesh)) * leaf.dtype.itemsize
        for leaf, spec in zip(leaves, flat, strict=True)
    )
