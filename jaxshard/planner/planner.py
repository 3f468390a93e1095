"""The command `plan`: which parallelism for this model on this hardware, before any of it is used."""

import contextlib
import functools
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxshard.analysis.calibration import calibrated
from jaxshard.analysis.lock import check_writable
from jaxshard.analysis.pool import setting
from jaxshard.analysis.timeline import Timeline
from jaxshard.config import Config
from jaxshard.config.options import Given
from jaxshard.console import Console
from jaxshard.data.tokenizer import IdTokenizer, load_tokenizer
from jaxshard.errors import InputError
from jaxshard.models.presets import Architecture, architecture
from jaxshard.parallel.mesh import open_devices
from jaxshard.planner.advice import reasons
from jaxshard.planner.confirm import Answers, compiler_missing, confirmed, tokenizer_size
from jaxshard.planner.host_memory import fitting_parts, within_host
from jaxshard.planner.prediction import is_known
from jaxshard.planner.ranking import MARGIN, PREFERENCE, Scored, Search
from jaxshard.planner.refusal import NothingFits, refused, searched
from jaxshard.planner.search import DEPENDENT, SEARCHED, Candidate, apply, pins_of
from jaxshard.training.program import attention_kernel
from jaxshard.views.plan_tables import model_name, show
from jaxshard.xla.hardware import CHIPS, Target, parse_target

ROWS = 10
"""Plans in the table."""


@dataclass(frozen=True)
class Plan:
    """A layout to offer."""

    scored: Scored
    command: str
    compiled_peak: int | None
    """The compiler's figure; None where it was not asked."""
    mfu: float | None
    seconds: float | None
    """None where the machine's speed is not known."""
    reasons: tuple[str, ...] = ()
    timeline: Timeline | None = None
    """Of the compiled schedule; None where it was not compiled or the machine's speed is not known."""

    def as_json(self) -> dict[str, Any]:
        """The plan as `plan --json` prints it."""
        c = self.scored.candidate
        return {
            "command": self.command,
            "mesh": str(c.shape),
            "zero": c.zero,
            "remat": c.remat,
            "microbatches": c.microbatches,
            "accumulation": c.accumulation,
            "offload": c.offload,
            "memory": self.scored.memory.by_class(),
            "compiled_peak": self.compiled_peak,
            "fits": True,  # by the compiler where it was asked, else by the estimate: what does not is not listed
            "step_seconds": self.seconds,
            "mfu": self.mfu,
            "reasons": list(self.reasons),
            "compiled_time": None if self.timeline is None else self.timeline.as_json(),
        }


def run(
    config: Config,
    *,
    console: Console,
    given: Given,
    target: str,
    best: bool,
    network: str | None,
    memory_limit: float | None,
    fewest: bool,
    confirm: int,
    calibration: str | None,
    report: str | None,
) -> dict[str, Any]:
    """Searches, confirms, and prints; options as in `commands.PlanOptions`.

    Raises:
        InputError: unknown target or preset, pins that cannot be met, or nothing fits.
    """
    hardware = hardware_of(config, target, given, network)
    if calibration is not None:
        hardware = calibrated(hardware, Path(calibration), network)
    check_options(hardware, memory_limit, fewest, report)
    config, notes = _with_precision(config, hardware, given)
    arch = architecture(config.model, tokenizer_size(config), config.data.seq_len)
    if config.data.seq_len == Config().data.seq_len < arch.max_seq_len and "data.seq_len" not in given.options:
        notes.append(
            f"Sequences of {config.data.seq_len} tokens, the default; the model takes up to "
            f"{arch.max_seq_len:,}: --data.seq_len."
        )
    _runs(config, arch, hardware)
    asking = functools.cache(
        lambda name: console.line(f"asking the compiler for {name} about the best {confirm}, one after the other ...")
    )
    silent = lambda name: None
    found, plans, more = find(config, arch, hardware, given, memory_limit, fewest, confirm, silent if best else asking)
    if best:
        console.command(plans[0].command)
    else:
        show(console, found, plans, notes + more)
    if report is not None:
        from jaxshard.views.plan_report import write_report

        write_report(found, plans, notes + more, Path(report))
        if not best:
            console.line(f"report: {report}")
    return {"target": found.target.name, "model": model_name(config, arch), "plans": [plan.as_json() for plan in plans]}


def hardware_of(config: Config, target: str, given: Given, network: str | None) -> Target:
    """What is planned for: a named target, or the devices that a run would take here.

    Raises:
        InputError: no such target or devices, or an option that says nothing about it.
    """
    if target.strip().lower() == "local":
        mesh = None if config.mesh == "auto" else config.mesh
        devices = open_devices(mesh, config.devices, config.fake_devices)
        found = parse_target(f"cpu:{len(devices)}" if devices[0].platform == "cpu" else "local")
    else:
        found = parse_target(target)
        for name in ("devices", "fake_devices"):
            if name in given.options:
                raise InputError(
                    f"--{name} {given.options[name]} and --target {target} both say what the devices are: drop one"
                )
    if network is None:
        return found
    bandwidth = _network(network)
    if not is_known(found) or found.hosts == 1 or found.chip.platform == "tpu":
        why = "all chips of a slice are joined by ICI" if found.chip.platform == "tpu" else "it is one host"
        why = why if is_known(found) else "no time is predicted for it"
        raise InputError(f"--network {network} changes nothing on {found.name}: {why}; leave it out")
    return found.with_network(bandwidth)


def check_options(target: Target, memory_limit: float | None, fewest: bool, report: str | None) -> None:
    """Refuses, before anything is searched, a file that cannot be written and options without a meaning here."""
    usable = target.chip.usable_bytes
    if memory_limit is not None and usable and memory_limit * 2**30 > usable:
        raise InputError(
            f"--memory_limit {memory_limit:g} limits nothing: a program has {usable / 2**30:.2f} GiB of a device of "
            f"{target.name}; give less, or leave it out"
        )
    if fewest and target.chip.name not in CHIPS:
        raise InputError(f"--fewest needs a target whose sizes are known, such as --target h100:64, not {target.name}")
    if report is not None and not report.strip():
        raise InputError("--report is empty: name a file, or leave it out")
    if report is not None:
        check_writable("--report", Path(report))


def find(
    config: Config,
    arch: Architecture,
    target: Target,
    given: Given,
    memory_limit: float | None,
    fewest: bool,
    confirm: int,
    asking: Callable[[str], None] = lambda name: None,
) -> tuple[Search, list[Plan], list[str]]:
    """The search of a target, or of the smallest part of it with a plan, its plans, and notes as of `offered`.

    Args:
        memory_limit: GiB.
        asking: called with a target's name before each compilation.

    Raises:
        InputError: nothing is legal, or nothing fits.
    """
    pins = pins_of(config, given.options)
    limit = None if memory_limit is None else memory_limit * 2**30
    for part in fitting_parts(config, arch, target, pins, limit, most=target.count) if fewest else ():
        with contextlib.suppress(NothingFits):  # the compiler refuses all that should fit there
            return part, *offered(part, given, confirm, asking)
    found = searched(config, arch, target, pins, limit)
    return found, *offered(found, given, confirm, asking)


def offered(
    found: Search, given: Given, confirm: int, asking: Callable[[str], None] = lambda name: None
) -> tuple[list[Plan], list[str]]:
    """Plans, best first, and notes. The best `confirm` have been compiled; what the compiler refuses is left out.

    Raises:
        InputError: nothing fits, or the compiler refuses everything that it was asked about.
    """
    missing = compiler_missing(found.target) if confirm else None
    notes = []
    if confirm == 0 or missing:
        how = f" ({missing})" if missing else "; --confirm 3 asks the compiler about the best three"
        notes.append(f"Memory figures are estimates, usually within 10 % of the compiler's{how}.")
        confirm = 0
    if found.timed:
        notes.append("Times are predictions from shapes and datasheets; docs/time-model.md has their error so far.")
    plans: list[Plan] = []
    answers = Answers(notes, asking=asking)
    for scored, verdict in confirmed(found, confirm, answers):
        command = command_line(found.config, scored.candidate, given, found.target.chip.platform)
        chip, peak = found.target.chip, verdict.peak or scored.memory.total / (1 - MARGIN)
        command = setting(chip.platform, chip.memory_bytes, peak) + command
        seconds = scored.seconds if found.timed else None
        plans.append(Plan(scored, command, verdict.peak, found.mfu(scored), seconds, (), verdict.timeline))
        if len(plans) == ROWS:
            break
    if not plans:
        if not within_host(found):
            raise refused(found, pins_of(found.config, given.options), found.memory_limit, answers)
        tried = " ".join(each.sentence for each in answers.refused)
        raise NothingFits(f"the compiler for {found.target.name} refuses every layout that should fit: {tried}")
    if any(plan.scored.memory.gradients == 0 for plan in plans):
        notes.append(
            "Memory is that of the fullest moment of a step; where that is the loss, gradients are 0: none exist yet."
        )
    ordered, first = by_compiled_time(plans), plans[0].scored.candidate
    if ordered[0] is not plans[0]:
        notes.append(
            f"From shapes {first.shape} with ZeRO-{first.zero} comes first; the plans that were compiled stand in the "
            "order of their compiled schedules."
        )
    return [replace(plan, reasons=tuple(reasons(found, plan.scored))) for plan in ordered], notes


def by_compiled_time(plans: list[Plan]) -> list[Plan]:
    """The plans whose schedule is known in its order, a simpler one before one that is hardly faster; the others stay
    where they are."""
    seconds = lambda plan: plan.timeline.seconds * (1 + PREFERENCE @ plan.scored.candidate.complexity)
    known = iter(sorted((plan for plan in plans if plan.timeline), key=seconds))
    return [next(known) if plan.timeline else plan for plan in plans]


def command_line(config: Config, candidate: Candidate, given: Given, platform: str) -> str:
    """The command that trains with a layout: what the user gave, and what was chosen.

    Args:
        config: that was searched.
        candidate: the layout.
        given: the user's own options.
        platform: of the devices that the plan is for; options that ask for others are left out.
    """
    chosen: dict[str, str | None] = {"mesh": str(candidate.shape)}
    final, values, defaults = (
        {"zero": each.zero} | {f"train.{k}": v for k, v in vars(each.train).items()}
        for each in (apply(config, candidate), config, Config())
    )
    for option in (*SEARCHED, *DEPENDENT):
        value = final[option]
        if value != defaults[option] or value != values[option]:
            chosen[option] = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    if config.train.precision != defaults["train.precision"] and "train.precision" not in given.options:
        chosen["train.precision"] = config.train.precision
    dropped = {"json", "mesh", *SEARCHED, *DEPENDENT}
    if platform != "cpu" or config.fake_devices not in (None, candidate.shape.devices):
        dropped.add("fake_devices")
        if config.fake_devices is not None and "config" in given.options:  # where the file may say so
            chosen["fake_devices"] = "null"
    if config.devices not in ("auto", platform):
        dropped.add("devices")
        if "config" in given.options:
            chosen["devices"] = "auto"
    kept = {name: text for name, text in given.options.items() if name not in dropped}
    words = ["python", "run.py", *_words(kept), *_words(chosen)]
    return shlex.join(words)


def _words(options: Mapping[str, str | None]) -> Iterator[str]:
    for name, text in options.items():
        yield f"--{name}"
        if text is not None:
            yield text


def _runs(config: Config, arch: Architecture, target: Target) -> None:
    """Refuses what no layout can run: a kernel that the chip does not have, ids that the model does not know."""
    attention_kernel(arch, config, target.chip.platform)
    try:
        tokenizer = load_tokenizer(config.data.tokenizer)
    except InputError:
        return  # it may lie where the run will be
    if not isinstance(tokenizer, IdTokenizer) and arch.vocab_size < tokenizer.vocab_size:
        raise InputError(
            f"model.vocab_size is {arch.vocab_size:,}, but data.tokenizer {tokenizer.name!r} has "
            f"{tokenizer.vocab_size:,} tokens: set --model.vocab_size to at least {tokenizer.vocab_size:,}"
        )


def _with_precision(config: Config, target: Target, given: Given) -> tuple[Config, list[str]]:
    """bf16 on accelerators, unless the user says otherwise."""
    free = "train.precision" not in given.options and config.train.precision == Config().train.precision
    if not free or target.chip.platform == "cpu":
        return config, []
    note = "Precision bf16 (fp32 masters and moments): --train.precision chooses another."
    return replace(config, train=replace(config.train, precision="bf16")), [note]


def _network(text: str) -> float:
    """Bytes a second from "gbps=25": Gbit/s that one device sends between hosts."""
    found = re.fullmatch(r"(?:gbps=)?(\d+(?:\.\d+)?)", text.strip().lower())
    if not found or float(found[1]) <= 0:
        raise InputError(f"network {text!r}: write gbps=25 for 25 Gbit/s that one device can send between hosts")
    return float(found[1]) * 1e9 / 8
