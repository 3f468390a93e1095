"""Found against expected: what is missing, what is unexpected, and what a compiler only does in another way.

What compilers do in another way stands in one table, `equivalences`. Only gradients of norms, biases and tables that
several devices hold whole may take any way, within `expected.vector_bounds`.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from jaxshard.analysis.equivalences import EQUIVALENCES, Equivalence, Group
from jaxshard.analysis.expected import Expected, chosen, expected, open_families, vector_bounds
from jaxshard.analysis.facts import Facts
from jaxshard.analysis.ledger import Row
from jaxshard.analysis.reasons import FAMILIES
from jaxshard.parallel.axes import BATCH_AXES, SHORT, ZERO_AXIS

LEAST_THRESHOLD = 1024
"""Unexpected bytes of a step that never matter."""
THRESHOLD = 0.005
"""Unexpected bytes that do not matter, as a share of all bytes of a step."""
_TWICE = "all-reduce where a reduce-scatter would do (twice the bytes on the wire)"
_JOINED = "one all-reduce over replica and dp, for a reduce-scatter and one of the parts"
_MOVED = "moved out of its loop, once instead of in every part"
_KEPT = "what is gathered for the forward pass is kept for the backward pass"


@dataclass(frozen=True)
class Difference:
    """Traffic that is missing or unexpected."""

    reason: str
    axes: tuple[str, ...]
    bytes: int
    """Over all calls of one step."""
    source: str = ""


@dataclass(frozen=True)
class Check:
    """Found against expected."""

    expected: tuple[Expected, ...]
    missing: tuple[Difference, ...]
    unexpected: tuple[Difference, ...]
    rewrites: tuple[str, ...]
    """What the compiler does in another way than asked, in words."""
    unpredicted: tuple[str, ...]
    """Families without a closed form, in words."""
    threshold: int
    """Unexpected bytes that do not matter."""

    undone: tuple[str, ...] = ()
    """Rules that the program plainly does not keep, though nothing unexpected travels; in words."""

    @property
    def failures(self) -> tuple[Difference, ...]:
        """All unexpected traffic where its sum matters: many small pieces weigh as much as one."""
        return self.unexpected if sum(item.bytes for item in self.unexpected) > self.threshold else ()


def check(found: Iterable[Row], facts: Facts, platform: str, threshold: int | None = None) -> Check:
    """Compares a ledger with what is expected.

    Args:
        found: the ledger of a training step.
        facts: of that step.
        platform: cpu, gpu or tpu: what its compiler is known to rewrite.
        threshold: unexpected bytes that do not matter; by default a share of all bytes.
    """
    rows = list(found)
    limit = max(LEAST_THRESHOLD, int(THRESHOLD * sum(row.total for row in rows))) if threshold is None else threshold
    unpredicted = open_families(facts)
    if unpredicted:
        own = sum(row.total for row in rows if _of_optimizer(row))
        unpredicted = {name: f"{why}: {own:,} bytes are not compared" for name, why in unpredicted.items()}
        rows = [row for row in rows if not _of_optimizer(row)]
    result = _Result(facts, platform)
    sums = lambda family, axes: result.summed([row for row in rows if row.family == family and row.axes == axes])
    wanted = chosen(expected(facts), sums)
    for family in dict.fromkeys(row.family for row in (*wanted, *rows) if row.family not in ("bookkeeping", "vector")):
        result.purpose(
            family, [row for row in rows if row.family == family], [row for row in wanted if row.family == family]
        )
    result.vectors([row for row in rows if row.family == "vector"])
    gathers = [row for row in rows if row.family == "gather"]
    undone = tuple(_held_whole(gathers, result.missing, facts, limit))
    return Check(
        tuple(wanted),
        tuple(result.missing),
        tuple(result.unexpected),
        tuple(result.rewrites),
        tuple(unpredicted.values()),
        limit,
        undone,
    )


def _held_whole(rows: Iterable[Row], missing: Iterable[Difference], facts: Facts, limit: int) -> Iterator[str]:
    """ZeRO-3 in vain: layers that stay whole because they are not gathered again, or because all come in one call.

    Only where a loop goes through layers: one alone may stay, and a pipeline that gathers once a step is asked to.
    """
    chunk = facts.layers // (facts.schedule.chunks if facts.schedule else 1)
    if chunk < 2 or facts.gathered_once:
        return
    for item in missing:
        if item.reason == FAMILIES["gather"] and item.bytes > limit:
            axes = " and ".join(SHORT[axis] for axis in item.axes)
            yield (
                f"expected and not found: {item.bytes:,} bytes a step of ZeRO-3 parameter gathers over {axes}: "
                "every device holds weights whole beyond the layer that uses them"
            )
    for row in rows:
        if row.stacked > limit:
            paths = ", ".join(row.parameters)
            yield (
                f"{paths}: {row.stacked:,} bytes of all layers are gathered in one call ({row.name}): every device "
                "holds them whole at once"
            )


def _of_optimizer(row: Row) -> bool:
    """Traffic of the optimizer's own arithmetic; what bears no name, too, if it is in neither of the passes."""
    return row.family == "optimizer" or (row.phase == "outside" and not row.family)


class _Result:
    """Collects differences and what compilers do in another way."""

    def __init__(self, facts: Facts, platform: str):
        self.facts, self.platform = facts, platform
        self.missing: list[Difference] = []
        self.unexpected: list[Difference] = []
        self.rewrites: dict[str, None] = {}

    def summed(self, rows: Sequence[Row]) -> int:
        """Bytes of sums, in the types that were asked for."""
        sums = [row for row in rows if row.kind in ("reduce-scatter", "all-reduce")]
        if not sums:
            return 0
        group = Group(self.facts, sums[0].family, sums[0].axes, sums, ())
        return self.common(group, EQUIVALENCES[:2]).got

    def common(self, group: Group, table: Sequence[Equivalence] = EQUIVALENCES) -> Group:
        """A group in the form that was asked for."""
        forms = {self.platform, f"{self.platform}-{self.facts.compute}"}
        for one in table:
            if not forms.isdisjoint(one.platforms) and group.rows:
                changed = one.apply(group)
                if changed is not None:
                    self.rewrites[f"{FAMILIES[group.family]}: {one.text}"] = None
                    group = group._replace(rows=changed)
        return group

    def purpose(self, family: str, rows: Sequence[Row], wanted: Sequence[Expected]) -> None:
        """Compares the bytes of one purpose over each set of axes."""
        if not wanted:
            self.unexpected += [Difference(row.reason, row.axes, row.total, row.source) for row in rows]
            return
        text, known = FAMILIES[family], {want.axes for want in wanted}
        rows = [part for row in rows for part in self._apart(row, text, known)]
        for axes in dict.fromkeys(row.axes for row in (*wanted, *rows)):
            of_axes = lambda each, axes=axes: [row for row in each if row.axes == axes]
            group = self.common(Group(self.facts, family, axes, of_axes(rows), of_axes(wanted)))
            least = sum(row.least for row in group.wanted)
            for row in group.rows:
                if row.kind == "all-reduce" and group.kinds == {"reduce-scatter"}:
                    self.unexpected.append(Difference(f"{text}: {_TWICE}", axes, row.total, row.source))
            if group.got > group.most:
                words = dict.fromkeys(row.reason for row in group.rows)
                self.unexpected.append(
                    Difference(" / ".join(words), axes, group.got - group.most, group.rows[-1].source)
                )
            elif group.got < least:
                self._lacking(group, least)
            elif group.got < sum(row.total for row in group.wanted if not row.optional):
                self.rewrites[f"{text}: {_MOVED}"] = None

    def _lacking(self, group: Group, least: int) -> None:
        """What is missing; the CPU compiler may keep a weight from forward to backward in a pipeline."""
        again = sum(row.total for row in group.wanted if row.again)
        text, lacking = FAMILIES[group.family], least - group.got
        if self.platform == "cpu" and self.facts.schedule and lacking <= again:
            self.rewrites[f"{text}: {_KEPT}"] = None
        else:
            self.missing.append(Difference(text, group.axes, lacking))

    def _apart(self, row: Row, text: str, known: set[tuple[str, ...]]) -> Iterator[Row]:
        """A sum over replica and data, as the scatter over data and the sum of parts over replica that it is for."""
        joins = self.platform != "gpu" and row.kind == "all-reduce" and row.axes == BATCH_AXES
        if not joins or row.axes in known or (ZERO_AXIS,) not in known:
            yield row
            return
        self.rewrites[f"{text}: {_JOINED}"] = None
        yield replace(row, axes=(ZERO_AXIS,))
        others = tuple(axis for axis in BATCH_AXES if axis != ZERO_AXIS)
        yield replace(row, axes=others, bytes=row.bytes // self.facts.sizes[ZERO_AXIS])

    def vectors(self, rows: Sequence[Row]) -> None:
        """Gradients of norms, biases and whole tables: over the axes in any order, in the loop or after it."""
        got, (least, most) = sum(row.total for row in rows), vector_bounds(self.facts)
        text, axes = FAMILIES["vector"], tuple(dict.fromkeys(axis for row in rows for axis in row.axes))
        if got > most:
            self.unexpected.append(Difference(text, axes, got - most, rows[0].source))
        elif got < least:
            self.missing.append(Difference(text, axes or self.facts.used(*BATCH_AXES), least - got))
