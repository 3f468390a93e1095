"""The step time of a compiled program: its schedule is walked once, with two lanes, computation and network.

Instructions run in the order of the schedule. A collective that is split into start and done runs beside what stands in
between; what is left of it at its done is exposed. Loops count by their trips, a pipeline by the loops over its ticks,
of conditionals the longest branch. Asynchronous copies, on the device and to host memory, have lanes of their own.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxshard.analysis.reasons import place
from jaxshard.analysis.roofline import Roofline, roofline
from jaxshard.parallel.axes import SHORT
from jaxshard.xla.collectives import Collective, module_collectives
from jaxshard.xla.compile import Compiled
from jaxshard.xla.hlo import HOST_SPACE, Instruction, Module, leaves, shape_bytes
from jaxshard.xla.loops import Scope, inner_scopes

SLOWED = "computation slowed by collectives beside it"
NAMES = {
    "matmul": "matmuls",
    "attention": "fused attention",
    "memory": "memory-bound kernels",
    "host": "transfers to host memory",
    "copy": "copies beside computation that it waits for",
}
_REMAT = re.compile(r"\.remat\d*(?:\.|$)")
"""How XLA's rematerialisation names its copies (openxla/xla, hlo/transforms/simplifiers/hlo_rematerialization.cc)."""
SHOWN = 400
"""Spans that are kept of one schedule at most; neighbours of the same kind are one."""


@dataclass(frozen=True)
class Span:
    """Something that runs from `start` to `end`, in seconds since its schedule began."""

    lane: str
    """computation or network."""
    kind: str
    start: float
    end: float


@dataclass(frozen=True)
class Block:
    """One schedule: the whole step, or one run of the body of a loop in it."""

    name: str
    """step, or the loop's instruction: spans of an outer schedule call it so."""
    what: str
    """In words."""
    runs: int
    """Runs in one step."""
    seconds: float
    """Of one run."""
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Timeline:
    """Where the time of a compiled step goes on one device."""

    parts: Mapping[str, float]
    """Seconds by what the device does or waits for; they add up to the step."""
    hidden: Mapping[str, float]
    """Seconds of collectives that run behind computation, by axes; not part of the step."""
    blocks: tuple[Block, ...]
    """The step, then its loops, as they stand in the program."""
    again: float = 0.0
    """Seconds of the step in which the device computes a second time what the compiler did not keep: near the edge of
    the memory XLA rematerialises on its own, whatever --parallel.remat says."""

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def exposed(self) -> float:
        """Seconds in which the device waits for collectives."""
        return sum(seconds for name, seconds in self.parts.items() if name.startswith("collectives"))

    def as_json(self) -> dict[str, Any]:
        """As `plan --json` prints it."""
        return {"seconds": self.seconds, "parts": dict(self.parts), "hidden": dict(self.hidden), "again": self.again}

    def largest(self, count: int = 4) -> list[tuple[str, float]]:
        """What takes longest, longest first."""
        return sorted(((n, s) for n, s in self.parts.items() if s > 0), key=lambda item: -item[1])[:count]


def timeline(compiled: Compiled, mesh: Mapping[str, int]) -> Timeline:
    """Walks the schedule of a compiled step.

    Args:
        compiled: of a target whose speed is known.
        mesh: axis -> size, outermost first, of the mesh that it was compiled for.

    Raises:
        InputError: the target's speed is not known (a CPU).
    """
    return walk(compiled.module, roofline(compiled.target, mesh))


def walk(module: Module, costs: Roofline) -> Timeline:
    """The timeline of a module with the costs of a target."""
    found = {(one.computation, one.name): one for one in module_collectives(module, costs.mesh)}
    walker = _Walker(costs, found)
    whole = walker.run(Scope(module, module.entry), "step", "step", 1)
    parts = {NAMES.get(kind, kind): seconds for kind, seconds in whole.parts.items()}
    return Timeline(
        parts,
        {kind: seconds for kind, seconds in whole.hidden.items() if seconds},
        tuple(b for b in walker.blocks if b),
        whole.again,
    )


@dataclass(frozen=True)
class _Flight:
    """A collective or copy that is under way."""

    lane: str
    kind: str
    seconds: float
    end: float
    computed: float
    """Of its clock when it was started."""


@dataclass
class _Clock:
    """The state of one schedule while it is walked."""

    now: float = 0.0
    lanes: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Lane -> when it is free again."""
    flying: dict[str, _Flight] = field(default_factory=dict)
    """By handle."""
    computed: float = 0.0
    """Seconds of computation so far; the rest of `now` is waiting."""
    parts: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    hidden: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    spans: list[Span] = field(default_factory=list)
    again: float = 0.0

    def compute(self, kind: str, seconds: float) -> None:
        self.show("computation", kind, self.now, self.now + seconds)
        self.parts[kind] += seconds
        self.now += seconds
        self.computed += seconds

    def show(self, lane: str, kind: str, start: float, end: float) -> None:
        last = next((span for span in reversed(self.spans) if span.lane == lane), None)
        if last and last.kind == kind and start - last.end < 1e-9:
            self.spans[self.spans.index(last)] = Span(lane, kind, last.start, end)
        elif len(self.spans) < SHOWN and end > start:
            self.spans.append(Span(lane, kind, start, end))


@dataclass
class _Walker:
    costs: Roofline
    collectives: dict[tuple[str, str], Collective]
    blocks: list[Block | None] = field(default_factory=list)

    def run(self, scope: Scope, name: str, what: str, runs: int) -> _Clock:
        """Walks one schedule from a standing start; `runs` in one step. Without a name it is no block of its own."""
        clock, position = _Clock(), len(self.blocks)
        self.blocks.append(None)  # outer loops stand before inner ones
        for instruction in scope.computation.instructions:
            self.step(scope, instruction, clock, runs)
        for handle in list(clock.flying):
            self.finish(handle, clock)
        if name:
            self.blocks[position] = Block(name, what, runs, clock.now, tuple(clock.spans))
        return clock

    def step(self, scope: Scope, instruction: Instruction, clock: _Clock, runs: int) -> None:
        """Runs one instruction of a schedule."""
        opcode = instruction.opcode
        collective = self.collectives.get((scope.computation.name, instruction.name))
        if collective is not None:
            kind = "collectives over " + ("+".join(SHORT.get(a, a) for a in collective.axes) or "all devices")
            self.start("network", kind, self.costs.collective(collective), instruction, clock, collective.is_async)
        elif opcode == "copy-start":
            lane, seconds = self.copying(instruction)
            self.start(lane, lane, seconds, instruction, clock, True)
        elif opcode == "fusion-start":
            cost = self.costs.instruction(scope.module, scope.computation, instruction)
            self.start("copy", "copy", cost.seconds if cost else 0.0, instruction, clock, True)
        elif ended := _ended(scope, instruction, clock):
            self.finish(ended, clock)
        elif opcode.endswith("-update"):
            for handle in [h for h in instruction.operands if h in clock.flying]:
                clock.flying[instruction.name] = clock.flying.pop(handle)
        elif inner := inner_scopes(scope, instruction):
            self.enter(inner, instruction, clock, runs)
        else:
            cost = self.costs.instruction(scope.module, scope.computation, instruction)
            if cost is not None:
                clock.compute(cost.kind, cost.seconds)
                clock.again += cost.seconds if _computed_again(scope, instruction) else 0.0

    def enter(self, inner: list[Scope], instruction: Instruction, clock: _Clock, runs: int) -> None:
        """Runs what an instruction calls: a loop as often as it turns, of branches the longest."""
        if instruction.opcode == "while":
            body = next(scope for scope in inner if scope.kind == "body")
            trips = body.loops[-1].trips
            trips = 1 if trips is None else trips
            results = [(self.run(body, instruction.name, _what(instruction), runs * trips), trips)]
        elif instruction.opcode == "conditional":
            results = [(self.longest(inner, runs), 1)]
        else:
            results = [(self.run(scope, "", "", runs), 1) for scope in inner]
        for result, times in results:
            kind = instruction.name if instruction.opcode == "while" else instruction.opcode
            clock.show("computation", kind, clock.now, clock.now + result.now * times)
            clock.now += result.now * times
            clock.computed += result.computed * times
            clock.again += result.again * times
            for total, one in ((clock.parts, result.parts), (clock.hidden, result.hidden)):
                for kind, seconds in one.items():
                    total[kind] += seconds * times

    def longest(self, branches: list[Scope], runs: int) -> _Clock:
        """Runs every branch and keeps the one that takes longest; no loop of the others is shown."""
        before, found = len(self.blocks), []
        for branch in branches:
            found.append((self.run(branch, "", "", runs), self.blocks[before:]))
            del self.blocks[before:]
        result, shown = max(found, key=lambda each: each[0].now)
        self.blocks.extend(shown)
        return result

    def start(
        self, lane: str, kind: str, seconds: float, instruction: Instruction, clock: _Clock, is_async: bool
    ) -> None:
        """Starts a collective or copy on its lane; what is not asynchronous also ends here."""
        if seconds <= 0:
            return
        begins = max(clock.now, clock.lanes[lane])
        ends = clock.lanes[lane] = begins + seconds
        if lane == "network":
            clock.show(lane, kind, begins, ends)
        if is_async:
            clock.flying[instruction.name] = _Flight(lane, kind, seconds, ends, clock.computed)
        else:
            clock.parts[kind] += ends - clock.now
            clock.now = ends

    def finish(self, handle: str, clock: _Clock) -> None:
        """Waits for what is under way; what ran behind computation, not other waiting, has slowed it on a GPU."""
        flight = clock.flying.pop(handle)
        exposed = max(0.0, flight.end - clock.now)
        clock.parts[flight.kind] += exposed
        clock.now += exposed
        if flight.lane == "network":
            behind = min(max(0.0, flight.seconds - exposed), clock.computed - flight.computed)
            clock.hidden[flight.kind] += behind
            borrowed = 0.0 if self.costs.rates.hw.matrix.systolic else self.costs.rates.c.borrowed
            clock.parts[SLOWED] += borrowed * behind
            clock.now += borrowed * behind

    def copying(self, instruction: Instruction) -> tuple[str, float]:
        """(lane, seconds) of an asynchronous copy: to or from host memory, or into on-chip memory."""
        shape = instruction.shape
        first = shape if not isinstance(shape, tuple) else shape[0]
        host = any(array.space == HOST_SPACE for array in leaves(shape))
        rate = self.costs.rates.hw.host if host else self.costs.rates.memory
        return ("host" if host else "copy"), shape_bytes(first) / max(rate, 1.0)


def _what(loop: Instruction) -> str:
    """A loop in words: "loop of the backward pass", "loop in loss of the forward pass"."""
    where = place(loop.op_name)
    scope = f" in {where.scope}" if where.scope else ""
    return f"loop{scope}" + ("" if where.phase == "outside" else f" of the {where.phase} pass")


def _computed_again(scope: Scope, instruction: Instruction) -> bool:
    """Whether an instruction repeats another one of its schedule; a copy may also have taken the other's place."""
    first = _REMAT.split(instruction.name)[0]
    return first != instruction.name and first in scope.computation.by_name


def _ended(scope: Scope, instruction: Instruction, clock: _Clock) -> str | None:
    """The handle of what ends at an instruction: a -done, or a TPU fusion that holds the done of a collective."""
    if instruction.opcode.endswith("-done"):
        return next((handle for handle in instruction.operands if handle in clock.flying), None)
    if instruction.opcode == "fusion" and clock.flying and instruction.called:
        inside = scope.module.computations[instruction.called[0]].instructions
        if any(inner.attribute("custom_call_target") == "AsyncCollectiveDone" for inner in inside):
            return next(iter(_carried(scope, instruction, clock)), None)
    return None


def _carried(scope: Scope, fusion: Instruction, clock: _Clock) -> Iterator[str]:
    """Collectives under way that a fusion goes back to, through the fusions that carried them along."""
    seen, waiting = set(), list(fusion.operands)
    while waiting:
        name = waiting.pop(0)
        if name in seen:
            continue
        seen.add(name)
        if name in clock.flying:
            yield name
            continue
        made = scope.computation.by_name[name]
        if made.opcode in ("get-tuple-element", "fusion", "bitcast", "tuple"):
            waiting.extend(made.operands)
