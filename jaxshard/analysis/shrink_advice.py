"""What each of the largest temporaries is, and what would shrink it."""

from dataclasses import dataclass

from jaxshard.analysis.facts import FLOATS, Facts
from jaxshard.analysis.reasons import place
from jaxshard.xla.buffers import BufferReport, Temporary


@dataclass(frozen=True)
class LargeBuffer:
    """One temporary that is alive when memory is fullest."""

    shape: str
    bytes: int
    what: str
    advice: str
    source: str


def large_buffers(report: BufferReport | None, facts: Facts | None) -> list[LargeBuffer]:
    """The largest temporaries with advice, largest first; `facts` of a train step, None for other functions."""
    found = []
    for buffer in report.temporaries if report else ():
        what, advice = _advice(buffer, facts) if facts else (_where(buffer), "")
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


def _advice(buffer: Temporary, facts: Facts) -> tuple[str, str]:
    dtype, _, text = buffer.shape.split(", ")[0].rstrip("]").partition("[")
    dims = tuple(int(dim) for dim in text.split(",") if dim)
    where, weight = place(buffer.op_name), facts.named(dims)
    short = weight.split(" or ")[0]
    activation = facts.batch in dims and facts.length in dims
    more = f"more --train.{'microbatches' if facts.schedule else 'accumulation'}"
    if where.scope == "loss" and not weight and (facts.vocab in dims or activation):
        return "logits of one chunk of positions", "--parallel.loss_chunk smaller, or tp higher"
    pairs = dims.count(facts.length) >= 2
    if activation and dims[:1] == (facts.layers,) and len(dims) > 3:
        what = "attention weights" if pairs else "activations"
        other = ", or --model.attention cudnn on GPUs" if pairs else ""
        return f"{what} of all layers, kept for the backward pass", _activations(facts) + other
    if pairs:
        return "attention weights of every pair of positions", "--model.attention cudnn on GPUs, or shorter sequences"
    if activation:
        return f"one activation ({_where(buffer)})", f"{more}, or a smaller batch"
    made = where.phase in ("backward", "outside") or where.scope == "loss"
    if weight and dtype == FLOATS[facts.gradient_bytes] and made:
        advice = "--zero 2 splits gradients over dp" if facts.zero < 2 else "dp or tp higher"
        return f"gradient of {short}", advice
    if weight:
        advice = "tp higher splits it" if facts.zero == 3 else "--zero 3 splits parameters over dp"
        return f"{short}, ready for use", advice
    if shard := facts.shard(dims):
        return f"{shard} or its gradient, this device's share", "dp or tp higher"
    return _where(buffer), f"{more}, or --parallel.remat full"


def _activations(facts: Facts) -> str:
    if facts.saved == "full":
        split = "" if facts.sequence_parallel or facts.mesh.model == 1 else "--parallel.sequence_parallel true, or "
        return f"{split}more --parallel.accumulation"
    return "--parallel.remat full" if facts.saved != "none" else "--parallel.remat dots or full"
