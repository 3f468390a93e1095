"""Found against expected: what is missing, what is unexpected, and what a compiler only does in another way.

Known rewrites, named where they are met: the CPU compiler forms no reduce-scatter and has no 16-bit arithmetic; the
TPU compiler sums whole arrays where they are small or awkward to scatter, gathers short vectors by a sum, and joins
sums over two axes; any compiler may move a sum, or the gather of a table, out of its loop. On GPUs an
all-reduce in place of a reduce-scatter is not excused: it moves twice the bytes. Only gradients of norms, biases and
tables that several devices hold whole may take any way, within `expected.vector_bounds`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from jaxshard.analysis.expected import Expected, chosen, expected, open_families, vector_bounds
from jaxshard.analysis.facts import Facts
from jaxshard.analysis.ledger import Row
from jaxshard.analysis.reasons import FAMILIES
from jaxshard.parallel.axes import SHORT

LEAST_THRESHOLD = 1024
"""Unexpected bytes of a step that never matter."""
THRESHOLD = 0.005
"""Unexpected bytes that do not matter, as a share of all bytes of a step."""
_ACTIVATIONS = ("row", "column", "sequence", "embedding", "loss-input", "kv", "send", "stage")
_EXTRA_REDUCE = "all-reduce where a reduce-scatter would do (twice the bytes on the wire)"


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
    compare = _Comparison(facts, platform)
    wanted, unpredicted = expected(facts), open_families(facts)
    if unpredicted:
        own = sum(row.total for row in rows if of_optimizer(row, facts))
        unpredicted = {name: f"{why}: {own:,} bytes are not compared" for name, why in unpredicted.items()}
        rows = [row for row in rows if not of_optimizer(row, facts)]
    vectors = [row for row in rows if row.family == "vector"]
    rows = [row for row in rows if row.family not in ("bookkeeping", "vector")]
    found_gathers = [row for row in rows if row.family == "gather"]
    rows = compare.without_padding(rows)
    wanted = chosen(wanted, lambda family, axes: sum(compare.summed(row, family, axes) for row in rows))
    for family in dict.fromkeys([row.family for row in (*wanted, *rows) if row.family != "vector"]):
        compare.family(
            family,
            [compare.as_asked(row) for row in rows if row.family == family],
            [row for row in wanted if row.family == family],
        )
    compare.vectors(vectors, [row for row in wanted if row.family == "vector"])
    return Check(
        tuple(wanted),
        tuple(compare.missing),
        tuple(compare.unexpected),
        tuple(compare.rewrites),
        tuple(unpredicted.values()),
        limit,
        tuple(held_whole(found_gathers, compare.missing, facts, limit)),
    )


def held_whole(rows: list[Row], missing: Iterable[Difference], facts: Facts, limit: int) -> Iterator[str]:
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
            yield (
                f"{row.parameters}: {row.stacked:,} bytes of all layers are gathered in one call ({row.name}): every "
                "device holds them whole at once"
            )


def of_optimizer(row: Row, facts: Facts) -> bool:
    """Traffic of the optimizer's own arithmetic, or that looks like it: in neither of the passes, where no gradients
    are reduced unless that is deferred."""
    unknown = ("",) if facts.apart else ("", "vector")
    return row.family == "optimizer" or (row.phase == "outside" and row.family in unknown)


def _split_inputs(facts: Facts) -> int:
    """Products of one layer that are split over model and read a branch's input: query, key, value; gate and up."""
    return (3 if facts.split_kv else 1) + (2 if facts.family == "llama" else 1)


class _Comparison:
    """Collects differences and rewrites, family by family."""

    def __init__(self, facts: Facts, platform: str):
        self.facts, self.platform = facts, platform
        self.missing: list[Difference] = []
        self.unexpected: list[Difference] = []
        self.rewrites: dict[str, None] = {}

    def as_asked(self, row: Row) -> Row:
        """A row with its bytes in the type that was asked for, where its compiler is known to change that."""
        facts = self.facts
        asked = facts.activation_bytes if row.family in _ACTIVATIONS else facts.parameter_bytes
        if row.family not in (*_ACTIVATIONS, "gather", "update"):
            return row
        no_16_bits = self.platform == "cpu" or (self.platform == "tpu" and facts.compute == "f16")
        if asked == 2 and row.dtype == "f32" and no_16_bits:
            self.rewrites["16-bit arrays travel as f32, twice the bytes: the compiler computes in f32"] = None
            return replace(row, bytes=row.bytes // 2)
        if asked == 4 and row.dtype == "bf16" and self.platform == "tpu":
            self.rewrites["fp32 arrays travel as bf16, half the bytes: a TPU's products round them to it"] = None
            return replace(row, bytes=row.bytes * 2)
        return row

    def summed(self, row: Row, family: str, axes: tuple[str, ...]) -> int:
        """Bytes that a row sums, as asked for, if it is of this family and over these axes."""
        sums = row.family == family and row.axes == axes and row.kind in ("reduce-scatter", "all-reduce")
        return self.as_asked(row).total if sums else 0

    def family(self, family: str, rows: list[Row], wanted: list[Expected]) -> None:
        """Compares the bytes of one family over each set of axes."""
        if not wanted:
            self.unexpected += [Difference(row.reason, row.axes, row.total, row.source) for row in rows]
            return
        text = FAMILIES[family]
        rows = [part for row in rows for part in self._apart(row, text, {want.axes for want in wanted})]
        for axes in dict.fromkeys(row.axes for row in (*wanted, *rows)):
            have, want = [r for r in rows if r.axes == axes], [r for r in wanted if r.axes == axes]
            self._kinds(text, have, {row.kind for row in want})
            most, least = sum(r.total for r in want), sum(r.least for r in want)
            got = self._stands_for(family, text, have, most)
            kept = self._kept(family, text, want, least - got)
            least -= kept
            if got > most:
                words = dict.fromkeys(row.reason for row in have)
                self.unexpected.append(Difference(" / ".join(words), axes, got - most, have[-1].source))
            elif got < least:
                self.missing.append(Difference(text, axes, least - got))
            elif not kept and got < sum(row.total for row in want if not row.optional):
                self.rewrites[f"{text}: moved out of its loop, once instead of in every part"] = None

    def without_padding(self, rows: list[Row]) -> list[Row]:
        """On TPUs an array that does not scatter evenly is padded, and its parts are shifted back: a little traffic."""
        shifts = [row for row in rows if row.kind == "collective-permute" and not row.family]
        size = sum(row.total for row in shifts)
        if self.platform != "tpu" or not 0 < size <= 0.01 * sum(row.total for row in rows):
            return rows
        self.rewrites[f"parts of padded arrays are shifted between neighbours, {size:,} bytes"] = None
        return [row for row in rows if row not in shifts]

    def _stands_for(self, family: str, text: str, have: list[Row], most: int) -> int:
        """Bytes that were asked for by what was found, where a compiler does it in a way that moves others."""
        got = sum(row.total for row in have)
        if self.platform == "tpu":
            steps = sum(row.total for row in have if row.kind == "collective-permute" and family != "send")
            padding = sum(row.padding * row.count for row in have)
            if padding:
                # Part k begins k paddings too early: the last one is as many rows off as the others are padded by.
                shifts = steps if steps <= padding else 0
                self.rewrites[
                    f"{text}: parts padded to whole tiles, {padding + shifts:,} bytes with their way back"
                ] = None
                got, steps = got - padding - shifts, steps - shifts
            # Around a ring of n, one way or both, (n-1)/n to (n+1)/n of the bytes pass.
            if steps and 0.7 * steps <= most - (got - steps) <= 2 * steps:
                self.rewrites[f"{text}: a collective matmul, in permutes beside the product"] = None
                return most
            if most < got <= 1.01 * most and any(row.form == "fused" for row in have):
                self.rewrites[f"{text}: padded by {got - most:,} bytes"] = None
                return most
        if self.platform == "cpu" and family == "column" and 2 * got == most * _split_inputs(self.facts) > 2 * most:
            self.rewrites[f"{text}: one sum for each product that reads the input, instead of one of them together"] = (
                None
            )
            return most
        return got

    def _kept(self, family: str, text: str, want: list[Expected], lacking: int) -> int:
        """Bytes that the CPU compiler need not gather: in a pipeline it may keep a weight from forward to backward."""
        again = sum(row.total for row in want if row.again)
        if self.platform != "cpu" or family != "gather" or not self.facts.schedule or not 0 < lacking <= again:
            return 0
        self.rewrites[f"{text}: what is gathered for the forward pass is kept for the backward pass"] = None
        return lacking

    def _apart(self, row: Row, text: str, known: set[tuple[str, ...]]) -> list[Row]:
        """A sum over replica and data, as the scatter over data and the sum of parts over replica that it is for."""
        joins = self.platform != "gpu" and row.kind == "all-reduce" and row.axes == ("replica", "data")
        if not joins or row.axes in known or ("data",) not in known:
            return [row]
        self.rewrites[f"{text}: one all-reduce over replica and dp, for a reduce-scatter and one of the parts"] = None
        part = replace(row, axes=("replica",), bytes=row.bytes // self.facts.mesh.data)
        return [replace(row, axes=("data",)), part]

    def _kinds(self, text: str, have: list[Row], wanted: set[str]) -> None:
        """Names what is done as another kind of collective; on GPUs a sum for a scatter is an error."""
        for kind in {row.kind for row in have} - wanted if wanted else ():
            if kind == "all-reduce" and "reduce-scatter" in wanted:
                if self.platform == "gpu":
                    whole = [row for row in have if row.kind == kind]
                    size = sum(row.total for row in whole)
                    self.unexpected.append(Difference(f"{text}: {_EXTRA_REDUCE}", whole[0].axes, size, whole[0].source))
                else:
                    self.rewrites[f"{text}: all-reduce of which every device keeps a part, for reduce-scatter"] = None
            elif kind == "all-reduce" and "all-gather" in wanted:
                self.rewrites[f"{text}: short vectors by an all-reduce of parts among zeros, for all-gather"] = None
            else:
                self.rewrites[f"{text}: {kind} for {' and '.join(sorted(wanted))}"] = None

    def vectors(self, rows: list[Row], wanted: list[Expected]) -> None:
        """Gradients of norms, biases and whole tables: over the axes in any order, in the loop or after it.

        Args:
            rows: what was found of them, and of weights that cannot be told from them (`Facts.alike`).
            wanted: those weights' own traffic, which must be scattered where ZeRO scatters it.
        """
        got = sum(row.total for row in rows)
        least, most = vector_bounds(self.facts)
        least, most = least + sum(row.least for row in wanted), most + sum(row.total for row in wanted)
        text, axes = FAMILIES["vector"], tuple(dict.fromkeys(axis for row in rows for axis in row.axes))
        if got > most:
            self.unexpected.append(Difference(text, axes, got - most, rows[0].source))
        elif got < least:
            self.missing.append(Difference(text, axes or self.facts.used("replica", "data"), least - got))
        scattered, due = (sum(row.total for row in each if row.kind == "reduce-scatter") for each in (rows, wanted))
        if (
            self.platform == "gpu" and rows and least <= got and scattered < due
        ):  # else it is missing, which is said above
            self.unexpected.append(Difference(f"{text}: {_EXTRA_REDUCE}", axes, due - scattered, rows[0].source))
