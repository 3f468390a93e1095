"""Bytes of the state on one device, to the byte and without devices: from shapes, rules and number types alone.

The weights' table is traced once per model; a layout then costs arithmetic on some sixty rows.
"""

import math
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxshard.config import Config, OptimConfig
from jaxshard.models.presets import Architecture
from jaxshard.models.transformer import describe, padded_vocab
from jaxshard.parallel.axes import ZERO_TABLES, MeshShape
from jaxshard.parallel.precision import POLICIES
from jaxshard.parallel.resolve import zero_stage, zero_tables
from jaxshard.parallel.rules import add_data_axis, base_axes
from jaxshard.training.optimizer import build, owners, state_axes

BATCH_ARRAYS = 4
"""inputs, targets, segments and positions, int32 each."""


@dataclass(frozen=True)
class Row:
    """One array of the state: the path of its weight ("" without one), whole shape, logical axes, bytes of a number."""

    path: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    itemsize: int

    @property
    def group(self) -> str:
        """Top-level group of the parameters."""
        return self.path.partition(".")[0]


@dataclass(frozen=True)
class Table:
    """Rows of parameters (which gradients and masters share) and of the optimizer's state."""

    weights: tuple[Row, ...]
    moments: tuple[Row, ...]


@dataclass(frozen=True)
class StateBytes:
    """Bytes on one device."""

    parameters: int
    gradients: int
    """Of one set of gradients in the layout in which a step sums them."""
    master: int
    optimizer: int
    counts: int
    """Of `optimizer`: what follows no parameter, and stays on the device (`training.state.offloaded`)."""
    counters: int
    """Step, skipped updates, loss scale."""
    batch: int
    offloaded: bool
    """Masters and moments lie in host memory."""

    @property
    def host(self) -> int:
        return self.master + self.optimizer - self.counts if self.offloaded else 0

    @property
    def arguments(self) -> int:
        """Device memory of the step's arguments: what the compiler calls argument size, less host memory."""
        return self.parameters + self.counters + self.batch + self.master + self.optimizer - self.host


def state_bytes(config: Config, arch: Architecture, shape: MeshShape) -> StateBytes:
    """Bytes of each class of state on one device.

    The rules are those of `parallel.rules`: a weight lies as its base table says, and is split over the data axis too
    where the ZeRO stage says so (Rajbhandari et al. 2020, section 5).

    Args:
        config: precision, ZeRO stage, optimizer, batch, offload; its mesh is not read.
        arch: the model.
        shape: sizes of the mesh axes.
    """
    policy, train = POLICIES[config.train.precision], config.train
    table = table_of(arch, config.optim, config.train.precision)
    tables = ZERO_TABLES[zero_tables(config, shape)]
    wide = jnp.dtype(policy.gradients).itemsize
    elements = partial(elements_per_device, shape=shape)
    weights = lambda spread: sum(elements(row, spread=spread) for row in table.weights)
    spread_moments = "optimizer" in ZERO_TABLES[zero_stage(config, shape)]
    bytes_of = lambda row: row.itemsize * (elements(row, spread=spread_moments) if row.shape else 1)
    spread_optimizer = "optimizer" in tables
    return StateBytes(
        parameters=jnp.dtype(policy.parameters).itemsize * weights("parameters" in tables),
        gradients=wide * weights("gradients" in tables),
        master=wide * weights(spread_optimizer) if policy.masters else 0,
        optimizer=sum(bytes_of(row) for row in table.moments),
        counts=sum(bytes_of(row) for row in table.moments if not any(row.axes)),
        counters=4 * (3 + 2 * policy.scaled),
        batch=BATCH_ARRAYS * 4 * train.global_batch // shape.batch_ways * config.data.seq_len,
        offloaded=config.parallel.offload == "optimizer",
    )


def group_gradients(config: Config, arch: Architecture, shape: MeshShape) -> dict[str, int]:
    """Bytes of one set of gradients on one device, by group: embedding, blocks, head."""
    spread = "gradients" in ZERO_TABLES[zero_tables(config, shape)]
    wide = jnp.dtype(POLICIES[config.train.precision].gradients).itemsize
    found: dict[str, int] = {"embedding": 0, "blocks": 0, "head": 0}
    for row in table_of(arch, config.optim, config.train.precision).weights:
        found[row.group] += wide * elements_per_device(row, spread=spread, shape=shape)
    return found


@cache
def elements_per_device(row: Row, shape: MeshShape, spread: bool) -> int:
    """Elements of a weight on one device; the vocabulary is padded for the mesh."""
    sizes = padded(row, shape)
    axes = base_axes(sizes, row.axes, shape)
    if spread:
        axes = add_data_axis(sizes, row.axes, axes, shape) or axes
    return math.prod(sizes) // shape.ways(axis for dim in axes for axis in dim)


def padded(row: Row, shape: MeshShape) -> tuple[int, ...]:
    """The whole shape, with the vocabulary padded for the mesh."""
    ways = shape.stage * shape.model
    return tuple(padded_vocab(n, ways) if a == "vocab" else n for n, a in zip(row.shape, row.axes, strict=True))


@lru_cache(maxsize=32)
def table_of(arch: Architecture, optim: OptimConfig, precision: str) -> Table:
    """Traces model and optimizer once, with the vocabulary without padding for a mesh."""
    policy = POLICIES[precision]
    is_row = lambda x: hasattr(x, "axes")
    model = describe(arch)
    roles = jax.tree.map(lambda w: w.role, model.weights, is_leaf=is_row)
    axes = jax.tree.map(lambda w: w.axes, model.weights, is_leaf=is_row)
    tx = build(optim, roles, axes, {"vocab": arch.vocab_size}, policy.moments)
    kind = policy.gradients if policy.masters else policy.parameters
    shapes = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, kind), model.weights, is_leaf=is_row)
    weights = _rows(shapes, axes, shapes, itemsize=jnp.dtype(policy.parameters).itemsize)
    moments = jax.eval_shape(tx.init, shapes)
    return Table(weights, _rows(moments, state_axes(tx, shapes, axes), shapes))


def _rows(tree: Any, axes: Any, params: Any, itemsize: int = 0) -> tuple[Row, ...]:
    leaves, structure = jax.tree.flatten(tree)
    rows = zip(owners(tree, params), leaves, structure.flatten_up_to(axes), strict=True)
    return tuple(Row(path, tuple(x.shape), tuple(dims), itemsize or x.dtype.itemsize) for path, x, dims in rows)


def zero_bytes(parameters: float, devices: int, stage: int, weights: int = 2, gradients: int = 2, optimizer: int = 12):
    """Bytes of model state on one device by the formulas of ZeRO (Rajbhandari et al. 2020, figure 1 and section 5).

    (w + g + K) Psi for stage 0; each of K, g, w is divided by the number of devices from stage 1, 2, 3 on. With fp16
    parameters and gradients and Adam in mixed precision w = g = 2 and K = 12 (fp32 master, momentum, variance).

    Args:
        parameters: Psi.
        devices: data-parallel devices N_d.
        stage: 0 to 3.
        weights, gradients, optimizer: bytes per parameter.
    """
    share = lambda first: devices if stage >= first else 1
    return parameters * (weights / share(3) + gradients / share(2) + optimizer / share(1))
