"""What compilers write in place of what was asked for: one table, which brings it back to that form.

A row of `EQUIVALENCES` says what a compiler may do in place of what, on which platforms, and how that counts. What it
does not explain is missing or unexpected. On GPUs a sum in place of a scatter is not excused: it moves twice the bytes.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from jaxshard.analysis.expected import Expected
from jaxshard.analysis.facts import Facts
from jaxshard.analysis.ledger import Row

_ACTIVATIONS = ("row", "column", "sequence", "embedding", "loss-input", "kv", "send", "stage")


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
    platforms: tuple[str, ...]
    """cpu, gpu, tpu, or tpu-f16: with fp16 activations only."""
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
        "16-bit arrays travel as f32, twice the bytes: the compiler computes in f32",
        ("cpu", "tpu-f16"),
        _each(_widened),
    ),
    Equivalence(
        "fp32 arrays travel as bf16, half the bytes: a TPU's products round them to it", ("tpu",), _each(_rounded)
    ),
    Equivalence("short vectors are brought together before they are narrowed", ("tpu",), _each(_before_narrowing)),
    Equivalence("parts padded to whole tiles, and shifted back", ("tpu",), _padded),
    Equivalence(
        "one sum for each product that reads the input, instead of one of them together", ("cpu",), _each_product
    ),
    Equivalence("a collective matmul, in permutes beside the product", ("tpu",), _in_steps),
    Equivalence("padded", ("tpu",), _nearly),
    Equivalence(
        "all-reduce of which every device keeps a part, for reduce-scatter", ("cpu", "tpu"), _sum_for("reduce-scatter")
    ),
    Equivalence(
        "short vectors by an all-reduce of parts among zeros, for all-gather",
        ("cpu", "gpu", "tpu"),
        _sum_for("all-gather"),
    ),
    Equivalence("another kind of collective that moves the same", ("cpu", "gpu", "tpu"), _each(_other_kind)),
)
"""What compilers write in place of what was asked for, in the order in which it is undone."""
