"""The ledger of a compiled program: every array that travels, with its axes, bytes, calls, source and reason.

Of a training step the reason is read from the names in the program, one row for the arrays of a collective with one
purpose. Of a function of the user's own it is what the name stack says.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxshard.analysis.facts import Facts, WeightFact
from jaxshard.analysis.purposes import Name, Piece, Reader, family, merged
from jaxshard.analysis.reasons import FAMILIES, PHASES, SCALARS, described, place
from jaxshard.parallel.axes import AXES, BATCH_AXES, SHORT, STAGE, VOCAB_AXES, ZERO_AXIS
from jaxshard.xla.collectives import Collective, module_collectives
from jaxshard.xla.hlo import Module

_WEIGHTS = ("gather", "update", "gradient", "vector")
_STEPS = "in steps beside the product"
"""TPU: a collective matmul sends parts to a neighbour while it multiplies others."""
_MAY = {
    "gather": {ZERO_AXIS},
    "update": {ZERO_AXIS},
    "gradient": set(BATCH_AXES),
    "vector": set(AXES),
    "send": {STAGE},
    "bookkeeping": set(AXES),
    "optimizer": set(AXES),
}
"""Axes that a purpose may travel over at all; those of activations are those of the vocabulary and the heads."""


@dataclass(frozen=True)
class Row:
    """One line: arrays of one collective that have one reason."""

    kind: str
    axes: tuple[str, ...]
    bytes: int
    """Bytes of the full logical result per call on one device."""
    count: int
    exact: bool
    family: str
    reason: str
    phase: str
    """forward, recomputed, backward or outside (of both)."""
    source: str
    """Source line."""
    is_async: bool
    overlap: str
    """What runs meanwhile, in words."""
    dtype: str
    note: str
    name: str
    """HLO instruction."""
    form: str
    """plain, pair, fused, async fused or send."""
    parameters: tuple[str, ...] = ()
    """Weights that the arrays are, or whose gradients they are; none for activations."""
    stacked: int = 0
    """Bytes of those arrays that are many layers of a weight at once."""
    padding: int = 0
    """Bytes beyond those of the weights."""
    path: str = ""
    """Of a product's sum, the product's weight."""

    @property
    def total(self) -> int:
        return self.bytes * self.count


def rows(module: Module, mesh: Mapping[str, int], facts: Facts | None = None) -> list[Row]:
    """The ledger of a compiled module; `facts` those of a training step, None for other functions."""
    collectives = module_collectives(module, mesh)
    if facts is None:
        return [row for found in collectives for row in _own_rows(found)]
    weights = {weight.path: weight for weight in facts.weights}
    reader, vocab = Reader(module, frozenset(weights)), facts.used(*VOCAB_AXES)
    return [row for found in collectives for row in _rows(reader, found, weights, vocab)]


def bytes_by_axis(found: Iterable[Row]) -> dict[str, int]:
    """Bytes of all calls of one step, by axes joined with +."""
    result: dict[str, int] = defaultdict(int)
    for row in found:
        result["+".join(row.axes) or "none"] += row.total
    return dict(result)


def _own_rows(found: Collective) -> Iterator[Row]:
    """Of a function of the user's own: arrays that the same is said of, together."""
    grouped: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    options = merged(found.op_name, len(found.parts)) or [found.op_name] * len(found.parts)
    phases = {}
    for part, op_name in zip(found.parts, options, strict=True):
        key = ("bookkeeping" if part.elements <= SCALARS else "", described(found.kind, op_name), part.dtype)
        grouped[key].append(part.bytes)
        phases.setdefault(key, place(op_name).phase)
    for key, sizes in grouped.items():
        purpose, text, dtype = key
        yield _row(found, purpose, text, phases[key], dtype, sum(sizes))


def _rows(
    reader: Reader, found: Collective, weights: Mapping[str, WeightFact], vocab: tuple[str, ...]
) -> Iterator[Row]:
    grouped: dict[tuple[str, str, str, str], list[Piece]] = defaultdict(list)
    for piece in reader.pieces(found):
        purpose, text = _reason(found, piece, weights, vocab)
        path = piece.name.path if purpose in ("row", "column") else ""
        grouped[purpose, text, piece.dtype, path].append(piece)
    for (purpose, text, dtype, path), parts in grouped.items():
        of_weights = [part for part in parts if part.name.path] if purpose in _WEIGHTS else []
        yield _row(
            found,
            purpose,
            text,
            parts[0].name.phase,
            dtype,
            sum(part.bytes for part in parts),
            parameters=tuple(dict.fromkeys(part.name.path for part in of_weights)),
            stacked=sum(part.bytes for part in of_weights if _is_stack(part, weights[part.name.path])),
            padding=sum(part.padding for part in of_weights),
            path=path,
        )


def _row(found: Collective, purpose: str, text: str, phase: str, dtype: str, size: int, **of_weights: Any) -> Row:
    """The line of arrays of a collective that have `size` bytes in all; `of_weights`: the fields that say of which."""
    return Row(
        kind=found.kind,
        axes=found.axes,
        bytes=size,
        count=found.count,
        exact=found.exact,
        family=purpose,
        reason=text,
        phase=phase,
        source=_short_source(found.source),
        is_async=found.is_async,
        overlap=_overlap_words(found),
        dtype=dtype,
        note="; ".join(note for note in (found.note, _branch_note(found)) if note),
        name=found.name,
        form=found.form,
        **of_weights,
    )


def _reason(
    found: Collective, part: Piece, weights: Mapping[str, WeightFact], vocab: tuple[str, ...]
) -> tuple[str, str]:
    """The purpose and its words; the purpose is "" where nothing asks for such an array over these axes.

    `vocab`: axes that the vocabulary is split over.
    """
    name, axes = part.name, set(found.axes)
    purpose = family(name, part.kind, found.axes, weights)
    if purpose == "embedding" and found.axes == (STAGE,) != vocab:
        purpose = "stage"  # the second half of a sum over both
    few = part.elements <= SCALARS and (purpose in ("", "optimizer") or not axes <= _may(purpose))
    if few or part.elements == 1:  # one number in a combined call may bear the call's name
        purpose = "bookkeeping"
    if purpose == "bookkeeping" and part.elements > SCALARS:
        purpose = ""  # a norm or a metric is a number; this is what it is made from
    words = " and ".join(SHORT[axis] for axis in found.axes)
    where = ", ".join(word for word in (name.scope or name.path, name.operation, name.phase) if word)
    whole = "loss" if name.scope == "loss" else "embedding"
    if purpose in ("loss", "embedding") and part.kind == "all-gather" and axes.intersection(VOCAB_AXES):
        return "", f"the {whole} is not vocabulary-parallel: its logits or table travel over {words} ({where})"
    if purpose and axes <= _may(purpose):
        in_steps = found.kind == "collective-permute" and name.operation == "dot_general"
        details = ", ".join(word for word in (_detail(name, purpose), _STEPS if in_steps else "") if word)
        return purpose, FAMILIES[purpose] + (f" ({details})" if details else "")
    if purpose in _WEIGHTS:
        return "", f"{name.path} (or its gradient) travels over {words}, where no rule splits it"
    return "", f"an activation travels over {words}: {found.kind} in {where or 'code without a name'}"


def _may(purpose: str) -> set[str]:
    return _MAY.get(purpose, set(VOCAB_AXES))


def _detail(name: Name, purpose: str) -> str:
    phase = PHASES[name.phase] or name.phase
    if purpose == "gather" and name.path.startswith("blocks."):
        return f"layer scan, {phase}"
    if purpose in ("gather", "gradient", "vector"):
        return "layers" if name.path.startswith("blocks.") else name.path.partition(".")[0]
    branch = {"attention": "attention", "mlp": "MLP", "final_norm": "final norm"}.get(name.scope, "")
    if purpose == "sequence":
        side = "output's gradient" if name.phase == "backward" else "input"
        return f"{branch} {side}, {phase}".strip() if branch else "gradient of the embedding"
    if purpose in ("row", "column"):
        return ", ".join(word for word in (branch, "recomputed" if name.phase == "recomputed" else "") if word)
    if purpose == "loss":
        return {"reduce_max": "maximum", "reduce_sum": "sum"}.get(name.operation, "")
    return "backward" if purpose == "send" and name.phase == "backward" else ""


def _is_stack(part: Piece, weight: WeightFact) -> bool:
    """More than two layers of a stacked matrix at once; TPUs send pairs of fp16 as u32."""
    elements = part.elements * (2 if part.dtype == "u32" else 1)
    return weight.group == "blocks" and not weight.vector and elements > 2 * weight.elements


def _short_source(source: str) -> str:
    return "/".join(source.split("/")[-2:])


def _branch_note(found: Collective) -> str:
    return f"only when taken: {', '.join(found.branches)}" if found.branches else ""


def _overlap_words(found: Collective) -> str:
    if found.overlap is None:
        return ""
    work = found.overlap
    flops = f"{work.flops / 1e9:,.2f} GFLOP in " if work.flops >= 5e6 else ""
    count = len(work.instructions)
    return f"{flops}{count} instruction{'s' if count > 1 else ''}" if count else "nothing"
