"""Layouts in order: the fastest that fit into memory, the simpler one where the prediction cannot tell them apart."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

import numpy as np

from jaxshard.config import Config
from jaxshard.errors import InputError
from jaxshard.insight.arithmetic import flops_per_token
from jaxshard.insight.cost import StepTime
from jaxshard.insight.hardware import CHIPS, Target, parse_target
from jaxshard.insight.memory import Memory, estimate, gib
from jaxshard.insight.search import Candidate, Pins, apply, candidates, is_known, obstacle, predict_times
from jaxshard.insight.state_bytes import elements_per_device, state_bytes, table_of
from jaxshard.models.presets import Architecture
from jaxshard.parallel.mesh import MeshShape

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


@dataclass(frozen=True, eq=False)
class Search:
    """All candidates of one target, in order of preference; memory is worked out when it is asked for."""

    config: Config
    arch: Architecture
    target: Target
    limit: float
    """Bytes that a plan may take on a device."""
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
        places.sort(key=lambda place: self._floor(self.order[place]))
        tried = (self.at(place) for place in places[:200])
        return next(((False, s) for s in sorted(tried, key=lambda s: s.memory.total)), None)

    def smallest(self) -> Scored:
        """The candidate that takes the least memory."""
        floors = [(self._floor(c), place) for place, c in enumerate(self.order)]
        floors.sort()
        return min((self.at(place) for _, place in floors[:200]), key=lambda s: s.memory.total)

    @property
    def timed(self) -> bool:
        return is_known(self.target)

    @cached_property
    def whole_state(self) -> int:
        """Bytes of parameters, masters, moments and one set of gradients, unsplit."""
        plain = replace(self.config, zero=0, train=replace(self.config.train, offload="none", offload_mode=None))
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
    """Ranks every layout; layouts that use host memory are looked at only where no other fits.

    Args:
        config: as configured; what is searched in it is replaced.
        arch: the model.
        target: the hardware.
        pins: what is fixed.
        memory_limit: bytes that may be used on a device, where less than the device has.

    Raises:
        InputError: no layout is legal.
    """
    result = None
    for offload in _passes(pins):
        layouts = candidates(config, arch, target, pins, offload)
        if not layouts:
            continue
        parts, times = predict_times(config, arch, target, layouts)
        extra = np.array([c.complexity for c in layouts]) @ PREFERENCE
        places = np.argsort(times * (1 + extra), kind="stable")
        order = [layouts[i] for i in places]
        result = Search(config, arch, target, limit_of(target, memory_limit), order, times, parts, places)
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
    """Bytes that a plan may take: less than the device has by `MARGIN`, or as the user says; infinite if not known."""
    usable = target.chip.usable_bytes or math.inf
    return min(usable * (1 - MARGIN), memory_limit or math.inf)


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


def smallest_target(
    config: Config, arch: Architecture, target: Target, pins: Pins, memory_limit: float | None, most: int | None = None
) -> Search | None:
    """The search on the smallest target of the same chip on which a plan fits, or None."""
    for candidate in larger_targets(target, most):
        try:
            found = search(config, arch, candidate, pins, memory_limit)
        except InputError:  # nothing divides there
            continue
        if found.fitting:
            return found
    return None


def nothing_fits(found: Search, pins: Pins, memory_limit: float | None) -> InputError:
    """What is missing, and the smallest hardware that would do."""
    least = found.smallest()
    larger = smallest_target(found.config, found.arch, found.target, pins, memory_limit)
    fixed = f" with {pins}" if str(pins) else ""
    if larger is not None:
        hint = f"the smallest {found.target.chip.name} target that fits is {larger.target.name}"
    elif memory_limit is not None and least.memory.total <= limit_of(found.target, None):
        hint = "a device has more than that: raise the limit"
    elif str(pins):
        hint = "with this fixed no larger one fits either: fix less of it"
    else:
        hint = "no larger one of this chip fits either: shorten data.seq_len, or take a chip with more memory"
    layout = f"{least.candidate.shape}, ZeRO-{least.candidate.zero}, remat {least.candidate.remat}"
    return InputError(
        f"the model fits nowhere on {found.target.name}{fixed}: the layout that takes the least ({layout}, "
        f"{found.config.train.precision}) needs {gib(least.memory.total)} on a device, and {gib(found.limit)} may be "
        f"used; {hint}"
    )
