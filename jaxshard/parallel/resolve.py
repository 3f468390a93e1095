"""What follows from a configuration on a mesh, derived once: program, memory, search, time and check read it here.

Free of devices: the sizes of the axes and the platform are enough, so that it holds for hardware that is not there.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxshard.config import Config, ParallelConfig
from jaxshard.errors import InputError
from jaxshard.models.presets import Architecture
from jaxshard.parallel.axes import BATCH_AXES, DATA, MODEL, REPLICA, SHORT, STAGE, MeshShape
from jaxshard.parallel.mesh import divisors

HALF = ("bf16", "fp16", "pure-bf16")
"""Precisions whose arithmetic has 16 bits."""


@dataclass(frozen=True)
class Resolved:
    """The answers of the rules for one configuration, model, mesh and platform.

    Attributes:
        shape: sizes of the mesh axes.
        zero: ZeRO stage, as asked for or by default.
        parts: pieces in which a step takes its batch: accumulation steps x microbatches.
        apart: mesh axes over which gradients are reduced once a step; see `axes_apart`.
        tables: ZeRO stage whose rule tables hold; see `effective_zero`.
        schedule: name of the pipeline's schedule; None without stages.
        chunks: pieces of layers that each stage holds.
        microbatches: that travel through the stages in one accumulation step; 1 without stages.
        kernel: of attention: cudnn or xla.
        split_kv: kv heads lie on the model axis as query heads do; otherwise every device holds them all.
    """

    shape: MeshShape
    zero: int
    parts: int
    apart: tuple[str, ...]
    tables: int
    schedule: str | None
    chunks: int
    microbatches: int
    kernel: str
    split_kv: bool


def resolve(config: Config, arch: Architecture, shape: MeshShape, platform: str) -> Resolved:
    """Applies every rule once. Sizes that do not divide are not refused here; see `misfits`."""
    zero = zero_stage(config, shape)
    schedule, chunks = pipeline_schedule(config.parallel) if shape.stage > 1 else (None, 1)
    microbatches = microbatches_of(config, shape)
    parts = config.parallel.accumulation * microbatches
    apart = axes_apart(shape, zero, parts)
    tables, kernel = effective_zero(zero, apart), attention_kernel(arch, config.train.precision, platform)
    split = kv_heads_split(arch, shape)
    return Resolved(shape, zero, parts, apart, tables, schedule, chunks, microbatches, kernel, split)


def zero_stage(config: Config, shape: MeshShape) -> int:
    """The ZeRO stage of a run on a mesh: as configured, else 1 with a pipeline over several data groups, else 0.

    A pipeline sums gradients of many microbatches anyway, and stage 1 reduces them once, as stage 0 does.
    """
    return int(shape.stage > 1 and shape.data > 1) if config.zero is None else config.zero


def axes_apart(shape: MeshShape, zero: int, parts: int) -> tuple[str, ...]:
    """Mesh axes over which gradients are reduced once a step, where it takes its batch in `parts`.

    ZeRO-0 and 1 hold whole gradients, so each data group sums its own. ZeRO-2 and 3 hold shards, and reduce into them
    over `data` in every part; but over `replica`, the slow network, once: each replica sums shards of its own, which
    are no larger.
    """
    return () if parts == 1 else shape.used(BATCH_AXES if zero <= 1 else (REPLICA,))


def effective_zero(zero: int, apart: tuple[str, ...]) -> int:
    """The stage whose tables hold: ZeRO-1 that keeps no sums apart has no reason to hold a whole gradient, and reduces
    straight into its shards, as ZeRO-2 does."""
    return 2 if zero == 1 and not apart else zero


def parts_of(config: Config, shape: MeshShape) -> int:
    """Pieces in which a step takes its batch: accumulation steps x microbatches."""
    return config.parallel.accumulation * microbatches_of(config, shape)


def zero_tables(config: Config, shape: MeshShape) -> int:
    """The ZeRO stage whose rule tables hold for a configuration on a mesh."""
    zero = zero_stage(config, shape)
    return effective_zero(zero, axes_apart(shape, zero, parts_of(config, shape)))


def pipeline_schedule(parallel: ParallelConfig) -> tuple[str, int]:
    """Name of the schedule and chunks of layers per stage, defaults filled in; nothing is refused."""
    name = parallel.schedule or ("1f1b" if parallel.virtual_stages in (None, 1) else "interleaved")
    return name, parallel.virtual_stages or (2 if name == "interleaved" else 1)


def sequences_of_a_part(config: Config, shape: MeshShape) -> int:
    """Sequences of one accumulation step in one data group."""
    return config.train.global_batch // (shape.batch_ways * config.parallel.accumulation)


def microbatches_of(config: Config, shape: MeshShape) -> int:
    """Microbatches of one accumulation step: as configured, else the smallest number that divides its sequences and is
    at least twice the stages, else one for each sequence; 1 without stages."""
    if shape.stage == 1:
        return 1
    sequences = sequences_of_a_part(config, shape)
    fits = (n for n in divisors(sequences) if n >= 2 * shape.stage)
    return config.parallel.microbatches or next(fits, sequences)


def attention_kernel(arch: Architecture, precision: str, platform: str) -> str:
    """xla or cudnn: cudnn's kernel is for GPUs and 16-bit types.

    Raises:
        InputError: cudnn is asked for where it cannot be had.
    """
    fits = platform in ("gpu", "cuda") and precision in HALF
    if arch.attention == "cudnn" and not fits:
        raise InputError(
            f"model.attention cudnn needs a GPU and 16-bit precision; here are {platform} and {precision}: use "
            "--model.attention auto"
        )
    return "cudnn" if fits and arch.attention != "xla" else "xla"


def kv_heads_split(arch: Architecture, shape: MeshShape) -> bool:
    """Whether kv heads lie on the model axis as query heads do; where they do not divide, a device holds them all."""
    return arch.n_kv_heads % shape.model == 0


def kv_heads_of_a_device(arch: Architecture, ways: Any) -> Any:
    """kv heads that a device of the model axis computes; `ways` is the axis's size, or an array of sizes."""
    return np.where(arch.n_kv_heads % ways == 0, arch.n_kv_heads // ways, arch.n_kv_heads)


@dataclass(frozen=True)
class Misfit:
    """A size that an axis does not divide: the option's name, its value, the axes by their names, and their product."""

    name: str
    size: int
    axes: tuple[str, ...]
    ways: int

    def __str__(self) -> str:
        return f"{self.name} = {self.size} does not divide by {' x '.join(SHORT[a] for a in self.axes)} = {self.ways}"


def divided(config: Config, arch: Architecture) -> tuple[tuple[str, int, tuple[str, ...]], ...]:
    """What the mesh divides, whatever else is chosen: (option, its value, mesh axes)."""
    return (
        ("model.n_heads", arch.n_heads, (MODEL,)),
        ("model.d_ff", arch.d_ff, (MODEL,)),
        ("model.n_layers", arch.n_layers, (STAGE,)),
        ("train.global_batch", config.train.global_batch, (DATA, REPLICA)),
    )


def misfits(config: Config, arch: Architecture, shape: MeshShape) -> Iterator[Misfit]:
    """Sizes that no option but themselves or the mesh can make divide."""
    for name, size, axes in divided(config, arch):
        if size % shape.ways(axes):
            yield Misfit(name, size, axes, shape.ways(axes))
