"""From a configuration to the pipeline's plan: defaults, and what is refused before anything is compiled."""

from dataclasses import fields

from jaxshard.config import Config, ParallelConfig
from jaxshard.errors import InputError
from jaxshard.models.presets import Architecture
from jaxshard.parallel.axes import BATCH_AXES, MeshShape
from jaxshard.parallel.mesh import divisors
from jaxshard.parallel.resolve import microbatches_of, pipeline_schedule, sequences_of_a_part
from jaxshard.parallel.schedule import bubble_fraction, layer_order, make
from jaxshard.training.recipe import PipelinePlan

OPTIONS = ("microbatches", "schedule", "virtual_stages", "pipeline_gather")
"""Fields of `ParallelConfig` that only a pipeline reads."""


def plan_pipeline(config: Config, zero: int, arch: Architecture, shape: MeshShape) -> PipelinePlan | None:
    """The schedule of a run; None where the layers are not split over stages.

    The global batch divides by replica x data x accumulation; that is checked before.

    Raises:
        InputError: an option does not apply, or layers or batch do not divide.
    """
    stages = shape.stage
    if stages == 1:
        return _none(config.parallel)
    name, chunks = _schedule(config.parallel)
    layer_order(arch.n_layers, stages, chunks)
    gather = config.parallel.pipeline_gather
    if gather is not None and zero < 3:
        raise InputError(
            f"parallel.pipeline_gather is {gather!r}, but with --zero {zero} every stage holds its "
            "parameters whole and gathers nothing: leave it out, or use --zero 3"
        )
    count = _microbatches(config, shape)
    schedule = make(name, stages, count, chunks)
    evaluation = make(name, stages, count * config.parallel.accumulation, chunks)
    return PipelinePlan(schedule, evaluation, gather or "tick")


def _none(parallel: ParallelConfig) -> None:
    names = [field.name for field in fields(parallel) if field.name in OPTIONS]
    for name in names:
        value = getattr(parallel, name)
        if value is not None:
            also = f"; to take the batch in {value} parts: --parallel.accumulation {value}" * (name == "microbatches")
            raise InputError(
                f"parallel.{name} is {value!r}, but without stages there is no pipeline: leave it out, or split the "
                f"layers with --mesh pp=2,...{also}"
            )


def _schedule(parallel: ParallelConfig) -> tuple[str, int]:
    """Name of the schedule and chunks of layers per stage; refuses chunks of a schedule that has none."""
    name, chunks = pipeline_schedule(parallel)
    if name != "interleaved" and chunks > 1:
        raise InputError(
            f"parallel.virtual_stages is {chunks}, but schedule {name} keeps the layers of a stage in one piece: use "
            "--parallel.schedule interleaved, or leave virtual_stages out"
        )
    return name, chunks


def _microbatches(config: Config, shape: MeshShape) -> int:
    """Number of microbatches of one accumulation part; refuses one that does not divide its sequences."""
    ways = shape.batch_ways * config.parallel.accumulation
    sequences, count = sequences_of_a_part(config, shape), microbatches_of(config, shape)
    if sequences % count:
        parts = " x ".join(
            filter(None, [shape.product_text(BATCH_AXES), f"accumulation {config.parallel.accumulation}"])
        )
        best = min(divisors(sequences), key=lambda n: (abs(n - count), -n))
        batch = max(1, round(config.train.global_batch / (ways * count))) * ways * count
        raise InputError(
            f"parallel.microbatches = {count} does not divide the {sequences} sequences of one part "
            f"(train.global_batch = {config.train.global_batch} / ({parts})); try --parallel.microbatches {best} or "
            f"--train.global_batch {batch}"
        )
    return count


def pipeline_notes(plan: PipelinePlan | None) -> tuple[list[str], list[str]]:
    """Lines to show before a run: (information, warnings)."""
    if plan is None:
        return [], []
    table = plan.schedule
    bubble = f"{100 * bubble_fraction(table):.1f} %"
    chunks = f" of {table.chunks} chunks" if table.chunks > 1 else ""
    line = (
        f"Pipeline: {table.name}, {table.stages} stages{chunks}, {table.microbatches} microbatches, "
        f"{table.saved_slots} saved inputs a stage, bubble {bubble}"
    )
    if table.microbatches >= table.stages:
        return [line], []
    return [line], [
        f"parallel.microbatches = {table.microbatches} is fewer than pp = {table.stages}: stages are idle {bubble} of "
        f"the time; {2 * table.stages} or more microbatches keep them busy"
    ]
