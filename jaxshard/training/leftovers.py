"""Options that a command takes over from a saved run and that mean nothing, or cannot work, on its own mesh.

What stands on the command line is never touched: if it means nothing it is refused, as in a new run.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import gcd
from pathlib import Path
from typing import Any

from jaxshard.config import Config, ParallelConfig
from jaxshard.config.options import Given, options_of
from jaxshard.errors import InputError
from jaxshard.models.presets import Architecture
from jaxshard.models.transformer import describe
from jaxshard.parallel.axes import STAGE, ZERO_AXIS, MeshShape
from jaxshard.parallel.mesh import parse_mesh
from jaxshard.parallel.resolve import pipeline_schedule, sequences_of_a_part, zero_stage
from jaxshard.training.foresight import AUTO
from jaxshard.training.pipeline_plan import OPTIONS
from jaxshard.training.program import weight_paths


def own_devices(config: Config, given: Given) -> Config:
    """Drops the run's number of faked devices where another mesh is given, which says how many it needs."""
    if "mesh" not in given.options or "fake_devices" in given.options or config.fake_devices is None:
        return config
    open_ended = config.mesh == AUTO or -1 in parse_mesh(config.mesh).values()
    return config if open_ended else replace(config, fake_devices=None, devices="cpu")


def without_leftovers(given: Given, before: str | None, config: Config, arch: Architecture, shape: MeshShape) -> Config:
    """The configuration of a run that goes on, without what only its mesh so far had. The numbers do not depend on it.

    Args:
        given: what stands on the command line.
        before: the mesh so far.
        config: of the run, with what is given over it.
        arch: the model.
        shape: the mesh now.

    Raises:
        InputError: the run's accumulation does not divide what a device now has of the batch. Nothing else is put in
            its place unasked, since memory depends on it.
    """
    if "zero" not in given.options and shape.stage == 1 and config.zero == 1 and _is_default_zero(before):
        config = config.with_parallel(zero=None)
    _check_accumulation(config, given, shape.batch_ways)
    zero = zero_stage(config, shape)
    names: list[str] = [] if zero else ["allow_replicated"]
    if shape.stage == 1:
        names += OPTIONS
    else:
        names += _misfits(config, zero, arch.n_layers, shape)
    if shape.model == 1 or config.data.seq_len % shape.model:
        names.append("sequence_parallel")
    return config.with_parallel(**_defaults(given, names))


def _check_accumulation(config: Config, given: Given, ways: int) -> None:
    batch, parts = config.train.global_batch, config.parallel.accumulation
    if "parallel.accumulation" in given.options or batch % ways or batch // ways == 0:
        return
    own = batch // ways
    if own % parts:
        raise InputError(
            f"parallel.accumulation = {parts} does not divide the {own} sequence{'s' * (own > 1)} that each "
            f"of {ways} data groups has of train.global_batch = {batch}; give --parallel.accumulation {gcd(own, parts)}"
        )


def _is_default_zero(mesh: str | None) -> bool:
    """Whether a run on the mesh takes ZeRO-1 unasked; it is written into the run's configuration like a choice."""
    sizes = parse_mesh(mesh)
    return sizes.get(STAGE, 1) != 1 and sizes.get(ZERO_AXIS, 1) != 1


def _misfits(config: Config, zero: int, layers: int, shape: MeshShape) -> list[str]:
    """Fields that a pipeline reads, and that do not fit this one."""
    parallel, names = config.parallel, []
    _, chunks = pipeline_schedule(parallel)
    whole = parallel.schedule not in (None, "interleaved")
    if chunks > 1 and (whole or layers % (shape.stage * chunks)):
        names += ["schedule", "virtual_stages"]
    if zero < 3:
        names.append("pipeline_gather")
    sequences = sequences_of_a_part(config, shape)
    if parallel.microbatches and sequences % parallel.microbatches:
        names.append("microbatches")
    return names


def _defaults(given: Given, names: list[str]) -> dict[str, Any]:
    """Defaults of those of these fields of `ParallelConfig` that are not given."""
    return {name: getattr(ParallelConfig, name) for name in names if f"parallel.{name}" not in given.options}


def for_forward(given: Given, config: Config, arch: Architecture, shape: MeshShape) -> Config:
    """The configuration of a saved run without what only training needs, for a program that computes no gradients.

    Accumulation, the optimizer's state and what the backward pass recomputes go. Parameters that ZeRO-3 has split stay
    so as far as they can. The batch is filled up until it divides.
    """
    parallel, ways = config.parallel, shape.batch_ways
    batch = -(-config.train.global_batch // ways) * ways
    changes: dict[str, Any] = {
        # A pipeline takes a batch in as many parts as training does, so that no more of it is alive at a time.
        "accumulation": gcd(parallel.accumulation, batch // ways) if shape.stage > 1 else 1,
        "remat": "none",
        "offload": "none",
        "offload_mode": None,
    }
    if "zero" not in given.options or config.zero is None:
        changes["zero"] = 3 if config.zero == 3 else 0
        if changes["zero"]:
            changes["allow_replicated"] = tuple(weight_paths(describe(arch).weights))
    if "parallel.offload" in given.options:
        del changes["offload_mode"]
    changes = {name: value for name, value in changes.items() if f"parallel.{name}" not in given.options}
    if "train.global_batch" not in given.options:
        config = replace(config, train=replace(config.train, global_batch=batch))
    config = replace(config, parallel=replace(parallel, **changes))
    if "model.attention" not in given.options and config.model.attention == "cudnn":
        config = replace(config, model=replace(config.model, attention="auto"))
    return without_leftovers(given, None, config, arch, shape)


def dropped(before: Config, after: Config) -> str:
    """One line that names what was left out; "" where nothing was."""
    old = {option.name: option.default for option in options_of(before)}
    changed = [option.name for option in options_of(after) if option.default != old[option.name]]
    if not changed:
        return ""
    what = ", ".join(f"{name} {old[name]}" for name in changed)
    return f"left out, since they are of the run's mesh so far and change no number: {what}"


@contextmanager
def source_named(config: Config, given: Given, file: Path) -> Iterator[None]:
    """Adds to a message about options of a saved run where they come from, and that the command line goes before.

    Raises:
        InputError: instead of the one without.
    """
    try:
        yield
    except InputError as error:
        plain = {option.name: option.default for option in options_of(Config())}
        # "--train.x 3" within a message is what to give, and not what was found.
        said = str(error).replace("as --zero asks", "as zero asks")
        found = [
            f"{option.name} = {option.default}"
            for option in options_of(config)
            if option.name not in given.options
            and (option.default != plain[option.name] or option.name == "train.global_batch")
            and re.search(rf"(?<![\w.-]){re.escape(option.name)}(?![\w.])", said)
            and option.name != "mesh"
        ]
        if not found:
            raise
        raise InputError(f"{error}. {' and '.join(found)} stand{'s' * (len(found) == 1)} in {file}") from None
