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

from jaxshard.config import Config
from jaxshard.errors import InputError
from jaxshard.parallel.mesh import MeshShape

WEIGHT_RULES: dict[str, tuple[str, ...]] = {
    "layers": ("stage",),
    "vocab": ("stage", "model"),
    "heads": ("model",),
    "kv_heads": ("model",),
    "mlp": ("model",),
}
"""Logical axis of a weight -> mesh axes, outermost first. A name that is not here stays whole."""

ACTIVATION_RULES: dict[str, tuple[str, ...]] = {
    "batch": ("replica", "data"),
    "groups": ("replica", "data"),
    "heads": ("model",),
    "kv_heads": ("model",),
    "mlp": ("model",),
    "vocab": ("stage", "model"),
    "stages": ("stage",),
}
"""Logical axis of an activation -> mesh axes. Sequence parallelism adds "residual_sequence": ("model",)."""

ZERO_AXIS = "data"
ZERO_TABLES: dict[int, frozenset[str]] = {
    0: frozenset(),
    1: frozenset({"optimizer"}),
    2: frozenset({"optimizer", "gradients"}),
    3: frozenset({"optimizer", "gradients", "parameters"}),
}
"""ZeRO stage -> classes of state that are sharded over the data axis (ZeRO, Rajbhandari et al. 2020, section 5)."""


def zero_stage(config: Config, shape: MeshShape) -> int:
    """The ZeRO stage of a run on a mesh: as configured, else 1 with a pipeline over several data groups, else 0.

    A pipeline sums gradients of many microbatches anyway, and stage 1 reduces them once, as stage 0 does.
    """
    if config.zero is not None:
        return config.zero
    return int(shape.stage > 1 and shape.data > 1)


@dataclass(frozen=True)
class Replicated:
    """A weight that stays whole on an axis although the rules ask to shard it."""

    path: str
    bytes: int
    why: str


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
        wanted = tuple(
            axis for axis in WEIGHT_RULES.get(name or "", ()) if getattr(mesh, axis) > 1 and axis not in used
        )
        while wanted and size % math.prod(getattr(mesh, axis) for axis in wanted):
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
    ways = getattr(mesh, ZERO_AXIS)
    if ways == 1:
        return list(axes)
    local = [size // math.prod(getattr(mesh, a) for a in dim) for size, dim in zip(shape, axes, strict=True)]
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


def replicated(
    path: str, shape: Sequence[int], logical: Sequence[str | None], mesh: MeshShape, zero: int, itemsize: int
) -> list[Replicated]:
    """Says for one weight where it stays whole although the rules ask to shard it."""
    found = []
    size = math.prod(shape) * itemsize
    axes = base_axes(shape, logical, mesh)
    for dim, name, got in zip(shape, logical, axes, strict=True):
        for axis in WEIGHT_RULES.get(name or "", ()):
            ways = getattr(mesh, axis)
            if ways > 1 and axis not in got:
                found.append(Replicated(path, size, f"{name} = {dim} does not divide by {axis} = {ways}"))
    if zero and getattr(mesh, ZERO_AXIS) > 1 and add_data_axis(shape, logical, axes, mesh) is None:
        ways = getattr(mesh, ZERO_AXIS)
        found.append(Replicated(path, size, f"no dim of {tuple(shape)} divides by {ZERO_AXIS} = {ways} (ZeRO-{zero})"))
    return found


def check_replicated(found: Sequence[Replicated], parameter_bytes: int, allowed: Sequence[str]) -> None:
    """Refuses a layout that leaves more than 1 % of the state replicated against --zero.

    Moments and masters lie as their parameters do, so the share of the parameters is the share of the state.

    Args:
        found: weights that stay whole.
        parameter_bytes: of all parameters, in the type that `found` counts in.
        allowed: paths that may stay whole.

    Raises:
        InputError: names the leaves and how to allow them.
    """
    bad = [leaf for leaf in found if "ZeRO" in leaf.why and leaf.path not in allowed]
    total = sum(leaf.bytes for leaf in bad)
    if total > 0.01 * parameter_bytes:
        names = "; ".join(f"{leaf.path}: {leaf.why}" for leaf in bad[:3])
        raise InputError(
            f"{total:,} of {parameter_bytes:,} bytes of parameters ({100 * total / parameter_bytes:.1f} %) and their "
            f"optimizer state cannot be sharded as --zero asks: "
            f"{names}. Change dp, or allow them: --train.allow_replicated "
            f"'[{', '.join(leaf.path for leaf in bad)}]'"
        )


def activation_spec(
    axes: Sequence[str | None], sizes: Sequence[int], mesh: MeshShape, extra: dict[str, tuple[str, ...]]
) -> PartitionSpec:
    """PartitionSpec of an activation; a dim that its axes do not divide stays whole on them."""
    rules = ACTIVATION_RULES | extra
    entries = []
    for name, size in zip(axes, sizes, strict=True):
        wanted = tuple(axis for axis in rules.get(name or "", ()) if getattr(mesh, axis) > 1)
        while wanted and size % math.prod(getattr(mesh, axis) for axis in wanted):
            wanted = wanted[1:]
        entries.append(spec_entry(wanted))
    return PartitionSpec(*entries)


def local_shape(shape: Sequence[int], spec: PartitionSpec, mesh: MeshShape) -> tuple[int, ...]:
    """Shape of one device's slice."""
    result = []
    for size, entry in zip(shape, tuple(spec) + (None,) * (len(shape) - len(spec)), strict=True):
        axes = () if entry is None else (entry,) if isinstance(entry, str) else entry
        result.append(size // math.prod(getattr(mesh, axis) for axis in axes))
    return tuple(result)


def bytes_per_device(abstract: Any, specs: Any, mesh: MeshShape) -> int:
    """Bytes that one device holds of a pytree of shapes under a parallel pytree of specs."""
    leaves = jax.tree.leaves(abstract)
    flat = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    return sum(
        math.prod(local_shape(leaf.shape, spec, mesh)) * leaf.dtype.itemsize
        for leaf, spec in zip(leaves, flat, strict=True)
    )
