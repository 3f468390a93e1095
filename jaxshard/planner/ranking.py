"""Layouts in order: the fastest that fit into memory, the simpler one where the prediction cannot tell them apart."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

import numpy as np

from jaxshard.analysis.arithmetic import flops_per_token
from jaxshard.analysis.cost import StepTime
from jaxshard.analysis.memory import Memory, estimate
from jaxshard.analysis.state_bytes import elements_per_device, state_bytes, table_of
from jaxshard.config import Config
from jaxshard.errors import InputError
from jaxshard.models.presets import Architecture
from jaxshard.parallel.axes import MeshShape
from jaxshard.parallel.resolve import zero_tables
from jaxshard.planner.prediction import is_known, predict_times
from jaxshard.planner.search import Candidate, Pins, apply, candidates, obstacle
from jaxshard.xla.hardware import CHIPS, Target, parse_target

MARGIN = 0.06
"""Share of the memory that a plan leaves free: the closed form is that good, in most cases (docs/planner-memory.md)."""
PREFERENCE = np.array([0.004, 0.002, 0.002, 0.001, 0.002, 0.001])
"""Relative time that a simpler layout may take more, for each count of `Candidate.complexity`."""
DEPTH = 400
"""Fitting layouts that are collected at most."""
SIZES = {
    0: (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048),
    2: ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
    3: ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16"),
}
"""Dimensions of a chip's grid -> sizes of targets that are tried for the smallest that fits."""


@dataclass(frozen=True)
class Scored:
    """A candidate with what is predicted for it."""

    candidate: Candidate
    memory: Memory
    seconds: float
    parts: dict[str, float]
    """Seconds by field of `StepTime`."""


def same_program(config: Config, one: Candidate, other: Candidate) -> bool:
    """Whether two candidates make the same program: ZeRO-1 and 2 do, where a step is one pass over its batch."""
    stage = lambda c: zero_tables(apply(config, c), c.shape)
    return replace(one, zero=0) == replace(other, zero=0) and stage(one) == stage(other)


@dataclass(frozen=True, eq=False)
class Search:
    """All candidates of one target, in order of preference; memory is worked out when it is asked for."""

    config: Config
    arch: Architecture
    target: Target
    limit: float
    """Bytes that the closed form may come to for a plan on a device."""
    memory_limit: float | None
    """Bytes that the user allows, if it was said."""
    order: list[Candidate]
    times: np.ndarray
    parts: StepTime
    places: np.ndarray
    """[n] row of `times` for each place in the order."""
    scored: dict[int, Scored] = field(default_factory=dict)

    def at(self, place: int) -> Scored:
        """The candidate at a place of the order, with its memory."""
        if place not in self.scored:
            candidate, row = self.order[place], int(self.places[place])
            memory = estimate(apply(self.config, candidate), self.arch, candidate.shape, self.target.chip.platform)
            parts = {f.name: _entry(getattr(self.parts, f.name), row) for f in fields(StepTime)}
            self.scored[place] = Scored(candidate, memory, float(self.times[row]), parts)
        return self.scored[place]

    @cached_property
    def fitting(self) -> list[Scored]:
        """The first `DEPTH` candidates that fit, in order."""
        found = []
        for place in range(len(self.order)):
            if self._hopeless(self.order[place]):
                continue
            scored = self.at(place)
            if scored.memory.total <= self.limit:
                found.append(scored)
                if len(found) == DEPTH:
                    break
        return found

    def best(self, matches: Callable[[Candidate], bool]) -> tuple[bool, Scored] | None:
        """(True, the first matching candidate that fits), (False, the smallest that does not), or None without any."""
        places = [place for place, candidate in enumerate(self.order) if matches(candidate)]
        for place in places:
            if not self._hopeless(self.order[place]) and self.at(place).memory.total <= self.limit:
                return True, self.at(place)
        return (False, self._least(places)) if places else None

    def smallest(self) -> Scored:
        """The candidate that takes the least memory."""
        return self._least(range(len(self.order)))

    def _least(self, places: Iterable[int]) -> Scored:
        """Of these places the one that takes the least memory: none takes less than its state alone."""
        least = None
        for place in sorted(places, key=lambda place: self._floor(self.order[place])):
            if least is not None and self._floor(self.order[place]) >= least.memory.total:
                break
            scored = self.at(place)
            if least is None or scored.memory.total < least.memory.total:
                least = scored
        assert least is not None, "no places"
        return least

    def above(self, most: float) -> list[Scored]:
        """The least of each mesh and ZeRO stage, where that is above the limit and not above `most`; least first.

        What takes host memory stands apart, behind the others.
        """
        least: dict[tuple[MeshShape, int, bool], Scored] = {}
        for place, candidate in enumerate(self.order):
            if self._floor(candidate) > most:
                continue
            scored = self.at(place)
            key = (candidate.shape, candidate.zero, scored.memory.host > 0)
            if key not in least or scored.memory.total < least[key].memory.total:
                least[key] = scored
        found = (scored for scored in least.values() if self.limit < scored.memory.total <= most)
        return sorted(found, key=lambda scored: (scored.memory.host > 0, scored.memory.total))

    @property
    def allowed(self) -> float:
        """Bytes that the compiler may come to for a plan on a device; infinite where that is not known."""
        return min(self.target.chip.usable_bytes or math.inf, self.memory_limit or math.inf)

    @property
    def timed(self) -> bool:
        return is_known(self.target)

    @cached_property
    def whole_state(self) -> int:
        """Bytes of parameters, masters, moments and one set of gradients, unsplit."""
        plain = self.config.with_parallel(zero=0, offload="none", offload_mode=None)
        state = state_bytes(plain, self.arch, MeshShape())
        return state.parameters + state.gradients + state.master + state.optimizer

    @cached_property
    def layer_state(self) -> int:
        """Bytes of one layer's part of that."""
        rows = table_of(self.arch, self.config.optim, self.config.train.precision).weights
        own = sum(elements_per_device(r, shape=MeshShape(), spread=False) for r in rows if r.group == "blocks")
        every = sum(elements_per_device(r, shape=MeshShape(), spread=False) for r in rows)
        return round(self.whole_state * own / every / self.arch.n_layers)

    def mfu(self, plan: Scored) -> float | None:
        """Model FLOPs utilisation (causal attention), where the chip's speed is known."""
        if not self.timed:
            return None
        tokens = self.config.train.global_batch * self.config.data.seq_len
        flops = flops_per_token(self.arch, self.config.data.seq_len) * tokens
        return flops / plan.seconds / (self.target.chip.bf16_flops * self.target.count)

    def _floor(self, candidate: Candidate) -> int:
        key = (candidate.shape, candidate.zero, candidate.offload, candidate.accumulation > 1)
        if key not in self._floors:
            self._floors[key] = state_bytes(apply(self.config, candidate), self.arch, candidate.shape).arguments
        return self._floors[key]

    @cached_property
    def _floors(self) -> dict[tuple, int]:
        return {}

    def _hopeless(self, candidate: Candidate) -> bool:
        """The state alone is too much."""
        return self._floor(candidate) > self.limit


def _entry(values: object, row: int) -> float:
    array = np.asarray(values, float)
    return float(array if array.ndim == 0 else array[row])


def search(config: Config, arch: Architecture, target: Target, pins: Pins, memory_limit: float | None = None) -> Search:
    """Ranks every layout; layouts that use host memory are among them only where no other fits.

    Args:
        config: as configured; what is searched in it is replaced.
        arch: the model.
        target: the hardware.
        pins: what is fixed.
        memory_limit: bytes that may be used on a device, where less than the device has.

    Raises:
        InputError: no layout is legal.
    """
    result, layouts = None, []
    for offload in _passes(pins):
        more = candidates(config, arch, target, pins, offload)
        if not more:
            continue
        layouts += more
        parts, times = predict_times(config, arch, target, layouts)
        extra = np.array([c.complexity for c in layouts]) @ PREFERENCE
        places = np.argsort(times * (1 + extra), kind="stable")
        order = [layouts[i] for i in places]
        limit = limit_of(target, memory_limit)
        result = Search(config, arch, target, limit, memory_limit, order, times, parts, places)
        if result.fitting:
            return result
    if result is None:
        why = obstacle(config, arch, target, pins) or "fix less of it"
        raise InputError(f"no layout of {target.name} agrees with what is fixed: {pins}: {why}")
    return result


def _passes(pins: Pins) -> tuple[bool, ...]:
    if "offload" in pins.fields:
        return (pins.fields["offload"] != "none",)
    return (True,) if pins.fields.get("remat") == "offload" else (False, True)


def limit_of(target: Target, memory_limit: float | None) -> float:
    """Bytes that the closed form of a plan may come to: less than the device has by `MARGIN`, or as the user says;
    infinite if not known."""
    usable = target.chip.usable_bytes or math.inf
    return usable * (1 - MARGIN) if memory_limit is None else min(usable, memory_limit)


def larger_targets(target: Target, most: int | None = None) -> Iterator[Target]:
    """Targets of the same chip, smallest first, up to `most` devices."""
    for size in SIZES[target.chip.dims]:
        if target.chip.name not in CHIPS:
            return
        found = parse_target(f"{target.chip.name}:{size}").with_network(target.chip.network.bandwidth)
        found = replace(found, measured=target.measured)
        if found.chip.usable_bytes != target.chip.usable_bytes or (most is not None and found.count > most):
            return
        yield found


def state_alone(config: Config, arch: Architecture, target: Target, pins: Pins) -> float:
    """Bytes on a device that no layout goes below: state and batch in as many parts as there are devices."""
    place = pins.fields.get("offload", "optimizer")
    most = config.with_parallel(zero=0, offload=place, offload_mode=None)
    return state_bytes(most, arch, MeshShape()).arguments / target.count
