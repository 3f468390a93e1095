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
the scattered parts are all-reduced over it, once a step on every stage. Tensor parallelism: 2 all-reduces of S a layer
forward and 2 backward (Megatron, Shoeybi et al. 2019), each a reduce-scatter and an all-gather with sequence
parallelism (Korthikanti et al. 2022).

In a pipeline S is one microbatch, and the schedule's table says how often everything runs. All stages compute in every
tick, idle ones in vain, so that ticks count and not microbatches: F forward halves, each a pass of the stage's chunk, B
backward halves, each a pass forward again and one backward; ticks that embed, that take a loss, or that bring the
embedding's gradient. Over `stage` go F + B permutes of S, and sums that tell all devices one stage's value: the last
output for the loss, the first input gradient for the embedding, both of whose vocabulary lies over `stage` and `model`.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from jaxshard.analysis.facts import Facts, WeightFact
from jaxshard.analysis.reasons import FAMILIES
from jaxshard.parallel.schedule import Phase, Schedule


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
    once: int | None = None
    """Bytes of all calls, where a compiler moves it out of its loops (a sum commutes, a parameter stays the same)."""
    optional: bool = False
    """A compiler may avoid it."""
    again: bool = False
    """The forward pass had it already, and a compiler may have kept it."""
    instead: tuple["Expected", ...] = ()
    """What a compiler may do in place of it, call by call (see `chosen`)."""

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
        return 0 if self.optional else self.total if self.once is None else self.once


@dataclass(frozen=True)
class Passes:
    """What one device runs in one accumulation part: layers, one after another, and embeddings and losses."""

    forward: int
    """Layers run forward."""
    again: int
    """Layers run forward once more before their backward: a pipeline saves only what enters a stage."""
    backward: int
    """Layers run backward."""
    embed: int
    loss: int
    embed_gradient: int
    idle: int
    """Of the layers run forward, those whose chunk nobody reads, in phases of one tick: a compiler leaves them out."""
    single: bool
    """One layer, or chunks of one, are no loops: what is gathered twice in a tick may be gathered once, and the output
    of a chunk that runs again is left out where no loss reads it."""

    @property
    def forwards(self) -> int:
        return self.forward + self.again

    def backward_of(self, weight: WeightFact) -> int:
        """Times that a gradient of one layer of this weight is made."""
        return {"blocks": self.backward, "embedding": self.embed_gradient, "head": self.loss}[weight.group]


def passes(facts: Facts) -> Passes:
    """From the model; in a pipeline from the schedule."""
    if facts.schedule is None:
        return Passes(facts.layers, 0, facts.layers, 1, 1, 1, idle=0, single=facts.layers == 1)
    phases, each = facts.schedule.phases, facts.layers // facts.schedule.chunks
    ticks = lambda runs: sum(phase.stop - phase.start for phase in phases if runs(phase))
    backward = each * ticks(lambda phase: phase.backward)
    return Passes(
        forward=each * ticks(lambda phase: phase.forward),
        again=backward,
        backward=backward,
        embed=ticks(lambda phase: phase.embed != "never"),
        loss=ticks(lambda phase: phase.loss != "never"),
        embed_gradient=ticks(lambda phase: phase.embed_gradient != "never"),
        idle=each * len([phase for phase in phases if phase.forward and _in_vain(facts.schedule, phase, "forward")]),
        single=each == 1,
    )


def expected(facts: Facts) -> list[Expected]:
    """The expected traffic of one training step; rows of one family and axes add up."""
    runs = passes(facts)
    found = [*_gradients(facts, runs), *_updates(facts), *_gathers(facts, runs), *activations(facts, runs)]
    return [row for row in found if row.axes and row.total]


def activations(facts: Facts, runs: Passes) -> list[Expected]:
    """The part of it that is no weight and no gradient of one."""
    found: list[Expected] = []
    if facts.used("stage", "model"):
        found += _vocabulary(facts, runs)
    if facts.used("model"):
        found += _layers(facts, runs)
    if facts.schedule is not None:
        found += _stages(facts, facts.schedule, runs)
    return found


def chosen(wanted: list[Expected], summed: Callable[[str, tuple[str, ...]], int]) -> list[Expected]:
    """The expected traffic in the forms that a compiler chose: with as many calls of each as there are in all.

    Args:
        wanted: as `expected` says it; a row with `instead` has two forms.
        summed: bytes that were found to be summed, of a family over axes. The first row of `instead` tells a call.
    """
    result = []
    for row in wanted:
        told = row.instead[0] if row.instead else row
        calls = min(row.count, summed(told.family, told.axes) // told.bytes) if row.instead else 0
        result += [replace(row, count=row.count - calls), *(replace(other, count=calls) for other in row.instead)]
    return [row for row in result if row.total]


def open_families(facts: Facts) -> dict[str, str]:
    """Families whose traffic has no closed form here, and why; it is listed and never called unexpected."""
    if facts.optimizer == "muon":
        return {"optimizer": "Muon's iterations multiply matrices that are split; how is left to the compiler"}
    if facts.optimizer == "adafactor":
        return {"optimizer": "Adafactor's row and column statistics are sums over split dims"}
    return {}


def _sum(weights: list[WeightFact]) -> int:
    return sum(weight.total for weight in weights)


def _made(facts: Facts, runs: Passes, weights: list[WeightFact], axis: str) -> tuple[int, int]:
    """Gradients that are reduced over an axis: (elements in one part, or in the step where it is deferred; times)."""
    if axis in facts.apart:
        return _sum(weights), 1
    return sum(w.elements * runs.backward_of(w) for w in weights), facts.accumulation


def _gradients(facts: Facts, runs: Passes) -> Iterator[Expected]:
    """Those of `vector_bounds` apart: where their sums go first is the compiler's choice. What looks like one of them
    is counted with them."""
    closed = [weight for weight in facts.weights if not weight.bounded]
    yield from _reductions(facts, runs, "gradient", [w for w in closed if w.path not in facts.alike])
    yield from _reductions(facts, runs, "vector", [w for w in closed if w.path in facts.alike])


def _reductions(facts: Facts, runs: Passes, family: str, weights: list[WeightFact]) -> Iterator[Expected]:
    """Gradients of these weights over replica and data."""
    g, both = facts.gradient_bytes, facts.used("replica", "data")
    if not both:
        return
    made = lambda weights, axis: _made(facts, runs, weights, axis)
    spread, whole = ([w for w in weights if w.spread is is_spread] for is_spread in (True, False))
    # Those that stay whole: at once over the axes that are reduced at the same time.
    inner = tuple(axis for axis in both if axis not in facts.apart)
    for axes in (inner, facts.apart):
        elements, calls = made(whole, axes[-1]) if axes else (0, 0)
        yield Expected(family, "all-reduce", axes, g * elements, calls, "gradients", once=g * _sum(whole))
    elements, calls = made(spread, "data")
    yield Expected(family, "reduce-scatter", facts.used("data"), g * elements, calls, "gradients")
    table = [w for w in weights if w.path == "embedding.tokens" and facts.tied and not facts.deferred]
    kind, axes = ("reduce-scatter", facts.used("data")) if table and table[0].spread else ("all-reduce", inner)
    again = g * runs.loss * _sum(table)
    yield Expected(family, kind, axes, again, facts.accumulation, "the tied table's gradient once more, as head")
    if facts.used("replica"):
        elements, calls = made(spread, "replica")
        twice = [w for w in table if w.spread and "replica" not in facts.apart]
        parts = (g * elements + again * bool(twice)) // facts.mesh.data
        once = g * _sum([*spread, *twice]) // facts.mesh.data
        text = "gradient shards across replicas"
        yield Expected(family, "all-reduce", facts.used("replica"), parts, calls, text, once=once)


def _updates(facts: Facts) -> Iterator[Expected]:
    """ZeRO-1 and 2: parameters whose state is split but which are stored whole."""
    p, data = facts.parameter_bytes, facts.used("data")
    moved = [w for w in facts.weights if w.spread and not w.stored_spread]
    matrices, vectors = ([w for w in moved if w.vector is vector] for vector in (False, True))
    yield Expected("update", "all-gather", data, p * _sum(matrices), 1, "parameters")
    yield Expected("update", "all-gather", data, p * _sum(vectors), 1, "norms and biases", optional=True)


def _gathers(facts: Facts, runs: Passes) -> Iterator[Expected]:
    """ZeRO-3: each weight before each use, in every accumulation part; or all once a step, in a pipeline that can."""
    p, data, parts = facts.parameter_bytes, facts.used("data"), facts.accumulation
    stored = [w for w in facts.weights if w.stored_spread]
    if facts.gathered_once:
        matrices, vectors = ([w for w in stored if w.vector is vector] for vector in (False, True))
        yield Expected("gather", "all-gather", data, p * _sum(matrices), 1, "all, once")
        yield Expected("gather", "all-gather", data, p * _sum(vectors), 1, "norms and biases, once", optional=True)
        return
    blocks = [w for w in stored if w.group == "blocks"]
    matrices, vectors = ([w for w in blocks if w.vector is vector] for vector in (False, True))
    each = lambda weights: p * sum(w.elements for w in weights)
    forward, backward, idle = runs.forwards * parts, runs.backward * parts, runs.idle * parts
    yield Expected(
        "gather", "all-gather", data, each(matrices), forward - idle, "layers, forward", optional=runs.single
    )
    yield Expected("gather", "all-gather", data, each(matrices), idle, "layers, in vain", optional=True)
    yield Expected("gather", "all-gather", data, each(matrices), backward, "layers, backward", again=True)
    yield Expected("gather", "all-gather", data, each(vectors), forward, "norms and biases, forward", optional=True)
    # Norm scales and biases are needed again only where what they make is computed again.
    scales = [w for w in vectors if w.role == "norm" and facts.saved != "none"]
    yield Expected("gather", "all-gather", data, each(scales), backward, "norms, backward", optional=True)
    biases = [w for w in vectors if w.role == "bias"]
    if facts.saved != "none":
        yield Expected("gather", "all-gather", data, each(biases), backward, "biases, backward", optional=True)
    group = lambda name: [w for w in stored if w.group == name]
    for name, calls in (("embedding", runs.embed * parts), ("head", runs.loss * parts)):
        yield Expected("gather", "all-gather", data, each(group(name)), calls, name, once=each(group(name)))
    if facts.tied:
        table = [w for w in stored if w.path == "embedding.tokens"]
        text = "embedding again, as head"
        yield Expected("gather", "all-gather", data, each(table), runs.loss * parts, text, optional=True)


def _vocabulary(facts: Facts, runs: Passes) -> Iterator[Expected]:
    """Embedding and loss, whose vocabulary is split over stage and model."""
    axes, parts, sp = facts.used("stage", "model"), facts.accumulation, facts.sequence_parallel
    stream, calls, text = facts.stream * facts.activation_bytes, runs.embed * parts, "rows of the embedding"
    kind = "reduce-scatter" if sp and axes == ("model",) else "all-reduce"
    instead: tuple[Expected, ...] = ()
    if sp and axes == ("stage", "model"):
        # Summed over both, split over model alone: no one collective does that. Whole at once, or in two, of which the
        # second sums the parts that the first leaves.
        scatter = Expected("embedding", "reduce-scatter", ("model",), stream, calls, f"{text}, first over model")
        part = stream // facts.mesh.model
        instead = (scatter, Expected("stage", "all-reduce", ("stage",), part, calls, f"{text}, then over stages"))
    yield Expected("embedding", kind, axes, stream, calls, text, instead=instead)
    chunk = facts.batch * facts.loss_positions // facts.loss_chunks
    calls = facts.loss_chunks * runs.loss * parts
    text = "maximum, sum and target's logit of each position"
    yield Expected("loss", "all-reduce", axes, 3 * chunk * facts.gradient_bytes, calls, text)
    slope = chunk * facts.width * facts.activation_bytes
    yield Expected("loss-input", "all-reduce", axes, slope, calls, "gradient of the last activations")


def _layers(facts: Facts, runs: Passes) -> Iterator[Expected]:
    """Attention and MLP, whose heads and hidden width are split over model."""
    axes, sp, parts = facts.used("model"), facts.sequence_parallel, facts.accumulation
    stream = facts.stream * facts.activation_bytes
    forward, backward = runs.forwards * parts, runs.backward * parts
    kind = "reduce-scatter" if sp else "all-reduce"
    unread = (2 if facts.saved == "full" else 1) * (runs.backward - runs.loss) if runs.single else 0
    vain = (2 * runs.idle + unread) * parts
    yield Expected("row", kind, axes, stream, 2 * forward - vain, "attention and MLP, forward")
    yield Expected("row", kind, axes, stream, vain, "outputs of a chunk, in vain", optional=True)
    if not facts.keeps("attention_out", "residual"):
        # No loop parts a single layer's forward from its recomputation: TPUs do both at once.
        yield Expected("row", kind, axes, stream, backward, "attention, recomputed", optional=runs.single)
    if sp and not facts.split_kv:
        # Keys' and values' input gradients are whole, only the queries' is in parts: their sum is not scattered.
        yield Expected("column", "all-reduce", axes, stream, backward, "attention, backward")
        yield Expected("column", kind, axes, stream, backward, "MLP, backward")
    else:
        yield Expected("column", kind, axes, stream, 2 * backward, "attention and MLP, backward")
    if sp:
        text, vain = "inputs of attention and MLP, forward", (2 * runs.idle + _unread_inputs(facts, runs)) * parts
        yield Expected("sequence", "all-gather", axes, stream, 2 * forward - vain, text)
        yield Expected("sequence", "all-gather", axes, stream, vain, f"{text}, in vain", optional=True)
        if not facts.keeps("norm"):
            text = "the same, recomputed"
            yield Expected("sequence", "all-gather", axes, stream, 2 * backward, text, optional=runs.single)
        yield Expected("sequence", "all-gather", axes, stream, 2 * backward, "gradients of their outputs, backward")
        yield Expected("sequence", "all-gather", axes, stream, runs.loss * parts, "input of the head")
        yield Expected("sequence", "all-gather", axes, stream, runs.embed_gradient * parts, "gradient of the embedding")
    yield from _shared_heads(facts, backward)


def _unread_inputs(facts: Facts, runs: Passes) -> int:
    """Inputs of attention and MLP that a chunk of one layer, run again where no loss reads its output, does without."""
    if not runs.single or facts.keeps("norm", "mlp_gate", "mlp_up", "mlp_hidden", "mlp_out"):
        return 0
    return (2 if facts.saved == "full" else 1) * (runs.backward - runs.loss)


def _stages(facts: Facts, schedule: Schedule, runs: Passes) -> Iterator[Expected]:
    """What stages send on, and values of one stage that all devices need for embedding and loss."""
    axes, parts = facts.used("stage"), facts.accumulation
    split = facts.mesh.model if facts.sequence_parallel else 1
    stream = facts.stream * facts.activation_bytes // split
    for name, way in (("forward", "to the next stage"), ("backward", "to the stage before")):
        phases = [phase for phase in schedule.phases if getattr(phase, name)]
        vain = [phase for phase in phases if _in_vain(schedule, phase, name)]
        ticks = sum(phase.stop - phase.start for phase in phases)
        yield Expected("send", "collective-permute", axes, stream, (ticks - len(vain)) * parts, way)
        text = f"{way}, in vain"
        yield Expected("send", "collective-permute", axes, stream, len(vain) * parts, text, optional=True)
    yield Expected("stage", "all-reduce", axes, stream, runs.loss * parts, "last stage's output, for the loss")
    text = "first stage's input gradient, for the embedding"
    yield Expected("stage", "all-reduce", axes, stream, runs.embed_gradient * parts, text)


def _in_vain(schedule: Schedule, phase: Phase, name: str) -> bool:
    """Whether nobody receives what a phase of one tick sends: being no loop, a compiler leaves it out."""
    column = schedule.fwd_put if name == "forward" else schedule.bwd_put
    return phase.stop - phase.start == 1 and bool((column[phase.start] < 0).all())


def _shared_heads(facts: Facts, calls: int) -> Iterator[Expected]:
    """kv heads that every device of the model axis holds: the gradients of keys and values are brought together."""
    if facts.split_kv:
        return
    axes, a = facts.used("model"), facts.activation_bytes
    head = facts.batch * facts.length * facts.head_dim * a
    heads, ways = facts.kv_heads, facts.mesh.model
    if ways % heads == 0:
        yield Expected("kv", "all-reduce", axes, 2 * head, calls, "each head's gradient, among those that use it")
        if heads > 1:
            yield Expected("kv", "all-gather", axes, 2 * head * heads, calls, "gradients of all heads")
    else:
        yield Expected("kv", "all-reduce", axes, 2 * head * heads, calls, "gradients of all heads")


def vector_bounds(facts: Facts) -> tuple[int, int]:
    """Fewest and most bytes of the gradients of norms, biases and whole tables, over all axes together.

    The compiler reduces them over the axes at once or one after the other, in the loop or after it; and devices of
    other axes, which all hold them, may each sum a part and send it to where it belongs.
    """
    g, runs, parts = facts.gradient_bytes, passes(facts), facts.accumulation
    batch = facts.used("replica", "data")
    vectors = [w for w in facts.weights if w.bounded]
    norms = [w for w in vectors if w.role == "norm" and facts.sequence_parallel]
    tables = [w for w in vectors if w.whole and facts.sequence_parallel]
    every = lambda weights: sum(w.elements * runs.backward_of(w) for w in weights)
    # Over the batch axes once where sums are kept apart; over model, with sequence parallelism, in every part.
    each = sum(math.prod(_made(facts, runs, vectors, axis)) for axis in batch)
    # Short vectors may be gathered after an update by a sum, which looks like their gradient's.
    updates = g * _sum([w for w in vectors if w.spread])
    most = g * each + g * every(norms + tables) * parts + updates
    return g * max(_sum(vectors) * bool(batch), _sum(norms)), most
