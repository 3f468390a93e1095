"""What is known of a training step before it is compiled: sizes, types and the rules' decisions, as plain numbers.

The expected traffic is computed from these; nothing here looks at a compiled program.

Shapes: A accumulation parts, B sequences of one part or microbatch on one device, T sequence, D model width, V padded
vocabulary.
"""

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxshard.models.layers import DOT_NAMES, SAVED_NAMES
from jaxshard.parallel.axes import AXES, STAGE, VOCAB_AXES, MeshShape
from jaxshard.parallel.remat import parse_remat
from jaxshard.parallel.rules import local_shape
from jaxshard.parallel.schedule import Schedule
from jaxshard.training.program import Program

Dims = tuple[int, ...]


@dataclass(frozen=True)
class WeightFact:
    """One weight, as one device sees it."""

    path: str
    group: str
    """embedding, blocks or head."""
    role: str
    """matrix, embedding, norm or bias."""
    local: Dims
    """Shape in use: split as the rules split it, whole over `data`, one layer of a stack."""
    layers: int
    """Layers on this device; 1 outside the blocks."""
    spread: bool
    """Optimizer state is split over `data` (ZeRO-1 and above)."""
    stored_spread: bool
    """The parameter itself is split over `data` (ZeRO-3)."""
    whole: bool
    """Not split over `model` (outside the blocks also not over `stage`), though that has several devices: they may
    share the work of its sums. Norms, biases, learned positions; kv weights where kv heads do not divide."""

    ends_stream: bool
    """Its product is added to the residual stream; other matrices of a block read it."""

    @property
    def elements(self) -> int:
        """Elements of one layer."""
        return math.prod(self.local)

    @property
    def total(self) -> int:
        """Elements of all layers."""
        return self.elements * self.layers

    @property
    def vector(self) -> bool:
        """Norm scales and biases: small, and not needed again by the backward pass of a product."""
        return self.role in ("norm", "bias")

    @property
    def bounded(self) -> bool:
        """Where its gradient is summed first is left to the compiler: see `expected.vector_bounds`."""
        return self.vector or self.whole


@dataclass(frozen=True)
class Facts:
    """A training step, its model and its layout."""

    mesh: MeshShape
    zero: int
    layers: int
    """Layers on one device."""
    width: int
    batch: int
    """Sequences of one accumulation part, or of one microbatch of a pipeline, on one device."""
    length: int
    accumulation: int
    apart: tuple[str, ...]
    """Axes over which gradients are reduced once, after the accumulation loop."""
    sequence_parallel: bool
    split_kv: bool
    heads: int
    """Query heads on one device."""
    kv_heads: int
    head_dim: int
    hidden: int
    """Of the MLP, on one device."""
    attention: str
    """Kernel: xla, or one that holds no array of every pair of positions."""
    platform: str
    tied: bool
    saved: tuple[str, ...] | str
    """What rematerialisation keeps: none (everything), full, dots, offload, or names."""
    loss_chunks: int
    loss_positions: int
    """Positions of all chunks together: T rounded up to whole chunks."""
    compute: str
    """HLO type of activations: bf16, f16, f32 or f64."""
    activation_bytes: int
    """Of one element."""
    parameter_bytes: int
    gradient_bytes: int
    vocab: int
    """Rows of the vocabulary on one device."""
    optimizer: str
    schedule: Schedule | None
    """Of the pipeline of one accumulation part."""
    gathered_once: bool
    """ZeRO-3 in a pipeline: parameters are gathered once a step, not in every tick."""
    weights: tuple[WeightFact, ...] = field(repr=False)

    @property
    def sizes(self) -> dict[str, int]:
        """Axis -> size, outermost first."""
        return dict(zip(AXES, self.mesh.sizes, strict=True))

    def used(self, *axes: str) -> tuple[str, ...]:
        """Those of the axes that have more than one device, in mesh order."""
        return tuple(axis for axis in AXES if axis in axes and self.sizes[axis] > 1)

    @property
    def stream(self) -> int:
        """Elements of the residual stream [B, T, D] of one part or microbatch on one device, whole in sequence."""
        return self.batch * self.length * self.width

    def keeps(self, *names: str) -> bool:
        """Whether the forward pass keeps any of these activations for the backward pass."""
        if self.saved in ("none", "full"):
            return self.saved == "none"
        return any(name in self.saved for name in names)


def facts_of(program: Program) -> Facts:
    """Reads a program's configuration, architecture and layout."""
    config, layout, arch = program.config, program.layout, program.model.arch
    shape, train = layout.shape, config.train
    saved = parse_remat(config.parallel.remat, SAVED_NAMES)
    if saved in ("dots", "offload"):
        saved = DOT_NAMES
    length, pipeline = config.data.seq_len, program.recipe.pipeline
    microbatches = pipeline.schedule.microbatches if pipeline else 1
    chunk = min(config.parallel.loss_chunk, length)
    chunks = -(-length // chunk)
    size = lambda dtype: jnp.dtype(dtype).itemsize
    return Facts(
        mesh=shape,
        zero=layout.zero,
        layers=arch.n_layers // shape.stage,
        width=arch.d_model,
        batch=train.global_batch // (config.parallel.accumulation * shape.batch_ways * microbatches),
        length=length,
        accumulation=config.parallel.accumulation,
        apart=layout.apart,
        sequence_parallel=layout.sequence_parallel and shape.model > 1,
        split_kv=program.recipe.context.split_kv,
        heads=arch.n_heads // shape.model,
        kv_heads=arch.n_kv_heads,
        head_dim=arch.head_dim,
        hidden=arch.d_ff // shape.model,
        attention=program.recipe.context.attention,
        platform=layout.mesh.devices.flat[0].platform,
        tied=arch.tie_embeddings,
        saved=saved,
        loss_chunks=chunks,
        loss_positions=chunks * chunk,
        compute={"bfloat16": "bf16"}.get(name := jnp.dtype(layout.policy.compute).name, name.replace("float", "f")),
        activation_bytes=size(layout.policy.compute),
        parameter_bytes=size(layout.policy.parameters),
        gradient_bytes=size(layout.policy.gradients),
        vocab=program.model.vocab // (shape.stage * shape.model),
        optimizer=config.optim.name,
        schedule=pipeline.schedule if pipeline else None,
        gathered_once=pipeline is not None and pipeline.gather == "step",
        weights=tuple(_weights(program)),
    )


def _weights(program: Program) -> list[WeightFact]:
    shape = program.layout.shape
    rows = jax.tree_util.tree_leaves_with_path(program.model.weights, is_leaf=lambda x: hasattr(x, "axes"))
    specs = jax.tree.leaves(program.layout.specs, is_leaf=lambda x: hasattr(x, "optimizer"))
    found = []
    for (path, row), spec in zip(rows, specs, strict=True):
        stacked = row.axes[0] == "layers"
        local = local_shape(row.shape, spec.base, shape)
        others = {axis for axis in VOCAB_AXES if shape[axis] > 1} - ({STAGE} if stacked else set())
        found.append(
            WeightFact(
                path=jax.tree_util.keystr(path, simple=True, separator="."),
                group=jax.tree_util.keystr(path[:1], simple=True),
                role=row.role,
                local=local[1:] if stacked else local,
                layers=local[0] if stacked else 1,
                spread=_axes(spec.optimizer) != _axes(spec.base),
                stored_spread=_axes(spec.parameters) != _axes(spec.base),
                whole=bool(others) and not others & set(_axes(spec.base)),
                ends_stream=row.axes[-1] == "embed",
            )
        )
    return found


def _axes(spec: PartitionSpec) -> Counter[str]:
    entries: list[Any] = [entry for entry in spec if entry is not None]
    return Counter(axis for entry in entries for axis in ((entry,) if isinstance(entry, str) else entry))
