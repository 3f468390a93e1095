"""Plans: which parallelism for this model on this hardware, before any of it is used."""

import contextlib
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from jaxshard.analysis.timeline import Timeline
from jaxshard.config import Config
from jaxshard.config.options import Given, options_of
from jaxshard.models.presets import Architecture
from jaxshard.planner.advice import reasons
from jaxshard.planner.confirm import Answers, Question, compiler_missing, confirmed
from jaxshard.planner.excluded import excluded
from jaxshard.planner.host_memory import fitting_parts, within_host
from jaxshard.planner.ranking import MARGIN, Scored, Search
from jaxshard.planner.refusal import NothingFits, refused, searched
from jaxshard.planner.search import DEPENDENT, SEARCHED, Candidate, apply, pins_of, words
from jaxshard.xla.hardware import Target
from jaxshard.xla.pool import setting

ROWS = 10
"""Plans in the table."""

Asking = Callable[[Question], AbstractContextManager[object]]


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
    expected: float | None = None
    """Seconds by which plans are in order: of the compiled schedule, or those from shapes as the compiled schedules of
    others correct them; None where the machine's speed is not known."""

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
            "expected_seconds": self.expected,
        }


def find(
    config: Config,
    arch: Architecture,
    target: Target,
    given: Given,
    memory_limit: float | None,
    fewest: bool,
    confirm: int,
    asking: Asking = nullcontext,
) -> tuple[Search, list[Plan], list[str]]:
    """The search of a target, or of the smallest part of it with a plan, its plans, and notes as of `offered`.

    Args:
        memory_limit: GiB.
        asking: entered for each compilation.

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


def offered(found: Search, given: Given, confirm: int, asking: Asking = nullcontext) -> tuple[list[Plan], list[str]]:
    """Plans, best first, and notes. `confirm` or more have been compiled; what the compiler refuses is left out.

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
    for offer in confirmed(found, confirm, answers)[:ROWS]:
        scored, verdict = offer.scored, offer.verdict
        command = command_line(found.config, scored.candidate, given, found.target.chip.platform)
        chip, peak = found.target.chip, verdict.peak or scored.memory.total / (1 - MARGIN)
        command = setting(chip.platform, chip.memory_bytes, peak) + command
        seconds, expected = (scored.seconds, offer.expected) if found.timed else (None, None)
        plans.append(Plan(scored, command, verdict.peak, found.mfu(scored), seconds, (), verdict.timeline, expected))
    if not plans:
        if not within_host(found):
            raise refused(found, pins_of(found.config, given.options), found.memory_limit, answers)
        tried = " ".join(each.sentence for each in answers.refused)
        raise NothingFits(f"the compiler for {found.target.name} refuses every layout that should fit: {tried}")
    if any(plan.scored.memory.gradients == 0 for plan in plans):
        notes.append(
            "Memory is that of the fullest moment of a step; where that is the loss, gradients are 0: none exist yet."
        )
    notes += order_notes(found, plans)
    left_out = excluded(found.config, found.arch, found.target, pins_of(found.config, given.options))
    return [replace(plan, reasons=(*reasons(found, plan.scored, answers.expected), *left_out)) for plan in plans], notes


def order_notes(found: Search, plans: list[Plan]) -> list[str]:
    """What is to be known about the order, where some plans were compiled."""
    if not any(plan.timeline for plan in plans):
        return []
    notes = []
    for first in within_host(found)[:1]:
        if first.candidate != plans[0].scored.candidate:
            notes.append(f"From shapes alone {words(first.candidate)} would come first.")
    if not plans[0].timeline:
        notes.append(
            "The first plan was not compiled: its time is from shapes, corrected. --confirm with a larger number asks "
            "about more."
        )
    return notes


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
        {option.name: option.default for option in options_of(each)}
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
    return shlex.join(["python", "run.py", *_words(kept), *_words(chosen)])


def _words(options: Mapping[str, str | None]) -> Iterator[str]:
    for name, text in options.items():
        yield f"--{name}"
        if text is not None:
            yield text
