"""Which layouts of a search the compiler is asked about, one after the other, and what is offered in the end."""

import math
from dataclasses import dataclass, field, replace

from jaxshard.analysis.timeline import Timeline
from jaxshard.parallel.axes import MeshShape
from jaxshard.planner.correction import Correction
from jaxshard.planner.host_memory import within_host
from jaxshard.planner.ranking import PREFERENCE, Scored, Search, same_program
from jaxshard.planner.search import Candidate

TRIES = 3
"""Compilations for each plan to be confirmed, at most: where the compiler refuses, or another may still be faster."""

Family = tuple[MeshShape, int]
"""Mesh and ZeRO stage: what the plans of a table differ in."""


@dataclass(frozen=True)
class Verdict:
    """What the compiler says about a layout."""

    good: bool
    peak: int | None = None
    """Bytes on a device; None where it was not asked or cannot say."""
    timeline: Timeline | None = None


@dataclass(frozen=True)
class Offer:
    """A layout to offer."""

    scored: Scored
    verdict: Verdict
    expected: float
    """Seconds of the compiled schedule, or those from shapes as the compiled schedules of others correct them."""


@dataclass
class Asked:
    """What the compiler was asked about, and what is next.

    Attributes:
        count: layouts that it should take at least.
        pool: layouts that fit by the closed form, in the order of the search.
        correction: of the times from shapes.
        verdicts: of those that were asked about.
        refused: mesh and stage -> bytes by the closed form of the smallest layout that was refused.
    """

    count: int
    pool: list[Scored]
    correction: Correction
    verdicts: dict[Candidate, Verdict] = field(default_factory=dict)
    refused: dict[Family, int] = field(default_factory=dict)

    def take(self, scored: Scored, verdict: Verdict) -> None:
        """Takes down a verdict."""
        self.verdicts[scored.candidate] = verdict
        if not verdict.good:
            self.refused[family(scored)] = scored.memory.total
        elif verdict.timeline is not None:
            self.correction.add(scored, verdict.timeline.seconds)

    def expected(self, scored: Scored) -> float:
        """Seconds of the compiled schedule, or those from shapes as compiled schedules correct them."""
        verdict = self.verdicts.get(scored.candidate)
        timeline = verdict.timeline if verdict else None
        return timeline.seconds if timeline else self.correction.expected(scored)

    def next(self) -> Scored | None:
        """The layout to ask about; None when there is no more, or none that may be faster than the best so far."""
        if len(self.verdicts) >= TRIES * self.count:
            return None
        good = {family(scored) for scored in self.pool if self._good(scored)}
        hopes = [(self.correction.hoped(scored) * (1 + _extra(scored)), scored) for scored in self._open()]
        if len(good) < self.count:
            hopes = [each for each in hopes if family(each[1]) not in good]
        hope, scored = min(hopes, key=lambda each: each[0], default=(math.inf, None))
        seconds = [verdict.timeline.seconds for verdict in self.verdicts.values() if verdict.timeline]
        return scored if len(good) < self.count or hope < min(seconds, default=0) else None

    def offers(self) -> list[Offer]:
        """The best of each mesh and stage, fastest first: of those that were asked about where there are any."""
        if self.verdicts and not any(verdict.good for verdict in self.verdicts.values()):
            return []
        best: dict[Family, Scored] = {}
        for scored in sorted([scored for scored in self.pool if self._good(scored)], key=self._preferred):
            best.setdefault(family(scored), scored)
        for scored in sorted(self._open(), key=self._preferred):
            if family(scored) not in self.refused:
                best.setdefault(family(scored), scored)
        good = Verdict(True)
        return [
            Offer(scored, self.verdicts.get(scored.candidate, good), self.expected(scored))
            for scored in sorted(best.values(), key=self._preferred)
        ]

    def _good(self, scored: Scored) -> bool:
        return scored.candidate in self.verdicts and self.verdicts[scored.candidate].good

    def _open(self) -> list[Scored]:
        """Not asked about, and smaller than whatever was refused of the same mesh and stage."""
        most = lambda scored: self.refused.get(family(scored), math.inf)
        return [s for s in self.pool if s.candidate not in self.verdicts and s.memory.total < most(s)]

    def _preferred(self, scored: Scored) -> tuple[float, float]:
        """Sorts by time: of compiled schedules by all that is shown of it, else a simpler layout first where the
        prediction cannot tell two apart."""
        verdict = self.verdicts.get(scored.candidate)
        if verdict and verdict.timeline:
            return float(f"{verdict.timeline.seconds:.3g}"), _extra(scored)
        return self.expected(scored) * (1 + _extra(scored)), 0.0


def _extra(scored: Scored) -> float:
    """Share of its time that a layout may take less than a simpler one and still come after it."""
    return float(PREFERENCE @ scored.candidate.complexity)


def family(scored: Scored) -> Family:
    return scored.candidate.shape, scored.candidate.zero


def distinct(found: Search) -> tuple[list[Scored], set[Family]]:
    """The layouts that fit, but of two that are the same program with ZeRO-1 and ZeRO-2 the first; and its family."""
    kept, merged = [], set()
    fits = within_host(found)
    every = {scored.candidate for scored in fits}
    for scored in fits:
        lower = replace(scored.candidate, zero=1)
        if scored.candidate.zero == 2 and lower in every and same_program(found.config, lower, scored.candidate):
            merged.add((scored.candidate.shape, 1))
        else:
            kept.append(scored)
    return kept, merged
