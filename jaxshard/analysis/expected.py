"""The traffic that a training step must have, in closed form: bytes over each axis for each purpose, from the layout.

Nothing here looks at a compiled program. Weights are gone through one by one: where a weight's specs differ, an array
travels. p, g and a are the bytes of a parameter, gradient and activation; S = a B T D is one residual stream. Bytes are
those of the full logical result of a call on one device, as in the ledger.

| a weight's specs                | travels                                | when                                    |
|---------------------------------|----------------------------------------|-----------------------------------------|
| parameters != base              | gather of p, over what is added        | before each use, forward and backward   |
| optimizer != parameters         | gather of p                            | once, after the update                  |
| gradients or optimizer != base  | reduce-scatter of g over data          | each time it is made, or once a step    |
|                                 | all-reduce of the parts over replica   | once a step                             |
| neither                         | all-reduce of g over replica and data  | as these two                            |

An all-reduce sends twice what the other two send, so that stages 0 to 2 of ZeRO send alike and stage 3 half as much
again (ZeRO, Rajbhandari et al. 2020, section 7). Stages 2 and 3 reduce in every accumulation part, 0 and 1 once; over
`replica` every stage once a step. Tensor parallelism: 2 all-reduces of S a layer forward and 2 backward (Megatron,
Shoeybi et al. 2019), each a reduce-scatter and an all-gather with sequence parallelism (Korthikanti et al. 2022).

In a pipeline S is one microbatch, and the schedule's table says how often everything runs. All stages compute in every
tick, idle ones in vain, so that ticks count and not microbatches: F forward halves, each a pass of the stage's chunk, B
backward halves, each a pass forward again and one backward; ticks that embed, that take a loss, or that bring the
embedding's gradient. Over `stage` go F + B permutes of S, and sums that tell all devices one stage's value: the last
output for the loss, the first input gradient for the embedding, both of whose vocabulary lies over `stage` and `model`.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from jaxshard.analysis.facts import Facts, WeightFact
from jaxshard.analysis.reasons import FAMILIES
from jaxshard.parallel.axes import BATCH_AXES, MODEL, STAGE, VOCAB_AXES, ZERO_AXIS
from jaxshard.parallel.schedule import Phase, Schedule

_TABLE = "embedding.tokens"


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
    """All that a training step must and may send; gradients of `bounded` weights apart, see `vector_bounds`."""
    runs = passes(facts)
    found = [row for weight in facts.weights for row in _of_weight(facts, runs, weight)]
    return [row for row in _added([*found, *_activations(facts, runs)]) if row.axes and row.total]


def _activations(facts: Facts, runs: Passes) -> list[Expected]:
    """The part of it that is no weight and no gradient of one."""
    found: list[Expected] = []
    if facts.used(*VOCAB_AXES):
        found += _vocabulary(facts, runs)
    if facts.used(MODEL):
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


def _added(rows: Iterable[Expected]) -> list[Expected]:
    """Rows that differ in bytes alone, as one."""
    sums: dict[tuple, list[int]] = {}
    for row in rows:
        key = (row.family, row.kind, row.axes, row.count, row.text, row.optional, row.again, row.instead)
        total = sums.setdefault(key, [0, 0])
        total[0], total[1] = total[0] + row.bytes, total[1] + (row.total if row.once is None else row.once)
    return [
        Expected(family, kind, axes, size, count, text, None if once == size * count else once, *rest)
        for (family, kind, axes, count, text, *rest), (size, once) in sums.items()
    ]


def _of_weight(facts: Facts, runs: Passes, weight: WeightFact) -> Iterator[Expected]:
    data, what = facts.used(ZERO_AXIS), "norms and biases" if weight.vector else "parameters"
    size = facts.parameter_bytes * weight.total
    if weight.stored_spread and facts.gathered_once:
        yield Expected("gather", "all-gather", data, size, 1, f"{what}, once", optional=weight.vector)
    elif weight.stored_spread:
        yield from _gathers(facts, runs, weight)
    elif weight.spread:
        yield Expected("update", "all-gather", data, size, 1, what, optional=weight.vector)
    if not weight.bounded:
        yield from _reductions(facts, runs, weight)


def _gathers(facts: Facts, runs: Passes, weight: WeightFact) -> Iterator[Expected]:
    """ZeRO-3: before each use, in every accumulation part."""
    data, parts, size = facts.used(ZERO_AXIS), facts.accumulation, facts.parameter_bytes * weight.elements
    row = lambda text, count, optional=False, once=None, again=False: Expected(
        "gather", "all-gather", data, size, count * parts, text, once, optional, again
    )
    if weight.group != "blocks":
        calls = runs.embed if weight.group == "embedding" else runs.loss
        yield row(weight.group, calls, once=size)  # it stays the same within a step
        if facts.tied and weight.path == _TABLE:
            yield row("embedding again, as head", runs.loss, optional=True)
        return
    if weight.vector:
        yield row("norms and biases, forward", runs.forwards, optional=True)
        if facts.saved != "none":  # needed again only where what they make is computed again
            yield row("norms and biases, backward", runs.backward, optional=True)
        return
    yield row("layers, forward", runs.forwards - runs.idle, optional=runs.single)
    yield row("layers, in vain", runs.idle, optional=True)
    yield row("layers, backward", runs.backward, again=True)


def _reductions(facts: Facts, runs: Passes, weight: WeightFact) -> Iterator[Expected]:
    """Its gradient over the batch axes: as often as it is made, or once a step over those whose sums are kept apart.

    One that stays whole is summed at once over the axes that are reduced at the same time.
    """
    again = runs.loss if weight.path == _TABLE and facts.tied else 0  # the tied table's, once more as head
    whole = facts.gradient_bytes * weight.total

    def row(kind: str, axes: tuple[str, ...], text: str, ways: int = 1, may_move: bool = True) -> Iterator[Expected]:
        if not axes:
            return
        made, calls = whole, 1
        if axes[-1] not in facts.apart:
            made = facts.gradient_bytes * weight.elements * (runs.backward_of(weight) + again)
            calls = facts.accumulation
        yield Expected("gradient", kind, axes, made // ways, calls, text, once=whole // ways if may_move else None)

    if weight.spread:
        yield from row("reduce-scatter", facts.used(ZERO_AXIS), "gradients", may_move=False)
        others = tuple(axis for axis in BATCH_AXES if axis != ZERO_AXIS)
        yield from row("all-reduce", facts.used(*others), "gradient shards across replicas", facts.sizes[ZERO_AXIS])
        return
    inner = tuple(axis for axis in facts.used(*BATCH_AXES) if axis not in facts.apart)
    yield from row("all-reduce", inner, "gradients")
    yield from row("all-reduce", facts.apart, "gradients")


def _vocabulary(facts: Facts, runs: Passes) -> Iterator[Expected]:
    """Embedding and loss, whose vocabulary is split over stage and model."""
    axes, parts, sp = facts.used(*VOCAB_AXES), facts.accumulation, facts.sequence_parallel
    stream, calls, text = facts.stream * facts.activation_bytes, runs.embed * parts, "rows of the embedding"
    kind = "reduce-scatter" if sp and axes == (MODEL,) else "all-reduce"
    instead: tuple[Expected, ...] = ()
    if sp and axes == (STAGE, MODEL):
        # Summed over both, split over model alone: no one collective does that. Whole at once, or in two, of which the
        # second sums the parts that the first leaves.
        scatter = Expected("embedding", "reduce-scatter", (MODEL,), stream, calls, f"{text}, first over model")
        part = stream // facts.mesh.model
        instead = (scatter, Expected("stage", "all-reduce", (STAGE,), part, calls, f"{text}, then over stages"))
    yield Expected("embedding", kind, axes, stream, calls, text, instead=instead)
    chunk = facts.batch * facts.loss_positions // facts.loss_chunks
    calls = facts.loss_chunks * runs.loss * parts
    text = "maximum, sum and target's logit of each position"
    yield Expected("loss", "all-reduce", axes, 3 * chunk * facts.gradient_bytes, calls, text)
    slope = chunk * facts.width * facts.activation_bytes
    yield Expected("loss-input", "all-reduce", axes, slope, calls, "gradient of the last activations")


def _layers(facts: Facts, runs: Passes) -> Iterator[Expected]:
    """Attention and MLP, whose heads and hidden width are split over model."""
    axes, sp, parts = facts.used(MODEL), facts.sequence_parallel, facts.accumulation
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
    axes, parts = facts.used(STAGE), facts.accumulation
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
    axes, a = facts.used(MODEL), facts.activation_bytes
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
    vectors = [w for w in facts.weights if w.bounded]
    norms = [w for w in vectors if w.role == "norm" and facts.sequence_parallel]
    tables = [w for w in vectors if w.whole and facts.sequence_parallel]
    all_of = lambda weights: sum(w.total for w in weights)
    every = lambda weights: sum(w.elements * runs.backward_of(w) for w in weights) * parts
    batch = facts.used(*BATCH_AXES)
    # Over the batch axes once where sums are kept apart; over model, with sequence parallelism, in every part.
    each = sum(all_of(vectors) if axis in facts.apart else every(vectors) for axis in batch)
    # Short vectors may be gathered after an update by a sum, which looks like their gradient's.
    updates = all_of(w for w in vectors if w.spread)
    most = g * (each + every(norms + tables) + updates)
    return g * max(all_of(vectors) * bool(batch), all_of(norms)), most
