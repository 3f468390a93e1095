"""The axes of the device mesh, and the tables that say what is split over which. Free of jax.

An axis is a row, outermost (slowest network) first. All axes always exist on the mesh; one of size 1 costs nothing, and
so no code asks which axes are in use. `rules` applies the tables; nothing else names an axis as text.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

REPLICA, STAGE, DATA, MODEL = "replica", "stage", "data", "model"


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh.

    Attributes:
        name: as jax knows it.
        short: as --mesh takes and prints it; the name is taken too.
        holds: what lies on it.
        link: the network that it wants.
    """

    name: str
    short: str
    holds: str
    link: str


ROWS = (
    Axis(REPLICA, "replica", "copies of everything, gradients all-reduced across (slow network)", "between hosts"),
    Axis(STAGE, "pp", "layers split into pipeline stages", "between hosts"),
    Axis(DATA, "dp", "the batch split; gradients reduced; ZeRO shards state here", "any"),
    Axis(MODEL, "tp", "heads, MLP and vocabulary split (tensor parallelism)", "inside a host"),
)

AXES = tuple(row.name for row in ROWS)
SHORT = {row.name: row.short for row in ROWS}
ALIASES = {row.short: row.name for row in ROWS} | {row.name: row.name for row in ROWS}
DEFAULT = DATA
"""The axis that takes all devices where --mesh does not say."""

WEIGHT_RULES: dict[str, tuple[str, ...]] = {
    "layers": (STAGE,),
    "vocab": (STAGE, MODEL),
    "heads": (MODEL,),
    "kv_heads": (MODEL,),
    "mlp": (MODEL,),
}
"""Logical axis of a weight -> mesh axes, outermost first. A name that is not here stays whole."""

ACTIVATION_RULES: dict[str, tuple[str, ...]] = {
    "batch": (REPLICA, DATA),
    "groups": (REPLICA, DATA),
    "heads": (MODEL,),
    "kv_heads": (MODEL,),
    "mlp": (MODEL,),
    "vocab": (STAGE, MODEL),
    "stages": (STAGE,),
}
"""Logical axis of an activation -> mesh axes. Sequence parallelism adds `SEQUENCE_RULES`."""

SEQUENCE_RULES: dict[str, tuple[str, ...]] = {"residual_sequence": (MODEL,)}
"""Sequence parallelism: norms and the residual stream are split along the sequence, too."""

BATCH_AXES = ACTIVATION_RULES["batch"]
VOCAB_AXES = WEIGHT_RULES["vocab"]

ZERO_AXIS = DATA
ZERO_TABLES: dict[int, frozenset[str]] = {
    0: frozenset(),
    1: frozenset({"optimizer"}),
    2: frozenset({"optimizer", "gradients"}),
    3: frozenset({"optimizer", "gradients", "parameters"}),
}
"""ZeRO stage -> classes of state that are sharded over the data axis (ZeRO, Rajbhandari et al. 2020, section 5)."""


def axes_text(axes: Iterable[str], own: bool = False) -> str:
    """ "dp+tp" as --mesh names them, or "-"; those of the user's `own` mesh by the names that they have there."""
    return "+".join(axis if own else SHORT.get(axis, axis) for axis in axes) or "-"


def in_short(name: str, own: bool = False) -> str:
    """A figure's name, which ends with its axes, with those as --mesh names them: "bytes over dp+tp"."""
    what, over, axes = name.rpartition(" over ")
    return f"{what}{over}{axes_text(axes.split('+'), own)}" if over else name


@dataclass(frozen=True, init=False)
class MeshShape:
    """Sizes of the axes, in the order of the rows; the product is the number of devices.

    `MeshShape(data=4, model=2)`; what is left out has size 1. `shape[axis]` is the size of an axis by its name.
    """

    sizes: tuple[int, ...]

    def __init__(self, **sizes: int):
        assert sizes.keys() <= set(AXES), f"{set(sizes) - set(AXES)} are no axes"
        object.__setattr__(self, "sizes", tuple(sizes.get(axis, 1) for axis in AXES))

    def __getitem__(self, axis: str) -> int:
        return self.sizes[AXES.index(axis)]

    @property
    def replica(self) -> int:
        """Copies of everything."""
        return self[REPLICA]

    @property
    def stage(self) -> int:
        """Pipeline stages."""
        return self[STAGE]

    @property
    def data(self) -> int:
        """Parts of the batch within a replica; with ZeRO also shards of the state."""
        return self[DATA]

    @property
    def model(self) -> int:
        """Parts of every tensor-parallel weight."""
        return self[MODEL]

    @property
    def devices(self) -> int:
        """Product of all sizes."""
        return math.prod(self.sizes)

    @property
    def batch_ways(self) -> int:
        """Parts that a batch is split into."""
        return self.ways(BATCH_AXES)

    @property
    def by_axis(self) -> dict[str, int]:
        """Sizes by the axes' names, outermost first."""
        return dict(zip(AXES, self.sizes, strict=True))

    def ways(self, axes: Iterable[str]) -> int:
        """Parts that something is cut into by these axes: the product of their sizes."""
        return math.prod(self[axis] for axis in axes)

    def used(self, axes: Sequence[str] = AXES) -> tuple[str, ...]:
        """Those of the axes that are larger than 1."""
        return tuple(axis for axis in axes if self[axis] > 1)

    def product_text(self, axes: Sequence[str]) -> str:
        """ "replica 2 x dp 4": those of the axes that are larger than 1, with their sizes."""
        return " x ".join(f"{SHORT[axis]} {self[axis]}" for axis in self.used(axes))

    def __str__(self) -> str:
        return mesh_text({axis: self[axis] for axis in self.used()}) or f"{SHORT[DEFAULT]}=1"

    def __repr__(self) -> str:
        return f"MeshShape({', '.join(f'{axis}={size}' for axis, size in self.by_axis.items() if size > 1)})"


def mesh_text(sizes: Mapping[str, Any]) -> str:
    """ "dp=4,tp=2" as --mesh takes it, from sizes by axis."""
    return ",".join(f"{SHORT[axis]}={size}" for axis, size in sizes.items())
