"""Times from shapes, corrected by what compiled schedules showed: only so are the two kinds of time comparable."""

import math
import statistics
from dataclasses import dataclass, field

from jaxshard.planner.ranking import Scored

EDGE = 0.76
"""Share of a device's memory from where on XLA's scheduler for GPUs saves memory at the cost of time: it plans for 95 %
of 80 % (openxla/xla, xla/service/gpu/gpu_hlo_schedule.cc: GetSchedulerMemoryLimit, and its slop factor)."""
LEAST = 0.95
"""Factor of a kind of which nothing was compiled yet, at best: of blocks that are recomputed whole it was 0.96 to 1.04
(docs/plan.md)."""
SPREAD = 0.02
"""Share of its corrected time that a layout may still be faster when it is compiled: within one kind the factors differ
by some per cent (docs/plan.md)."""


@dataclass
class Correction:
    """Compiled times against those from shapes, by kind of layout: what is recomputed, and with or without a pipeline.

    Attributes:
        device: bytes of its memory; infinite where that is not known.
        seen: (layout, compiled seconds over seconds from shapes), in the order in which they were compiled.
    """

    device: float
    seen: list[tuple[Scored, float]] = field(default_factory=list)

    def add(self, scored: Scored, seconds: float) -> None:
        """Takes down the time of a compiled schedule."""
        self.seen.append((scored, seconds / scored.seconds))

    def expected(self, scored: Scored) -> float:
        """Seconds of a layout as a compiled schedule will probably have them: those from shapes, times the factor of
        the compiled layout of its kind that is nearest in memory, or else the middle one of all factors."""
        alike = [(other, factor) for other, factor in self.seen if _kind(other) == _kind(scored)]
        if telling := [each for each in alike if self._tells(each[0], scored)] or alike:
            return scored.seconds * min(telling, key=lambda each: _apart(each[0], scored))[1]
        return scored.seconds * statistics.median_low([factor for _, factor in self.seen] or [1.0])

    def hoped(self, scored: Scored) -> float:
        """Seconds that a layout may come down to: at best, where nothing compiled says anything about it."""
        if any(_kind(other) == _kind(scored) and self._tells(other, scored) for other, _ in self.seen):
            return self.expected(scored) * (1 - SPREAD)
        return scored.seconds * min([LEAST, *(factor for _, factor in self.seen)])

    def _tells(self, other: Scored, scored: Scored) -> bool:
        """Whether a compiled layout says something about one of its kind: near the edge of the memory XLA computes
        again what it cannot keep and hides fewer collectives, which a smaller layout is spared."""
        return other.memory.total <= max(EDGE * self.device, scored.memory.total)


def _kind(scored: Scored) -> tuple[str, bool]:
    return scored.candidate.remat, scored.candidate.shape.stage > 1


def _apart(one: Scored, other: Scored) -> float:
    return abs(math.log(one.memory.total / other.memory.total))
