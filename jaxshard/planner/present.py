"""The planner for a run on the devices that are present: its layout, its memory beforehand, and what to do without it.

`train` is handed these functions (`jaxshard.training.foresight`).
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from jaxshard.analysis.memory import Memory, estimate
from jaxshard.config import Config, ParallelConfig
from jaxshard.config.file import load_run
from jaxshard.config.options import Given
from jaxshard.console import Console
from jaxshard.errors import InputError
from jaxshard.models.presets import architecture
from jaxshard.parallel.axes import AXES, MeshShape
from jaxshard.parallel.mesh import Device, divisors, parse_mesh
from jaxshard.parallel.offload import machine_bytes
from jaxshard.planner.planner import command_line
from jaxshard.planner.ranking import MARGIN, Scored, Search, search
from jaxshard.planner.refusal import fitting, searched
from jaxshard.planner.search import DEPENDENT, SEARCHED, Candidate, Pins, apply, words
from jaxshard.training.describe import size_text
from jaxshard.training.foresight import Forecast
from jaxshard.training.program import Program
from jaxshard.training.start import CONFIG_FILE
from jaxshard.xla.hardware import Target, parse_target
from jaxshard.xla.pool import MOST, VARIABLE

LESS = 0.9
"""After out-of-memory a plan has to take less than this share of what was predicted, where that seemed to fit."""


PLAINLY = 2
"""Times the memory of a machine from which a step on faked devices is refused: the prediction is not that far off."""


def present_target(devices: Sequence[Device]) -> Target:
    """The devices of a run as a target."""
    return parse_target(f"cpu:{len(devices)}" if devices[0].platform == "cpu" else "local")


def device_limit(devices: Sequence[Device], target: Target) -> float | None:
    """Bytes of a device that jax may use, where the device or the table of chips says so."""
    said = [
        (device.memory_stats() or {}).get("bytes_limit")
        for device in devices
        if device.process_index == jax.process_index()
    ]
    known = [size for size in (*said, target.chip.usable_bytes) if size]
    return min(known, default=None)


def layout(
    config: Config,
    devices: Sequence[Device],
    tokenizer_size: int,
    *,
    console: Console,
    given: Given,
    resume: bool,
) -> Config:
    """The configuration with the best plan for the devices that are present, and a line that says what and why.

    What stands on the command line or differs from its default is kept. A run that goes on keeps its layout, as long
    as there are as many devices.

    Raises:
        InputError: nothing is legal or nothing fits.
    """
    values = vars(config.parallel)
    pins = {field: values[field] for option, field in SEARCHED.items() if _pinned(config, option, field, given)}
    dependent = {field: values[field] for field in DEPENDENT.values()}
    saved = _saved(config, len(devices)) if resume else None
    if saved is not None:
        kept = {field: getattr(saved.parallel, field) for field in SEARCHED.values() if field not in pins}
        console.line(f"mesh auto: the run goes on with its layout, {saved.mesh}, ZeRO-{kept.get('zero', config.zero)}")
        return config.with_parallel(mesh=saved.mesh, **kept)
    target = present_target(devices)
    limit = (device_limit(devices, target) or math.inf) * (1 - MARGIN)
    arch = architecture(config.model, tokenizer_size, config.data.seq_len)
    pins |= {field: value for field, value in dependent.items() if value is not None}
    free = Pins({}, pins)
    found = searched(config, arch, target, free, limit)
    plan = fitting(found, free, limit)[0]
    console.line(f"mesh auto: {words(plan.candidate)}: {_why(found, plan, pins)}")
    return apply(config, plan.candidate)


def _why(found: Search, plan: Scored, pins: dict[str, Any]) -> str:
    options = {field: option for option, field in (SEARCHED | DEPENDENT).items()}
    kept = ", ".join(f"{options[field]} {value}" for field, value in pins.items())
    order = f"the fastest by prediction ({plan.seconds:.3g} s a step)" if found.timed else "the least work"
    of = f" of {size_text(int(found.limit))}" if found.limit < math.inf else ""
    size = size_text(plan.memory.total) + of
    more = f"; kept as given: {kept}" if kept else ""
    return f"{order} of {len(found.order):,} layouts that this model allows, {size} on a device{more}"


def _pinned(config: Config, option: str, field: str, given: Given) -> bool:
    if option == "zero" and config.zero is None:
        return False  # --zero null leaves it to the mesh
    return option in given.options or getattr(config.parallel, field) != getattr(ParallelConfig(), field)


def _saved(config: Config, count: int) -> Config | None:
    """The configuration of the run so far, where its mesh has as many devices as there are."""
    file = Path(config.output or ".") / CONFIG_FILE
    if not file.is_file():
        return None
    saved = load_run(file)
    return saved if math.prod(parse_mesh(saved.mesh).values()) == count else None


def forecast(program: Program) -> Forecast:
    """Memory of the step of a program, in closed form, against what a device has.

    Raises:
        InputError: faked devices would take more than `PLAINLY` times what this machine has.
    """
    devices = list(program.layout.mesh.devices.flat)
    limit = device_limit(devices, present_target(devices))
    memory = _estimate(program)
    has = size_text(int(limit)) if limit else ""
    of = f" of {has}" if has else ""
    line = f"predicted: {size_text(memory.total)}{of} on one device ({_largest(memory)})"
    warning = ""
    if limit and memory.total > limit:
        warning = (
            f"the step will probably not fit: {size_text(memory.total)} predicted, {has} on a device; "
            f"--mesh auto takes the best layout that fits{_preallocation(devices[0])}"
        )
    here = sum(device.process_index == jax.process_index() for device in devices)
    if not limit and here * memory.total > machine_bytes():  # faked devices: the system ends a process that takes more
        machine = machine_bytes()
        said = (
            f"{size_text(memory.total)} predicted on each of {here} device{'s' * (here > 1)}, and this machine has "
            f"{size_text(machine)} for all of them"
        )
        if here * memory.total > PLAINLY * machine:
            raise InputError(f"the step cannot fit: {said}; {_smaller_step(program, machine / here)}")
        warning = f"the step will probably not fit: {said}; choose a smaller model or train.global_batch"
    return Forecast(memory.total, line, warning)


def _smaller_step(program: Program, limit: float) -> str:
    """The same batch in more parts, or else the largest of a row of smaller ones, that should fit in `limit` bytes."""
    config, ways = program.config, program.layout.shape.batch_ways
    train = config.train
    microbatches = config.parallel.microbatches or 1
    fits = lambda config: _estimate(program, config).total <= limit
    in_parts = lambda n: config.with_parallel(accumulation=n)
    of_size = lambda n: replace(config, train=replace(train, global_batch=n))
    own = train.global_batch // ways
    parts = (n for n in divisors(own) if n > config.parallel.accumulation and own // n % microbatches == 0)
    more = next((n for n in parts if fits(in_parts(n))), None)
    if more is not None:
        return f"--parallel.accumulation {more} takes the batch in parts that should fit"
    least = ways * config.parallel.accumulation * microbatches
    smaller = [least << n for n in range((train.global_batch // least).bit_length())]
    batch = max((n for n in smaller if fits(of_size(n))), default=None)
    return "choose a smaller model" if batch is None else f"--train.global_batch {batch} should fit"


def remedy(program: Program, *, given: Given) -> str:
    """After out-of-memory: the largest consumers, and the plan nearest to the program's layout that takes less."""
    memory, devices = _estimate(program), list(program.layout.mesh.devices.flat)
    consumers = f"The largest consumers of {size_text(memory.total)} predicted on one device: {_largest(memory)}"
    target = present_target(devices)
    limit = (device_limit(devices, target) or math.inf) * (1 - MARGIN)
    too_much = memory.total > limit  # otherwise it seemed to fit, or nobody knows what would
    limit = limit if too_much else LESS * memory.total
    found = search(program.config, program.model.arch, target, Pins({}, {}), limit)
    try:
        plans = fitting(found, Pins({}, {}), limit)
    except InputError as error:
        return f"{consumers}. No layout helps: {error}"
    plan = nearest_plan(plans, _candidate(program.config, program.layout.shape))
    command = command_line(program.config, plan.candidate, given, target.chip.platform)
    goes_on = command.replace("run.py", "run.py train --resume auto", 1)  # the folder holds the run already
    return (
        f"{consumers}{_preallocation(devices[0])}. The nearest plan that {'fits' if too_much else 'takes less'} is "
        f"{words(plan.candidate)}, with {size_text(plan.memory.total)} on a device:\n  {goes_on}"
    )


def nearest_plan(plans: Sequence[Scored], own: Candidate) -> Scored:
    """The plan that changes the fewest choices of a layout, the first of those."""
    changed = lambda plan: (
        sum(plan.candidate.shape[axis] != own.shape[axis] for axis in AXES)
        + sum(getattr(plan.candidate, field) != getattr(own, field) for field in SEARCHED.values())
    )
    return min(plans, key=changed)


def _candidate(config: Config, shape: MeshShape) -> Candidate:
    fields = {field: getattr(config.parallel, field) for field in SEARCHED.values()}
    fields["zero"] = config.zero or 0
    return Candidate(shape, **fields)


def _estimate(program: Program, config: Config | None = None) -> Memory:
    """In closed form, of the program or of its model under another configuration."""
    layout = program.layout
    platform = present_target(list(layout.mesh.devices.flat)).chip.platform
    return estimate(config or program.config, program.model.arch, layout.shape, platform)


def _largest(memory: Memory) -> str:
    return ", ".join(f"{name} {size_text(size)}" for name, size in memory.largest(4) if size)


def _preallocation(device: Device) -> str:
    """On GPUs jax takes a share of the memory when it starts (docs.jax.dev, GPU memory allocation)."""
    return "" if device.platform in ("cpu", "tpu") else f"; {VARIABLE}={MOST:g} lets jax use more"
