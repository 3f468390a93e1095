"""What each of the largest temporaries is, and what would shrink it."""

import math
from dataclasses import dataclass

from jaxshard import names
from jaxshard.analysis.facts import Facts
from jaxshard.analysis.purposes import Name, Reader, read
from jaxshard.analysis.reasons import Place, place
from jaxshard.parallel.axes import ZERO_AXIS
from jaxshard.xla.buffers import BufferReport, Temporary
from jaxshard.xla.hlo import Module


@dataclass(frozen=True)
class LargeBuffer:
    """One temporary that is alive when memory is fullest."""

    shape: str
    bytes: int
    what: str
    advice: str
    source: str


def large_buffers(report: BufferReport | None, facts: Facts | None, module: Module | None = None) -> list[LargeBuffer]:
    """The largest temporaries with advice, largest first.

    Args:
        report: what the compiler says of them.
        facts: of a train step; None for other functions, of which no advice is known.
        module: the compiled program, where names are looked for that a temporary does not bear itself.
    """
    paths = frozenset(weight.path for weight in facts.weights) if facts else frozenset()
    reader = Reader(module, paths) if module and facts else None
    found = []
    for buffer in report.temporaries if report else ():
        name = (reader.of_value(buffer.name) if reader else None) or read(buffer.op_name, paths)
        what, advice = _advice(buffer, name, facts) if facts else (_where(buffer), "")
        source = "/".join(buffer.source.split("/")[-2:])
        found.append(LargeBuffer(buffer.shape, buffer.bytes, what, advice, source))
    return found


def _where(buffer: Temporary) -> str:
    where = place(buffer.op_name)
    words = [
        where.operation,
        f"in {where.scope}" if where.scope else "",
        where.phase if where.phase != "outside" else "",
    ]
    return " ".join(word for word in words if word)


def _advice(buffer: Temporary, name: Name, facts: Facts) -> tuple[str, str]:
    """What a temporary of a train step is, and what would shrink it; `name` says what it is made from."""
    text = buffer.shape.split(", ")[0].rstrip("]").partition("[")[2]
    dims = tuple(int(dim) for dim in text.split(",") if dim)
    if name.path and (known := _of_weight(name, dims, facts)):
        return known
    where = place(buffer.op_name)
    activation = facts.batch in dims and facts.length in dims
    if where.scope == "loss" and (facts.vocab in dims or activation):
        return "logits of one chunk of positions", "--parallel.loss_chunk smaller, or tp higher"
    pairs = _is_of_pairs(dims, where, facts)
    if activation and dims[:1] == (facts.layers,) and len(dims) > 3:
        what = "attention weights" if pairs else "activations"
        other = [f", or {option}" for option in _kernels(facts) if pairs]
        return f"{what} of all layers, kept for the backward pass", "".join([_activations(facts), *other])
    if pairs:
        return "attention weights of every pair of positions", ", or ".join([*_kernels(facts), "shorter sequences"])
    more = _less_at_a_time(facts)
    if activation:
        smaller = ", or a smaller batch" if facts.batch > 1 else ""
        return f"one activation ({_where(buffer)})", more + smaller
    return _where(buffer), more + ("" if facts.saved == "full" else ", or --parallel.remat full")


def _of_weight(name: Name, dims: tuple[int, ...], facts: Facts) -> tuple[str, str] | None:
    """Of a weight, its gradient or its update; None where the name is that of what uses the weight."""
    marks, ways, higher = set(name.marks), facts.sizes[ZERO_AXIS], "dp or tp higher"
    (weight,) = (each for each in facts.weights if each.path == name.path)
    share = weight.spread and math.prod(dims) * ways in (weight.elements, weight.total)
    if marks & {names.WEIGHT_GRAD, names.REDUCE}:
        advice = "--zero 2 splits gradients over dp" if facts.zero < 2 and ways > 1 and not share else higher
        return f"gradient of {name.path}" + (", this device's share" if share else ""), advice
    if names.GATHER in marks or name.operation == name.path:
        advice = "--zero 3 splits parameters over dp" if facts.zero < 3 and ways > 1 else "tp higher splits it"
        return f"{name.path}, ready for use", advice
    if marks & {names.UPDATE, names.OPTIMIZER}:
        return f"update of {name.path}", "--zero 1 splits it over dp" if facts.zero < 1 and ways > 1 else higher
    return None


def _less_at_a_time(facts: Facts) -> str:
    """Fewer sequences on a device at a time, where it has several."""
    if facts.batch == 1:
        return "shorter sequences, or tp higher"
    return f"more --parallel.{'microbatches' if facts.schedule else 'accumulation'}"


SOFTMAX = ("exp", "reduce_max", "reduce_sum", "sub", "div", "mul", "select_n")
"""Operations on attention's weights."""


def _is_of_pairs(dims: tuple[int, ...], where: Place, facts: Facts) -> bool:
    """Whether an array has a number for every pair of positions, and not positions by a feature of the same size.

    Where a width equals the length, the other dims tell; where they fit both, the name stack.
    """
    if dims.count(facts.length) < 2:
        return False
    rest = [dim for dim in dims[dims[0] == facts.layers and len(dims) > 3 :] if dim > 1]
    if facts.batch in rest and facts.batch > 1:
        rest.remove(facts.batch)
    heads = [(n, facts.head_dim) for n in (facts.heads, max(1, facts.kv_heads // facts.mesh.model), facts.kv_heads)]
    features = [(facts.width,), (facts.hidden,), *heads, *((n * width,) for n, width in heads)]
    fits = any(sorted(rest) == sorted(n for n in (facts.length, *each) if n > 1) for each in features)
    return not fits or (where.scope == "attention" and where.operation in SOFTMAX)


def _kernels(facts: Facts) -> list[str]:
    """What to ask for so that no array of every pair of positions is made; nothing where it is asked for already."""
    if facts.attention != "xla" or facts.platform not in ("gpu", "cuda"):
        return []
    return ["--model.attention cudnn" + ("" if facts.activation_bytes == 2 else " with --train.precision bf16")]


def _activations(facts: Facts) -> str:
    if facts.saved == "full":
        split = "" if facts.sequence_parallel or facts.mesh.model == 1 else "--parallel.sequence_parallel true, or "
        return split + _less_at_a_time(facts)
    return "--parallel.remat full" if facts.saved != "none" else "--parallel.remat dots or full"
