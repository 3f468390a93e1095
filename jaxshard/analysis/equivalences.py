"""Found against expected, after one table has brought what compilers write to the form that was asked for.

A row of `EQUIVALENCES` says what a compiler may do in place of what, on which platforms, and how that counts. What it
does not explain is missing or unexpected. On GPUs a sum in place of a scatter is not excused: it moves twice the bytes.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from jaxshard.analysis.compare import LEAST_THRESHOLD, THRESHOLD, Check, Difference, held_whole, of_optimizer
from jaxshard.analysis.expected import Expected, chosen, open_families, vector_bounds
from jaxshard.analysis.facts import Facts
from jaxshard.analysis.ledger import Row
from jaxshard.analysis.reasons import FAMILIES
from jaxshard.analysis.traffic import asked

_ACTIVATIONS = ("row", "column", "sequence", "embedding", "loss-input", "kv", "send", "stage")
_TWICE = "all-reduce where a reduce-scatter would do (twice the bytes on the wire)"


class Group(NamedTuple):
    """What was found and asked for of one purpose over the same axes."""

    facts: Facts
    family: str
    axes: tuple[str, ...]
    rows: Sequence[Row]
    wanted: Sequence[Expected]

    @property
    def most(self) -> int:
        return sum(row.total for row in self.wanted)

    @property
    def got(self) -> int:
        return sum(row.total for row in self.rows)

    @property
    def kinds(self) -> set[str]:
        return {row.kind for row in self.wanted}

    @property
    def itemsize(self) -> int:
        """Bytes of a number, as asked; 0 where the type is not the compiler's choice."""
        weights = self.facts.parameter_bytes if self.family in ("gather", "update") else 0
        return self.facts.activation_bytes if self.family in _ACTIVATIONS else weights


@dataclass(frozen=True)
class Equivalence:
    """One form in place of another."""

    text: str
    platforms: str
    """Words: cpu, gpu, tpu, or tpu-f16: with fp16 activations only."""
    apply: Callable[[Group], Sequence[Row] | None]
    """The rows as they were asked for, or None where this is not met."""


def _each(change: Callable[[Group, Row], Row | None]) -> Callable[[Group], Sequence[Row] | None]:
    """Applies to rows one by one."""

    def apply(group: Group) -> Sequence[Row] | None:
        changed = [change(group, row) for row in group.rows]
        return [new or old for new, old in zip(changed, group.rows, strict=True)] if any(changed) else None

    return apply


def _widened(group: Group, row: Row) -> Row | None:
    return replace(row, bytes=row.bytes // 2, dtype="bf16") if group.itemsize == 2 and row.dtype == "f32" else None


def _before_narrowing(group: Group, row: Row) -> Row | None:
    is_weight = group.family in ("gather", "update") and row.kind == "all-reduce"
    return _widened(group, row) if is_weight else None


def _rounded(group: Group, row: Row) -> Row | None:
    return replace(row, bytes=row.bytes * 2, dtype="f32") if group.itemsize == 4 and row.dtype == "bf16" else None


def _padded(group: Group) -> Sequence[Row] | None:
    """Parts padded to whole tiles; part k begins k paddings too early and is shifted back, by no more than them all."""
    padding = sum(row.padding * row.count for row in group.rows)
    if not padding:
        return None
    steps = sum(row.total for row in group.rows if row.kind == "collective-permute")
    keep = [row for row in group.rows if row.kind != "collective-permute" or not 0 < steps <= padding]
    return [replace(row, bytes=row.bytes - row.padding, padding=0) for row in keep]


def _nearly(group: Group) -> Sequence[Row] | None:
    """Whole arrays of a fused scatter, padded by up to a hundredth."""
    if not group.most < group.got <= 1.01 * group.most or all(row.form != "fused" for row in group.rows):
        return None
    return _as_asked(group)


def _as_asked(group: Group) -> Sequence[Row]:
    """Rows of just the bytes that were asked for."""
    return [replace(group.rows[0], kind=row.kind, bytes=row.bytes, count=row.count) for row in group.wanted]


def _in_steps(group: Group) -> Sequence[Row] | None:
    """Around a ring of n, one way or both, (n-1)/n to (n+1)/n of the bytes pass."""
    steps = sum(row.total for row in group.rows if row.kind == "collective-permute")
    stands_for = group.most - (group.got - steps)
    if group.family == "send" or not steps or not 0.7 * steps <= stands_for <= 2 * steps:
        return None
    return _as_asked(group)


def _each_product(group: Group) -> Sequence[Row] | None:
    """Of the sums of one branch's products, which add up to one gradient, the largest."""
    if group.family != "column":
        return None
    branches: dict[tuple[str, int], dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in group.rows:
        branches[row.path.rpartition(".")[0], row.count][row.path].append(row)
    if all(len(products) == 1 for products in branches.values()):
        return None
    size = lambda rows: sum(row.total for row in rows)
    return [row for products in branches.values() for row in max(products.values(), key=size)]


def _sum_for(kind: str) -> Callable[[Group], Sequence[Row] | None]:
    def change(group: Group, row: Row) -> Row | None:
        return replace(row, kind=kind) if row.kind == "all-reduce" and group.kinds == {kind} else None

    return _each(change)


def _other_kind(group: Group, row: Row) -> Row | None:
    wanted = sorted(group.kinds)
    return replace(row, kind=wanted[0]) if wanted and row.kind not in wanted and row.kind != "all-reduce" else None


EQUIVALENCES = (
    Equivalence(
        "16-bit arrays travel as f32, twice the bytes: the compiler computes in f32", "cpu tpu-f16", _each(_widened)
    ),
    Equivalence(
        "fp32 arrays travel as bf16, half the bytes: a TPU's products round them to it", "tpu", _each(_rounded)
    ),
    Equivalence("short vectors are brought together before they are narrowed", "tpu", _each(_before_narrowing)),
    Equivalence("parts padded to whole tiles, and shifted back", "tpu", _padded),
    Equivalence("one sum for each product that reads the input, instead of one of them together", "cpu", _each_product),
    Equivalence("a collective matmul, in permutes beside the product", "tpu", _in_steps),
    Equivalence("padded", "tpu", _nearly),
    Equivalence(
        "all-reduce of which every device keeps a part, for reduce-scatter", "cpu tpu", _sum_for("reduce-scatter")
    ),
    Equivalence(
        "short vectors by an all-reduce of parts among zeros, for all-gather", "cpu gpu tpu", _sum_for("all-gather")
    ),
    Equivalence("another kind of collective that moves the same", "cpu gpu tpu", _each(_other_kind)),
)
"""What compilers write in place of what was asked for, in the order in which it is undone."""
JOINED = "one all-reduce over replica and dp, for a reduce-scatter and one of the parts"
MOVED = "moved out of its loop, once instead of in every part"
KEPT = "what is gathered for the forward pass is kept for the backward pass"


def compare(found: Iterable[Row], facts: Facts, platform: str, threshold: int | None = None) -> Check:
    """Compares a ledger, read by names, with what is asked for; arguments as `check.check` takes them."""
    rows = list(found)
    limit = max(LEAST_THRESHOLD, int(THRESHOLD * sum(row.total for row in rows))) if threshold is None else threshold
    unpredicted = open_families(facts)
    if unpredicted:
        own = sum(row.total for row in rows if of_optimizer(row, facts))
        unpredicted = {name: f"{why}: {own:,} bytes are not compared" for name, why in unpredicted.items()}
        rows = [row for row in rows if not of_optimizer(row, facts)]
    result = _Result(facts, platform)
    sums = lambda family, axes: result.summed([row for row in rows if row.family == family and row.axes == axes])
    wanted = chosen(asked(facts), sums)
    for family in dict.fromkeys(row.family for row in (*wanted, *rows) if row.family not in ("bookkeeping", "vector")):
        result.purpose(
            family, [row for row in rows if row.family == family], [row for row in wanted if row.family == family]
        )
    result.vectors([row for row in rows if row.family == "vector"])
    gathers = [row for row in rows if row.family == "gather"]
    undone = tuple(held_whole(gathers, result.missing, facts, limit))
    return Check(
        tuple(wanted),
        tuple(result.missing),
        tuple(result.unexpected),
        tuple(result.rewrites),
        tuple(unpredicted.values()),
        limit,
        undone,
    )


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
            if not forms.isdisjoint(one.platforms.split()) and group.rows:
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
                self.rewrites[f"{text}: {MOVED}"] = None

    def _lacking(self, group: Group, least: int) -> None:
        """What is missing; the CPU compiler may keep a weight from forward to backward in a pipeline."""
        again = sum(row.total for row in group.wanted if row.again)
        text, lacking = FAMILIES[group.family], least - group.got
        if self.platform == "cpu" and self.facts.schedule and lacking <= again:
            self.rewrites[f"{text}: {KEPT}"] = None
        else:
            self.missing.append(Difference(text, group.axes, lacking))

    def _apart(self, row: Row, text: str, known: set[tuple[str, ...]]) -> Iterator[Row]:
        """A sum over replica and data, as the scatter over data and the sum of parts over replica that it is for."""
        joins = self.platform != "gpu" and row.kind == "all-reduce" and row.axes == ("replica", "data")
        if not joins or row.axes in known or ("data",) not in known:
            yield row
            return
        self.rewrites[f"{text}: {JOINED}"] = None
        yield replace(row, axes=("data",))
        yield replace(row, axes=("replica",), bytes=row.bytes // self.facts.mesh.data)

    def vectors(self, rows: Sequence[Row]) -> None:
        """Gradients of norms, biases and whole tables: over the axes in any order, in the loop or after it."""
        got, (least, most) = sum(row.total for row in rows), vector_bounds(self.facts)
        text, axes = FAMILIES["vector"], tuple(dict.fromkeys(axis for row in rows for axis in row.axes))
        if got > most:
            self.unexpected.append(Difference(text, axes, got - most, rows[0].source))
        elif got < least:
            self.missing.append(Difference(text, axes or self.facts.used("replica", "data"), least - got))
