"""The traffic that a training step must have: bytes a step over each axis for each purpose, from the resolved layout.

Weights are gone through one by one: where its specs differ, an array travels. Activations follow from which weights
are split. Sizes: p, g and a are the bytes of a parameter, gradient and activation; a stream is a B T D.

| a weight's specs                | travels                                | when                                    |
|---------------------------------|----------------------------------------|-----------------------------------------|
| parameters != base              | gather of p, over what is added        | before each use, forward and backward   |
| optimizer != parameters         | gather of p                            | once, after the update                  |
| gradients or optimizer != base  | reduce-scatter of g over data          | each time it is made, or once a step    |
|                                 | all-reduce of the parts over replica   | once a step                             |
| neither                         | all-reduce of g over replica and data  | as these two                            |
"""

from collections.abc import Iterable, Iterator

from jaxshard.analysis.expected import Expected, Passes, activations, passes
from jaxshard.analysis.facts import Facts, WeightFact
from jaxshard.parallel.axes import BATCH_AXES, ZERO_AXIS

_TABLE = "embedding.tokens"


def asked(facts: Facts) -> list[Expected]:
    """All that a step must and may send; gradients of `bounded` weights apart, see `expected.vector_bounds`."""
    runs = passes(facts)
    found = [row for weight in facts.weights for row in _of_weight(facts, runs, weight)]
    return [row for row in _added([*found, *activations(facts, runs)]) if row.axes and row.total]


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
