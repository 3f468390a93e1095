"""The traffic that a training step must have, in closed form: from the model, the rules and the configuration.

Nothing here looks at a compiled program. Psi is the number of parameters on one device in use (split over `model` and
`stage`, whole over `data`); g, p and a are the bytes of a gradient, parameter and activation; S = a B T D is one
residual stream. Bytes are those of the full logical result of a call on one device, as in the ledger.

| --zero | over data                                                     | bytes           |
|--------|---------------------------------------------------------------|-----------------|
| 0      | all-reduce of gradients                                       | g Psi           |
| 1, 2   | reduce-scatter of gradients, all-gather of updated parameters | g Psi + p Psi   |
| 3      | all-gather forward and again backward, reduce-scatter         | 2 p Psi + g Psi |

An all-reduce sends twice what the other two send, so that stages 0 to 2 send alike and stage 3 half as much again
(ZeRO, Rajbhandari et al. 2020, section 7). ZeRO-2 and 3 reduce in every accumulation part, 0 and 1 once. With `replica`
the scattered parts are all-reduced over it. Tensor parallelism: 2 all-reduces of S a layer forward and 2 backward
(Megatron, Shoeybi et al. 2019), each a reduce-scatter and an all-gather with sequence parallelism (Korthikanti et al.
2022).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from jaxshard.insight.facts import Facts, WeightFact
from jaxshard.insight.reasons import FAMILIES


@dataclass(frozen=True)
class Expected:
    """One line of the expected traffic."""

    family: str
    """Key of `reasons.FAMILIES`."""
    kind: str
    axes: tuple[str, ...]
    bytes: int
    """Of one call."""
    count: int
    text: str
    hoistable: bool = False
    """A compiler may move it out of the accumulation loop, since sums commute: then once instead of in every part."""
    optional: bool = False
    """A compiler may avoid it."""

    @property
    def total(self) -> int:
        return self.bytes * self.count

    @property
    def reason(self) -> str:
        """In words."""
        return f"{FAMILIES[self.family]}: {self.text}"

    @property
    def least(self) -> int:
        """Fewest bytes that are right."""
        return 0 if self.optional else self.bytes if self.hoistable else self.total


def expected(facts: Facts) -> list[Expected]:
    """The expected traffic of one training step without a pipeline; rows of one family and axes add up."""
    found = [*_gradients(facts), *_updates(facts), *_gathers(facts)]
    if facts.used("stage", "model"):
        found += _vocabulary(facts)
    if facts.used("model"):
        found += _layers(facts)
    return [row for row in found if row.axes and row.total]


def not_derived(facts: Facts) -> str:
    """Why a step cannot be compared, or "". The place for a pipeline's own rows is `expected`."""
    if facts.mesh.stage > 1:
        return (
            "the expected traffic of pipelines is not derived: found traffic is listed with its reasons, not compared"
        )
    return ""


def open_families(facts: Facts) -> dict[str, str]:
    """Families whose traffic has no closed form here, and why; it is listed and never called unexpected."""
    if facts.optimizer == "muon":
        return {"optimizer": "Muon's iterations multiply matrices that are split; how is left to the compiler"}
    if facts.optimizer == "adafactor":
        return {"optimizer": "Adafactor's row and column statistics are sums over split dims"}
    return {}


def _sum(weights: list[WeightFact]) -> int:
    return sum(weight.total for weight in weights)


def _gradients(facts: Facts) -> Iterator[Expected]:
    """Matrices and vectors apart: where the sums of vectors go first is the compiler's choice."""
    g, both = facts.gradient_bytes, facts.used("replica", "data")
    if not both:
        return
    calls = 1 if facts.deferred else facts.accumulation
    spread = [w for w in facts.weights if w.spread and not w.vector]
    whole = [w for w in facts.weights if not w.spread and not w.vector]
    yield Expected("gradient", "all-reduce", both, g * _sum(whole), calls, "gradients", hoistable=calls > 1)
    yield Expected("gradient", "reduce-scatter", facts.used("data"), g * _sum(spread), calls, "gradients")
    table = [w for w in facts.weights if w.path == "embedding.tokens" and facts.tied and not facts.deferred]
    kind, axes = ("reduce-scatter", facts.used("data")) if table and table[0].spread else ("all-reduce", both)
    yield Expected("gradient", kind, axes, g * _sum(table), calls, "the tied table's gradient once more, as head")
    if facts.used("replica"):
        parts = g * _sum([*spread, *(w for w in table if w.spread)]) // facts.mesh.data
        text = "gradient shards across replicas"
        yield Expected("gradient", "all-reduce", facts.used("replica"), parts, calls, text, hoistable=calls > 1)


def _updates(facts: Facts) -> Iterator[Expected]:
    """ZeRO-1 and 2: parameters whose state is split but which are stored whole."""
    p, data = facts.parameter_bytes, facts.used("data")
    moved = [w for w in facts.weights if w.spread and not w.stored_spread]
    matrices, vectors = ([w for w in moved if w.vector is vector] for vector in (False, True))
    yield Expected("update", "all-gather", data, p * _sum(matrices), 1, "parameters")
    yield Expected("update", "all-gather", data, p * _sum(vectors), 1, "norms and biases", optional=True)


def _gathers(facts: Facts) -> Iterator[Expected]:
    """ZeRO-3: each weight before each use, in every accumulation part."""
    p, data, parts = facts.parameter_bytes, facts.used("data"), facts.accumulation
    stored = [w for w in facts.weights if w.stored_spread]
    blocks = [w for w in stored if w.group == "blocks"]
    matrices, vectors = ([w for w in blocks if w.vector is vector] for vector in (False, True))
    each = lambda weights: p * sum(w.elements for w in weights)
    calls = facts.layers * parts
    yield Expected("gather", "all-gather", data, each(matrices), calls, "layers, forward")
    yield Expected("gather", "all-gather", data, each(matrices), calls, "layers, backward")
    yield Expected("gather", "all-gather", data, each(vectors), calls, "norms and biases, forward", optional=True)
    # Norm scales and biases are needed again only where what they make is computed again.
    scales = [w for w in vectors if w.role == "norm" and facts.saved != "none"]
    yield Expected("gather", "all-gather", data, each(scales), calls, "norms, backward", optional=True)
    biases = [w for w in vectors if w.role == "bias"]
    if facts.saved != "none":
        yield Expected("gather", "all-gather", data, each(biases), calls, "biases, backward", optional=True)
    outside = [w for w in stored if w.group != "blocks"]
    yield Expected("gather", "all-gather", data, each(outside), parts, "embedding and head")
    if facts.tied:
        table = [w for w in outside if w.path == "embedding.tokens"]
        yield Expected("gather", "all-gather", data, each(table), parts, "embedding again, as head", optional=True)


def _vocabulary(facts: Facts) -> Iterator[Expected]:
    """Embedding and loss, whose vocabulary is split over stage and model."""
    axes, parts, sp = facts.used("stage", "model"), facts.accumulation, facts.sequence_parallel
    stream = facts.stream * facts.activation_bytes
    kind = "reduce-scatter" if sp else "all-reduce"
    yield Expected("embedding", kind, axes, stream, parts, "rows of the embedding")
    chunk = facts.batch * facts.loss_positions // facts.loss_chunks
    calls = facts.loss_chunks * parts
    text = "maximum, sum and target's logit of each position"
    yield Expected("loss", "all-reduce", axes, 3 * chunk * facts.gradient_bytes, calls, text)
    slope = chunk * facts.width * facts.activation_bytes
    yield Expected("loss-input", "all-reduce", axes, slope, calls, "gradient of the last activations")


def _layers(facts: Facts) -> Iterator[Expected]:
    """Attention and MLP, whose heads and hidden width are split over model."""
    axes, sp = facts.used("model"), facts.sequence_parallel
    stream = facts.stream * facts.activation_bytes
    calls = facts.layers * facts.accumulation
    kind = "reduce-scatter" if sp else "all-reduce"
    yield Expected("row", kind, axes, stream, 2 * calls, "attention and MLP, forward")
    if not facts.keeps("attention_out", "residual"):
        yield Expected("row", kind, axes, stream, calls, "attention, recomputed")
    yield Expected("column", kind, axes, stream, 2 * calls, "attention and MLP, backward")
    if sp:
        yield Expected("sequence", "all-gather", axes, stream, 2 * calls, "inputs of attention and MLP, forward")
        if not facts.keeps("norm"):
            yield Expected("sequence", "all-gather", axes, stream, 2 * calls, "the same, recomputed")
        yield Expected("sequence", "all-gather", axes, stream, 2 * calls, "gradients of their outputs, backward")
        yield Expected("sequence", "all-gather", axes, stream, facts.accumulation, "input of the head")
        yield Expected("sequence", "all-gather", axes, stream, facts.accumulation, "gradient of the embedding")
    yield from _shared_heads(facts, calls)


def _shared_heads(facts: Facts, calls: int) -> Iterator[Expected]:
    """kv heads that every device of the model axis holds: the gradients of keys and values are brought together."""
    if facts.split_kv:
        return
    axes, a = facts.used("model"), facts.activation_bytes
    head = facts.batch * facts.length * facts.head_dim * a
    heads, ways = facts.kv_heads, facts.mesh.model
    if ways % heads == 0:
        yield Expected("kv", "all-reduce", axes, 2 * head, calls, "each head's gradient, among those that use it")
        yield Expected("kv", "all-gather", axes, 2 * head * heads, calls, "gradients of all heads")
    else:
        yield Expected("kv", "all-reduce", axes, 2 * head * heads, calls, "gradients of all heads", optional=True)


def vector_bounds(facts: Facts) -> tuple[int, int]:
    """Fewest and most bytes of the gradients of norms and biases, over all axes together.

    They are small; the compiler reduces them over the axes at once or one after the other, in the loop or after it.
    """
    batch = facts.used("replica", "data")
    vectors = facts.gradient_bytes * _sum([w for w in facts.weights if w.vector])
    norms = facts.gradient_bytes * _sum([w for w in facts.weights if w.role == "norm"]) * facts.sequence_parallel
    # Over the batch axes once where sums are deferred; over model, with sequence parallelism, in every part.
    calls = 1 if facts.deferred else facts.accumulation
    # Short vectors may be gathered after an update by a sum, which looks like their gradient's.
    updates = facts.gradient_bytes * _sum([w for w in facts.weights if w.vector and w.spread])
    return max(vectors * bool(batch), norms), vectors * calls * len(batch) + norms * facts.accumulation + updates
