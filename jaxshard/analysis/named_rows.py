"""The ledger of a training step, read from the names in it: one row for the arrays of a collective with one purpose."""

from collections import defaultdict
from collections.abc import Mapping

from jaxshard.analysis.facts import Facts, WeightFact
from jaxshard.analysis.ledger import Row, branch_note, overlap_words, short_source, shorten
from jaxshard.analysis.purposes import Name, Piece, Reader, family
from jaxshard.analysis.reasons import BATCH_AXES, FAMILIES, SCALARS, VOCAB_AXES
from jaxshard.parallel.axes import SHORT
from jaxshard.parallel.rules import ZERO_AXIS
from jaxshard.xla.collectives import Collective, module_collectives
from jaxshard.xla.hlo import Module

_WEIGHTS = ("gather", "update", "gradient", "vector")
_MAY = {
    "gather": {ZERO_AXIS},
    "update": {ZERO_AXIS},
    "gradient": BATCH_AXES,
    "vector": BATCH_AXES | VOCAB_AXES,
    "send": {"stage"},
    "bookkeeping": BATCH_AXES | VOCAB_AXES,
    "optimizer": BATCH_AXES | VOCAB_AXES,
}
"""Axes that a purpose may travel over at all; activations over those of the vocabulary and the heads."""


def named_rows(module: Module, mesh: Mapping[str, int], facts: Facts) -> list[Row]:
    """The ledger of a compiled training step."""
    weights = {weight.path: weight for weight in facts.weights}
    reader = Reader(module, frozenset(weights))
    vocab = facts.used("stage", "model")
    return [row for found in module_collectives(module, mesh) for row in _rows(reader, found, weights, vocab)]


def _rows(reader: Reader, found: Collective, weights: Mapping[str, WeightFact], vocab: tuple[str, ...]) -> list[Row]:
    grouped: dict[tuple[str, str, str, str], list[Piece]] = defaultdict(list)
    for piece in reader.pieces(found):
        purpose, text = _reason(found, piece, weights, vocab)
        path = piece.name.path if purpose in ("row", "column") else ""
        grouped[purpose, text, piece.dtype, path].append(piece)
    result = []
    for (purpose, text, dtype, path), parts in grouped.items():
        paths = list(dict.fromkeys(part.name.path for part in parts if part.name.path)) if purpose in _WEIGHTS else []
        result.append(
            Row(
                kind=found.kind,
                axes=found.axes,
                bytes=sum(part.bytes for part in parts),
                count=found.count,
                exact=found.exact,
                family=purpose,
                reason=text,
                phase=parts[0].name.phase,
                source=short_source(found.source),
                parameters=shorten(paths),
                is_async=found.is_async,
                overlap=overlap_words(found),
                dtype=dtype,
                note="; ".join(note for note in (found.note, branch_note(found)) if note),
                name=found.name,
                path=path,
                form=found.form,
                stacked=sum(
                    part.bytes for part in parts if purpose in _WEIGHTS and _is_stack(part, weights.get(part.name.path))
                ),
                padding=sum(
                    _padding(found, part, weights.get(part.name.path)) for part in parts if purpose in _WEIGHTS
                ),
            )
        )
    return result


def _reason(
    found: Collective, part: Piece, weights: Mapping[str, WeightFact], vocab: tuple[str, ...]
) -> tuple[str, str]:
    """The purpose and its words; the purpose is "" where nothing asks for such an array over these axes.

    `vocab`: axes that the vocabulary is split over.
    """
    name, axes = part.name, set(found.axes)
    purpose = family(name, part.kind, found.axes, weights)
    if purpose == "embedding" and found.axes == ("stage",) != vocab:
        purpose = "stage"  # the second half of a sum over both
    if part.elements <= SCALARS and (purpose in ("", "optimizer") or not axes <= _MAY.get(purpose, VOCAB_AXES)):
        purpose = "bookkeeping"
    words = " and ".join(SHORT[axis] for axis in found.axes)
    where = ", ".join(word for word in (name.scope or name.path, name.operation, name.phase) if word)
    whole = "loss" if name.scope == "loss" else "embedding"
    if purpose in ("loss", "embedding") and part.kind == "all-gather" and axes & VOCAB_AXES:
        return "", f"the {whole} is not vocabulary-parallel: its logits or table travel over {words} ({where})"
    if purpose and axes <= _MAY.get(purpose, VOCAB_AXES):
        detail = _detail(name, purpose)
        return purpose, FAMILIES[purpose] + (f" ({detail})" if detail else "")
    if purpose in _WEIGHTS:
        return "", f"{name.path} (or its gradient) travels over {words}, where no rule splits it"
    return "", f"an activation travels over {words}: {found.kind} in {where or 'code without a name'}"


def _detail(name: Name, purpose: str) -> str:
    phase = {"recomputed": "recomputed for the backward"}.get(name.phase, name.phase)
    if purpose == "gather" and name.path.startswith("blocks."):
        return f"layer scan, {phase}"
    if purpose in _WEIGHTS:
        return "layers" if name.path.startswith("blocks.") else name.path.partition(".")[0]
    branch = {"attention": "attention", "mlp": "MLP", "final_norm": "final norm"}.get(name.scope, "")
    if purpose == "sequence":
        side = "output's gradient" if name.phase == "backward" else "input"
        return f"{branch} {side}, {phase}".strip() if branch else "gradient of the embedding"
    if purpose in ("row", "column"):
        return ", ".join(word for word in (branch, "recomputed" if name.phase == "recomputed" else "") if word)
    return {"send": "backward"}.get(purpose, "") if name.phase == "backward" else ""


def _is_stack(part: Piece, weight: WeightFact | None) -> bool:
    """More than two layers of a stacked matrix at once."""
    return weight is not None and weight.group == "blocks" and not weight.vector and part.elements > 2 * weight.elements


def _padding(found: Collective, part: Piece, weight: WeightFact | None) -> int:
    """Bytes beyond those of the weight's layers, where a TPU scatters it in parts of whole tiles."""
    if weight is None or found.kind != "reduce-scatter" or part.elements < weight.elements:
        return 0
    return part.bytes * (part.elements % weight.elements) // part.elements
