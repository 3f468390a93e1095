"""Why a collective is there, in words: from where jax's name stack says it comes, its axes, its shape and its kind.

A name stack such as `jit(train_step)/transpose(jvp())/while/body/closed_call/checkpoint/rematted_computation/mlp/...`
says: the backward pass, within a loop, an activation that is computed again, in the MLP. Shapes tell weights and their
gradients from activations. For a function of the user's own only the name stack speaks.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from jaxshard.analysis.facts import FLOATS, Dims, Facts
from jaxshard.parallel.axes import SHORT

Phase = Literal["forward", "recomputed", "backward", "outside"]
SCOPES = ("embedding", "attention", "mlp", "final_norm", "loss")
STEPS = "in steps beside the product"
"""TPU: a collective matmul sends parts to a neighbour while it multiplies others."""
SCALARS = 64
"""An array of at most so many elements is bookkeeping: losses, norms, counts, flags."""

BATCH_AXES = {"replica", "data"}
VOCAB_AXES = {"stage", "model"}


@dataclass(frozen=True)
class Place:
    """What a name stack says."""

    phase: Phase
    """outside: neither forward nor backward pass, such as the optimizer."""
    scope: str
    """One of SCOPES, or ""."""
    loops: int
    """Loops around it."""
    operation: str
    """Last part: the primitive."""


@dataclass(frozen=True)
class Reason:
    """Why, in words, and the family that it is counted in."""

    family: str
    """Key of FAMILIES, or "" when nothing known explains it."""
    text: str


FAMILIES = {
    "gather": "ZeRO-3 parameter gather",
    "update": "updated parameters gathered (ZeRO-1/2)",
    "gradient": "gradient reduction",
    "row": "row-parallel output",
    "column": "column-parallel input gradient",
    "sequence": "sequence-parallel gather",
    "embedding": "vocabulary-parallel embedding",
    "loss": "vocabulary-parallel loss",
    "loss-input": "vocabulary-parallel loss, gradient of its input",
    "kv": "gradient of kv heads that all of the model axis hold",
    "vector": "gradient reduction of norms, biases and whole tables",
    "send": "pipeline send",
    "stage": "pipeline, value of one stage to all",
    "optimizer": "arithmetic of the optimizer",
    "bookkeeping": "bookkeeping (loss, norms, counts)",
}
"""What is expected of a training step; the expected traffic is computed family by family."""


def place(op_name: str) -> Place:
    """Reads a name stack."""
    if "rematted_computation" in op_name:
        phase: Phase = "recomputed"
    elif "transpose(" in op_name:
        phase = "backward"
    else:
        phase = "forward" if "jvp(" in op_name else "outside"
    parts = [part for part in re.split(r"[/()]", op_name) if part]
    scopes = [part for part in parts if part in SCOPES]
    return Place(phase, scopes[-1] if scopes else "", op_name.count("while/body"), parts[-1] if parts else "")


def alternatives(op_name: str, count: int) -> list[str]:
    """One name for each part of a combined collective; a compiler writes "prefix/(first:second)" when names differ."""
    found = re.search(r"^(.*?)\(([^()]*(?:\([^()]*\)[^()]*)*:.*)\)$", op_name)
    options = found[2].split(":") if found else []
    if found and len(options) == count:
        return [found[1] + option for option in options]
    return [op_name] * count


@dataclass(frozen=True)
class Subject:
    """One array that travels."""

    kind: str
    axes: tuple[str, ...]
    dims: Dims
    dtype: str
    op_name: str
    from_parameter: bool = False
    """The array is read from an argument of the program, or is one layer of a stack."""

    @property
    def elements(self) -> int:
        result = 1
        for dim in self.dims:
            result *= dim
        return result


def reason(subject: Subject, facts: Facts | None) -> Reason:
    """The reason for one array's travel; `facts` are those of a training step, None for other functions."""
    where = place(subject.op_name)
    small = subject.elements <= SCALARS
    if not subject.axes or facts is None:
        return Reason("bookkeeping" if small else "", _generic(subject, where))
    axes = set(subject.axes)
    found = None
    if axes <= BATCH_AXES:
        found = _batch_reason(subject, where, facts)
    elif axes <= VOCAB_AXES:
        found = _model_reason(subject, where, facts)
    elif subject.kind in ("all-reduce", "collective-permute") and is_bounded(facts.named(subject.dims), facts):
        found = Reason("vector", _with(FAMILIES["vector"], "parts of them, over both axes at once"))
    if not found and small:
        return Reason("bookkeeping", FAMILIES["bookkeeping"])
    return found or Reason("", _unexplained(subject, where, facts))


def _words(where: Place) -> str:
    return {"forward": "forward", "recomputed": "recomputed for the backward", "backward": "backward", "outside": ""}[
        where.phase
    ]


def _with(text: str, *details: str) -> str:
    shown = ", ".join(detail for detail in details if detail)
    return f"{text} ({shown})" if shown else text


def _batch_reason(subject: Subject, where: Place, facts: Facts) -> Reason | None:
    """Over the data groups: weights, their gradients, or nothing that a rule asks for."""
    if subject.kind == "collective-permute" and where.operation == "dot_general":
        family = "gradient" if where.phase == "backward" or where.scope == "loss" else "gather"
        return Reason(family, _with(FAMILIES[family], STEPS))
    weight = facts.named(subject.dims)
    if not weight and subject.kind == "all-gather" and (subject.from_parameter or where.phase == "outside"):
        weight = facts.side_by_side(subject.dims)  # TPUs, where a part's rows are no whole tiles
    if not weight and subject.kind == "all-gather" and facts.zero < 3 and where.phase == "outside":
        weight = facts.put_together(subject.dims)  # GPUs gather along the outermost dim, whichever is cut
    if not weight:
        return None
    gradient = subject.dtype == FLOATS[facts.gradient_bytes]
    if subject.kind == "all-gather" or (subject.from_parameter and not gradient):
        if facts.zero < 3 and where.phase == "outside" and not subject.from_parameter:
            # Muon takes the layers one by one; new parameters come from whole stacks.
            family = "optimizer" if "vmap(" in subject.op_name else "update"
            return Reason(family, FAMILIES[family])
        in_scan = weight.startswith("blocks") and where.phase != "outside"
        layer = f"layer scan, {_words(where)}" if in_scan else _groups(weight)
        return Reason("gather", _with(FAMILIES["gather"], layer))
    if subject.kind in ("all-reduce", "reduce-scatter"):
        if not gradient or (where.phase == "forward" and where.scope != "loss" and is_bounded(weight, facts)):
            # A small vector is gathered as a sum in which every device adds its own part.
            family = "gather" if facts.zero == 3 else "update"
            return Reason(family, FAMILIES[family])
        family = "vector" if is_bounded(weight, facts) else "gradient"
        return Reason(family, _with(FAMILIES[family], _groups(weight)))
    return None


def is_bounded(weight: str, facts: Facts) -> bool:
    """Whether these are weights whose gradients are held between bounds, or look like such."""
    paths = weight.split(" or ")
    return bool(weight) and all(w.bounded or w.path in facts.alike for w in facts.weights if w.path in paths)


def _groups(weight: str) -> str:
    groups = dict.fromkeys(
        "layers" if path.startswith("blocks") else path.split(".")[0] for path in weight.split(" or ")
    )
    return " and ".join(groups)


def _model_reason(subject: Subject, where: Place, facts: Facts) -> Reason | None:
    """Over tensor-parallel devices: activations, and gradients of weights that all of them hold."""
    summed = subject.kind in ("all-reduce", "reduce-scatter")
    if subject.axes == ("stage",) and subject.kind == "collective-permute":
        return Reason("send", _with(FAMILIES["send"], "backward" if where.phase == "backward" else ""))
    if subject.kind == "collective-permute" and where.operation == "dot_general" and where.scope != "loss":
        backward = where.phase == "backward"
        family = ("column" if backward else "row") if "->btd" in subject.op_name else "sequence"
        return Reason(family, _with(FAMILIES[family], STEPS))
    shared = where.scope in ("embedding", "loss")
    if subject.axes == ("stage",) and summed and not shared and facts.width in subject.dims:
        return Reason("stage", FAMILIES["stage"])
    part = facts.sequence_parallel and subject.elements * facts.mesh.model == facts.stream
    if subject.axes == ("stage",) and summed and part and where.scope == "embedding" and where.phase != "backward":
        return Reason("stage", _with(FAMILIES["stage"], "rows of the embedding, in parts"))
    if where.scope == "loss" and where.phase != "backward":
        if subject.elements * facts.loss_chunks == facts.batch * facts.loss_positions and summed:
            return Reason("loss", _with(FAMILIES["loss"], _loss_part(where)))
        rows = facts.batch * facts.loss_positions // facts.loss_chunks
        narrow = facts.vocab != facts.width or "vd->bcd" in subject.op_name
        if summed and narrow and subject.elements == rows * facts.width:
            return Reason("loss-input", FAMILIES["loss-input"])
        return None
    streams = subject.elements == facts.stream
    if streams and where.scope == "embedding":
        if where.phase == "backward":
            return Reason("sequence", _with(FAMILIES["sequence"], "gradient of the embedding"))
        return Reason("embedding", FAMILIES["embedding"])
    if streams and subject.kind == "all-gather" and facts.sequence_parallel:
        what = {"attention": "attention", "mlp": "MLP", "final_norm": "final norm"}.get(where.scope, "")
        side = "output's gradient" if where.phase == "backward" else "input"
        return Reason("sequence", _with(FAMILIES["sequence"], f"{what} {side}".strip(), _words(where)))
    if streams and summed:
        branch = {"attention": "attention", "mlp": "MLP"}.get(where.scope, "")
        family = "column" if where.phase == "backward" else "row"
        return Reason(family, _with(FAMILIES[family], branch, "recomputed" if where.phase == "recomputed" else ""))
    heads = (facts.batch * facts.length * facts.head_dim * n for n in (1, 2, facts.kv_heads, 2 * facts.kv_heads))
    if not facts.split_kv and subject.elements in heads and where.scope == "attention":
        return Reason("kv", FAMILIES["kv"])
    weight = facts.named(subject.dims)
    if weight and summed and is_bounded(weight, facts) and where.phase != "forward":
        return Reason("vector", _with(FAMILIES["vector"], "sequence parallel"))
    return None


def _loss_part(where: Place) -> str:
    return "maximum" if where.operation == "reduce_max" else "sum" if where.operation == "reduce_sum" else ""


def _unexplained(subject: Subject, where: Place, facts: Facts) -> str:
    """No rule asks for it: what it looks like."""
    axes = " and ".join(SHORT[axis] for axis in subject.axes)
    if where.scope == "loss" and (facts.vocab in subject.dims or _whole_vocab(facts) in subject.dims):
        return f"logits travel over {axes}: the loss is not vocabulary-parallel"
    if _whole_vocab(facts) in subject.dims and facts.width in subject.dims and subject.kind == "all-gather":
        what = "embedding" if where.scope == "embedding" else "loss"
        return f"the whole table of the vocabulary is gathered over {axes}: the {what} is not vocabulary-parallel"
    weight = facts.named(subject.dims)
    if weight:
        return f"{weight.split(' or ')[0]} (or its gradient) travels over {axes}, where no rule splits it"
    return f"an activation travels over {axes}: {_generic(subject, where)}"


def _whole_vocab(facts: Facts) -> int:
    return facts.vocab * facts.mesh.stage * facts.mesh.model


def _generic(subject: Subject, where: Place) -> str:
    """What the name stack says, for any function."""
    what = {
        "all-reduce": "sum over devices",
        "reduce-scatter": "sum over devices, each keeps a part",
        "all-gather": "parts gathered",
        "all-to-all": "parts exchanged",
        "collective-permute": "sent to a neighbour",
    }.get(subject.kind, subject.kind)
    operation = "" if where.operation in ("body", "while", "") else where.operation
    loops = "in a loop" if where.loops == 1 else f"in loops {where.loops} deep" if where.loops else ""
    inner = f"in {where.scope}" if where.scope else loops
    return _with(what, operation, inner, _words(where))


def weight_paths(dims: Sequence[int], facts: Facts | None) -> str:
    """Names of the weights of this shape, for the source column."""
    return facts.named(dims) if facts else ""
