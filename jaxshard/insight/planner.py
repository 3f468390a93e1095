"""The command `plan`: which parallelism for this model on this hardware, before any of it is used."""

import math
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from jaxshard.config import Config
from jaxshard.console import Console
from jaxshard.errors import InputError
from jaxshard.insight.advice import reasons
from jaxshard.insight.calibration import calibrated
from jaxshard.insight.compile import DoesNotFit
from jaxshard.insight.confirm import compile_step, compiler_missing
from jaxshard.insight.hardware import Target, parse_target
from jaxshard.insight.host_memory import host_limit, smallest_fitting, within_host
from jaxshard.insight.memory import gib
from jaxshard.insight.plan_tables import model_name, show
from jaxshard.insight.ranking import PREFERENCE, Scored, Search, limit_of
from jaxshard.insight.refusal import refused, searched
from jaxshard.insight.search import DEPENDENT, SEARCHED, Candidate, apply, pins_of
from jaxshard.insight.timeline import Timeline, timeline
from jaxshard.models.presets import Architecture, architecture
from jaxshard.options import Given
from jaxshard.parallel.mesh import AXES
from jaxshard.training.program import attention_kernel

BYTE_TOKENS = 257
"""Vocabulary of the default tokenizer (data.tokenizer bytes)."""
EDGE = 1.2
"""What the closed form may be too high by, at worst (docs/planner-memory.md)."""
ROWS = 10
"""Plans in the table."""


@dataclass(frozen=True)
class Plan:
    """A layout to offer."""

    scored: Scored
    command: str
    compiled_peak: int | None
    """The compiler's figure; None where it was not asked."""
    fits: bool
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
            "fits": self.fits,
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
    hardware = parse_target(target)
    if network is not None:
        hardware = hardware.with_network(_network(network))
    if calibration is not None:
        hardware = calibrated(hardware, Path(calibration), network)
    config, notes = _with_precision(config, hardware, given)
    arch = architecture(config.model, BYTE_TOKENS if config.data.tokenizer == "bytes" else None, config.data.seq_len)
    _runs(config, arch, hardware)
    found = find(config, arch, hardware, given, memory_limit, fewest)
    plans, more = offered(found, given, confirm)
    if best:
        console.line(plans[0].command)
    else:
        show(console, found, plans, notes + more)
    if report is not None:
        from jaxshard.insight.plan_report import write_report

        write_report(found, plans, notes + more, Path(report))
        if not best:
            console.line(f"report: {report}")
    return {"target": found.target.name, "model": model_name(config, arch), "plans": [plan.as_json() for plan in plans]}


def find(
    config: Config, arch: Architecture, target: Target, given: Given, memory_limit: float | None, fewest: bool
) -> Search:
    """The search of a target, or of the smallest part of it that fits.

    Args:
        memory_limit: GiB.

    Raises:
        InputError: nothing is legal.
    """
    pins = pins_of(config, given.options)
    limit = None if memory_limit is None else memory_limit * 2**30
    if fewest:
        part = smallest_fitting(config, arch, target, pins, limit, most=target.count)
        if part is not None:
            return part
    return searched(config, arch, target, pins, limit)


def offered(found: Search, given: Given, confirm: int) -> tuple[list[Plan], list[str]]:
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
    for scored, verdict in _confirmed(found, confirm, notes):
        command = command_line(found.config, scored.candidate, given)
        seconds = scored.seconds if found.timed else None
        plans.append(Plan(scored, command, verdict.peak, True, found.mfu(scored), seconds, (), verdict.timeline))
        if len(plans) == ROWS:
            break
    if not plans:
        own = found.limit if found.limit < limit_of(found.target, None) else None
        tried = " ".join(note for note in notes if note.startswith("Not offered"))
        if not within_host(found):
            raise refused(found, pins_of(found.config, given.options), own, tried)
        raise InputError(f"the compiler for {found.target.name} refuses every layout that should fit: {tried}")
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


@dataclass(frozen=True)
class Verdict:
    """What the compiler says about a layout."""

    good: bool
    peak: int | None = None
    """Bytes on a device; None where it was not asked or cannot say."""
    timeline: Timeline | None = None


def _confirmed(found: Search, confirm: int, notes: list[str]) -> Iterator[tuple[Scored, Verdict]]:
    """Fitting layouts in order, the best of each mesh and ZeRO stage, the first `confirm` with the compiler's verdict.

    After a refusal the next smaller layout of the same mesh and stage has its turn. Where the closed form says that
    nothing fits, but only just, the compiler is asked about the layout that takes the least.
    """
    done: set[tuple] = set()
    refused: dict[tuple, int] = {}
    compiled = 0
    for scored in within_host(found) or (_near_the_edge(found) if confirm else []):
        key = (scored.candidate.shape, scored.candidate.zero)
        if key in done or scored.memory.total >= refused.get(key, scored.memory.total + 1):
            continue
        if compiled >= confirm:
            if key not in refused:
                done.add(key)
                yield scored, Verdict(True)
            continue
        if len(refused) > 2 * confirm:
            continue
        verdict = _verdict(found, scored, notes)
        if not verdict.good:
            refused[key] = scored.memory.total
            continue
        compiled += 1
        done.add(key)
        yield scored, verdict


def _near_the_edge(found: Search) -> list[Scored]:
    """The layout that takes the least, where the closed form's error may be what keeps it out."""
    least = found.smallest()
    fits = least.memory.total <= EDGE * found.limit and least.memory.host <= host_limit(found.target)
    return [least] if fits else []


def _verdict(found: Search, scored: Scored, notes: list[str]) -> Verdict:
    """Whether the compiler takes a layout, its bytes on a device and its time; a note where it does not.

    The bytes are None where host memory is used and the compiler for absent devices cannot handle that: it says so with
    an internal error, which is no verdict on the layout.
    """
    c = scored.candidate
    name = f"{c.shape}, ZeRO-{c.zero}, remat {c.remat}"
    vocab = BYTE_TOKENS if found.config.data.tokenizer == "bytes" else None
    try:
        result = compile_step(apply(found.config, c), found.target, vocab).result
    except (InputError, jax.errors.JaxRuntimeError) as error:
        said = str(error).splitlines()[0][:200]
        if (c.offload != "none" or c.remat == "offload") and said.startswith("INTERNAL"):
            notes.append(f"Not confirmed: {name} with host memory: the compiler for absent devices fails ({said}).")
            return Verdict(True)
        notes.append(f"Not offered: {name}: the compiler says {said}")
        return Verdict(False)
    if isinstance(result, DoesNotFit):
        notes.append(f"Not offered: {name}: the compiler refuses it ({gib(result.needs)} needed).")
        return Verdict(False)
    own = found.limit < limit_of(found.target, None)  # the user's --memory_limit
    allowed = found.limit if own else found.target.chip.usable_bytes or math.inf
    if result.memory.peak > allowed:
        notes.append(f"Not offered: {name}: {gib(result.memory.peak)} by the compiler, {gib(allowed)} may be used.")
        return Verdict(False)
    mesh: dict[str, int] = dict(zip(AXES, c.shape.sizes, strict=True))
    return Verdict(True, result.memory.peak, timeline(result, mesh) if found.timed else None)


def command_line(config: Config, candidate: Candidate, given: Given) -> str:
    """The command that trains with a layout: what the user gave, and what was chosen.

    Args:
        config: that was searched.
        candidate: the layout.
        given: the user's own options.
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
    if config.fake_devices not in (None, candidate.shape.devices):
        dropped.add("fake_devices")
        if "config" in given.options:  # where the file may say so
            chosen["fake_devices"] = "null"
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
    if config.data.tokenizer == "bytes" and arch.vocab_size < BYTE_TOKENS:
        raise InputError(
            f"model.vocab_size is {arch.vocab_size}, but data.tokenizer 'bytes' has {BYTE_TOKENS} tokens: set "
            f"--model.vocab_size to at least {BYTE_TOKENS}"
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
