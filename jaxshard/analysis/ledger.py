"""The ledger of a compiled program: every array that travels, with its axes, bytes, calls, source and reason."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from jaxshard.analysis.facts import Facts
from jaxshard.analysis.reasons import FAMILIES, Reason, Subject, alternatives, is_bounded, place, reason
from jaxshard.xla.collectives import Collective, module_collectives
from jaxshard.xla.hlo import Array, Instruction, Module, leaves

_OPTIMIZER = re.compile(r"training/optimizer\.py|optax/")
_PASSES = ("bitcast", "copy", "reshape", "transpose", "convert", "copy-done", "copy-start")


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
    parameters: str
    """Weights that the arrays are, or whose gradients they are; "" for activations."""
    is_async: bool
    overlap: str
    """What runs meanwhile, in words."""
    dtype: str
    note: str
    name: str
    """HLO instruction."""
    form: str
    """plain, pair, fused, async fused or send."""
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
    return [row for found in module_collectives(module, mesh) for row in _rows(module, found, facts)]


def bytes_by_axis(found: Iterable[Row]) -> dict[str, int]:
    """Bytes of all calls of one step, by axes joined with +."""
    result: dict[str, int] = defaultdict(int)
    for row in found:
        result["+".join(row.axes) or "none"] += row.total
    return dict(result)


def _rows(module: Module, found: Collective, facts: Facts | None) -> list[Row]:
    grouped: dict[tuple[str, str, str], list[tuple[Subject, int]]] = defaultdict(list)
    for subject, size in _subjects(module, found, facts):
        why = reason(subject, facts)
        if facts and _is_optimizers(why, subject, found.source, facts):
            why = Reason("optimizer", FAMILIES["optimizer"])
        grouped[why.family, why.text, subject.dtype].append((subject, size))
    result = []
    for (family, text, dtype), parts in grouped.items():
        names = dict.fromkeys(facts.named(part.dims) for part, _ in parts) if facts and _is_weight(family) else {}
        result.append(
            Row(
                kind=found.kind,
                axes=found.axes,
                bytes=sum(size for _, size in parts),
                count=found.count,
                exact=found.exact,
                family=family,
                reason=text,
                phase=place(parts[0][0].op_name).phase,
                source=short_source(found.source),
                parameters=shorten([name for name in names if name]),
                is_async=found.is_async,
                overlap=overlap_words(found),
                dtype=dtype,
                note="; ".join(note for note in (found.note, branch_note(found)) if note),
                name=found.name,
                form=found.form,
                stacked=sum(size for part, size in parts if facts and facts.stacked(part.dims)),
                padding=sum(_padding(part, size) for part, size in parts if facts and _is_weight(family)),
            )
        )
    return result


def _is_optimizers(why: Reason, subject: Subject, source: str, facts: Facts) -> bool:
    """Whether it is the optimizer's own. Adam's new parameters may bear its lines; Muon's matrices, as large as they
    are, are no parameters; Adafactor's statistics are as large as norms, and may be gathered together with them."""
    if place(subject.op_name).phase != "outside":
        return False
    if why.family == "update" and facts.optimizer == "adafactor":
        return is_bounded(facts.named(subject.dims), facts)
    return bool(_OPTIMIZER.search(source)) and (why.family != "update" or facts.optimizer == "muon")


def _padding(subject: Subject, size: int) -> int:
    return max(0, size - Array(subject.dtype, subject.dims).bytes)


def _is_weight(family: str) -> bool:
    return family in ("gather", "update", "gradient", "vector")


def shorten(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def short_source(source: str) -> str:
    return "/".join(source.split("/")[-2:])


def branch_note(found: Collective) -> str:
    return f"only when taken: {', '.join(found.branches)}" if found.branches else ""


def overlap_words(found: Collective) -> str:
    if found.overlap is None:
        return ""
    work = found.overlap
    flops = f"{work.flops / 1e9:,.2f} GFLOP in " if work.flops >= 5e6 else ""
    count = len(work.instructions)
    return f"{flops}{count} instruction{'s' if count > 1 else ''}" if count else "nothing"


def _subjects(module: Module, found: Collective, facts: Facts | None) -> list[tuple[Subject, int]]:
    """The arrays of a collective with their bytes; an operand that several were put together into is taken apart."""
    computation = module.computations.get(found.computation)
    outer = computation.by_name.get(found.name) if computation else None
    names = alternatives(found.op_name, len(found.parts))
    result = []
    for index, part in enumerate(found.parts):
        array, padded = _array(part.unpadded or part.shape), _array(part.shape)
        maker = None
        if outer is not None and computation is not None and len(outer.operands) == len(found.parts):
            maker = _maker(computation.by_name, outer.operands[index])
        # What makes an operand tells parts apart; of a function of the user's own the collective's own name says more.
        own = part.op_name if facts and part.op_name != found.op_name else names[index]
        # A start that stands for an all-gather is made from parts: they tell that it is a parameter.
        pieces = _pieces(module, computation.by_name, maker) if maker and computation else []
        if pieces and sum(piece.elements for piece, _ in pieces) * array.elements == array.elements**2:
            for piece, name in pieces:
                each = name or own
                if facts and facts.named((piece.elements,)) and not facts.named(piece.dims):
                    piece = Array(piece.dtype, (piece.elements,))  # two dims of the weight merged into one
                subject = Subject(found.kind, found.axes, piece.dims, array.dtype, each, _is_parameter(each))
                result.append((subject, piece.elements * padded.bytes // max(1, array.elements)))
        else:
            if array.dtype == "u32" and facts and facts.activation_bytes == 2:
                array = Array(facts.compute, (2 * array.elements,))  # a TPU's pairs of fp16
            subject = Subject(found.kind, found.axes, array.dims, array.dtype, own, _is_parameter(own))
            result.append((subject, padded.bytes))
    return result


def _array(text: str) -> Array:
    dtype, _, dims = text.rstrip("]").partition("[")
    return Array(dtype, tuple(int(dim) for dim in dims.split(",") if dim))


def _is_parameter(op_name: str) -> bool:
    return op_name.startswith("state.params") or "dynamic_index_in_dim" in op_name


def _maker(by_name: Mapping[str, Instruction], name: str) -> Instruction | None:
    made = by_name.get(name)
    while made is not None and made.opcode in _PASSES and made.operands:
        made = by_name.get(made.operands[0])
    return made


def _pieces(module: Module, by_name: Mapping[str, Instruction], made: Instruction) -> list[tuple[Array, str]]:
    """Shapes and name stacks of the arrays that a concatenation, alone in a fusion or not, puts together."""
    joined = made
    if made.opcode == "fusion" and made.called:
        joined = module.computations[made.called[0]].root
        while joined.opcode in _PASSES and joined.operands:
            joined = module.computations[made.called[0]].by_name[joined.operands[0]]
    if joined.opcode != "concatenate":
        return []
    pieces = []
    inside = module.computations[made.called[0]].by_name if made.opcode == "fusion" else by_name
    for operand in joined.operands:
        source = _maker(inside, operand)
        if source is not None and source.opcode == "parameter" and made.opcode == "fusion":
            source = _maker(by_name, made.operands[source.index]) or source
        flat = next(leaves(inside[operand].shape))
        arrays = [array for array in leaves(source.shape)] if source is not None else []
        same = [array for array in arrays if array.elements == flat.elements]
        pieces.append((same[0] if same else flat, source.op_name if source is not None else ""))
    return pieces
