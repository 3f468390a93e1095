"""Runs any pipeline schedule as one GSPMD program: a table decides, nothing here knows a schedule by name.

Legend: S stages, M microbatches, V chunks of layers per stage, G data groups, b sequences of one microbatch (of one
data group), T sequence length, D model width. `schedule` describes the two halves of a tick.

The stages are a leading dim of every value, sharded over the mesh axis `stage` and vmapped over; rolling along it is
the send. Where each data group keeps a gradient of its own there is a second dim, of the groups; without groups the
dim G below is absent. Embedding and loss stand outside of the stages: all devices compute them together, once a tick.

Gradients are taken with respect to *slots*: zeros in the gradient's type that stand beside the weights and are never
read, so that 16-bit weights have gradients of 32 bits.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxshard.names import REDUCE, SEND, STAGE_VALUE, map_named
from jaxshard.parallel.axes import STAGE
from jaxshard.parallel.schedule import Phase, Schedule

STAGE_AXIS = STAGE


@dataclass(frozen=True)
class Pipeline:
    """What is run, and how it lies on the devices. The model enters as three functions of one data group.

    Attributes:
        schedule: the table.
        embed: (shared weights, their slots, microbatch) -> x [b, T, D].
        stage: (weights of one stage, slots of one chunk, number of the chunk, microbatch, x) -> y like x.
        loss: (shared weights, their slots, microbatch, y) -> (objective, sums). The objective is differentiated; sums
            are any tree of scalars, added up over microbatches.
        group_axes: mesh axes over which data groups keep gradients apart; () where there are no groups.
        shard: (array, names of leading dims) -> the array, constrained. Names are "stages", None (slots), "groups";
            what follows them is [b, T, D].
        place_stages, place_shared: constrain gradients of the stages' and of the shared weights, as in `Sums`.
        stacked: group of parameters that the stages' weights are; the shared ones bear their groups' names.
    """

    schedule: Schedule
    embed: Callable[[Any, Any, Any], jax.Array]
    stage: Callable[[Any, Any, jax.Array, Any, jax.Array], jax.Array]
    loss: Callable[[Any, Any, Any, jax.Array], tuple[jax.Array, Any]]
    group_axes: tuple[str, ...]
    shard: Callable[[jax.Array, tuple[str | None, ...]], jax.Array]
    place_stages: Callable[[Any], Any] = lambda tree: tree
    place_shared: Callable[[Any], Any] = lambda tree: tree
    stacked: str = "blocks"

    @property
    def grouped(self) -> tuple[str, ...]:
        """Names of the dims between stages (or slots) and [b, T, D]."""
        return ("groups",) if self.group_axes else ()

    def each_group(self, f: Callable, in_axes: Any = 0) -> Callable:
        return jax.vmap(f, in_axes, spmd_axis_name=self.group_axes) if self.group_axes else f

    def each_stage(self, f: Callable, in_axes: Any = 0) -> Callable:
        return jax.vmap(f, in_axes, spmd_axis_name=STAGE_AXIS)

    def over_stages(self, x: jax.Array) -> jax.Array:
        """Constrains [S, G, b, T, D]."""
        return self.shard(x, ("stages", *self.grouped))


class Weights(NamedTuple):
    """Trees of arrays: of the stages, with a leading dim S; and shared ones, for embedding and loss."""

    stages: Any
    shared: Any


class Buffers(NamedTuple):
    """Values that wait at their stages, [S, slots, G, b, T, D]: inputs saved for the backward, and what was sent."""

    saved: jax.Array
    forward: jax.Array
    backward: jax.Array


class Sums(NamedTuple):
    """What a step adds up: gradients of the stages [S, G, V, ...] and of the shared weights [G, ...]; sums [G]."""

    stages: Any
    shared: Any
    sums: Any


def _take(buffer: jax.Array, slot_S: jax.Array) -> jax.Array:
    """Reads one slot at every stage: [S, slots, ...] -> [S, ...]."""
    return jax.vmap(lambda b, i: jax.lax.dynamic_index_in_dim(b, i, 0, keepdims=False))(buffer, slot_S)


def _put(buffer: jax.Array, slot_S: jax.Array, x: jax.Array) -> jax.Array:
    """Writes one slot at every stage; a slot beyond the buffer writes nothing."""
    return jax.vmap(lambda b, i, x: b.at[i].set(x, mode="drop"))(buffer, slot_S, x)


@jax.named_scope(SEND)
def _send(x: jax.Array, places: int) -> jax.Array:
    """Moves every stage's value so many stages on, around the ring."""
    return jnp.roll(x, places, axis=0)


def _wide(flag_S: jax.Array, like: jax.Array) -> jax.Array:
    return flag_S.reshape(-1, *[1] * (like.ndim - 1))


@jax.named_scope(STAGE_VALUE)
def _only(stage: int, x: jax.Array) -> jax.Array:
    """One stage's value, known to all: a sum in which the others are zero, which is exact.

    Indexing the sharded dim would gather the values of all stages.
    """
    # `jnp.sum` may widen what travels.
    mine = jnp.where(_wide(jnp.arange(x.shape[0]) == stage, x), x, 0)
    return jax.lax.reduce(mine, jnp.zeros((), x.dtype), jax.lax.add, (0,))


How = Literal["never", "branch", "always"]


def _how(live: np.ndarray, always: float) -> How:
    """Whether ticks do something, from the flags of a phase.

    Where at least the share `always` of them do, all do it, some in vain: a branch makes GPUs wait for the host.
    """
    return "never" if not live.any() else "always" if live.mean() >= always else "branch"


def _do(how: How, live: jax.Array, some: Callable, none: Callable, *args: Any) -> Any:
    """Calls `some` or, in ticks that do not, `none`."""
    return some(*args) if how == "always" else none(*args) if how == "never" else jax.lax.cond(live, some, none, *args)


@dataclass(frozen=True)
class _Run:
    """One pipeline over one set of weights and microbatches (tree of [M, G, b, ...])."""

    pipeline: Pipeline
    weights: Weights
    slots: Weights
    microbatches: Any

    def of_stages(self, microbatch_S: jax.Array) -> Any:
        """Every stage's own microbatch: tree of [S, G, b, ...]."""
        names = ("stages", *self.pipeline.grouped)
        return jax.tree.map(lambda a: self.pipeline.shard(a[microbatch_S], names), self.microbatches)

    def of_tick(self, microbatch: jax.Array) -> Any:
        """The microbatch that is embedded, or whose loss is taken: tree of [G, b, ...]."""
        return jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, microbatch, 0, keepdims=False), self.microbatches)

    def stages(self, slots: Any, chunk_S: jax.Array, microbatch_S: jax.Array, x: jax.Array) -> jax.Array:
        """Applies one chunk at every stage: [S, G, b, T, D] -> the same."""
        p = self.pipeline
        weights, microbatch = self.weights.stages, self.of_stages(microbatch_S)
        if p.group_axes:
            # Weights with a dim of groups keep the gradient of every group apart; on a device it is one group, so
            # nothing is copied.
            spread = lambda a: jnp.broadcast_to(a[:, None], (a.shape[0], x.shape[1], *a.shape[1:]))
            weights = jax.tree.map(spread, weights)
        each = p.each_stage(p.each_group(p.stage, (0, 0, None, 0, 0)))
        return p.over_stages(each(weights, slots, chunk_S, microbatch, x))

    def embed(self, microbatch: jax.Array) -> jax.Array:
        """Embeds a microbatch: [G, b, T, D]."""
        p, slots = self.pipeline, self.slots.shared
        return p.each_group(lambda mb: p.embed(self.weights.shared, slots, mb))(self.of_tick(microbatch))

    def empty(self, slots: int) -> jax.Array:
        """A buffer [S, slots, G, b, T, D]."""
        x = jax.eval_shape(self.embed, jax.ShapeDtypeStruct((), jnp.int32))
        zeros = jnp.zeros((self.pipeline.schedule.stages, slots, *x.shape), x.dtype)
        return self.keep(zeros)

    def keep(self, buffer: jax.Array) -> jax.Array:
        return self.pipeline.shard(buffer, ("stages", None, *self.pipeline.grouped))


def gradients(pipeline: Pipeline, weights: Weights, start: Sums, microbatches: Any) -> Sums:
    """Adds the gradients and sums of all microbatches to `start`.

    Args:
        pipeline: what is run.
        weights: as stored.
        start: gradients [S, G, V, ...] of every stage's weights (the third dim counts chunks; what follows is up to
            `Pipeline.stage`), gradients [G, ...] of the shared weights, and sums [G].
        microbatches: tree of [M, G, b, ...].
    """
    like = lambda g: jnp.zeros(g.shape, g.dtype)
    chunk = lambda g: like(g[:, :, 0] if pipeline.group_axes else g[:, 0])
    shared = lambda g: like(g[0] if pipeline.group_axes else g)
    slots = Weights(jax.tree.map(chunk, start.stages), jax.tree.map(shared, start.shared))
    run = _Run(pipeline, weights, slots, microbatches)
    schedule = pipeline.schedule
    buffers = Buffers(run.empty(schedule.saved_slots), run.empty(schedule.fwd_slots), run.empty(schedule.bwd_slots))
    carry = (buffers, start)
    for phase in schedule.phases:
        rows = schedule.rows(phase)
        how: dict[str, How] = {name: _how(rows[f"{name}_live"], share) for name, share in ALWAYS.items()}
        carry, _ = jax.lax.scan(partial(_tick, run, phase, how), carry, rows)
    return carry[1]


ALWAYS = {"embed": 0.5, "loss": 1.0, "embed_gradient": 0.5}
"""Share of a phase's ticks from which on all of them do it. A loss in vain would cost as much as some layers."""


def _tick(run: _Run, phase: Phase, how: Mapping[str, How], carry: tuple[Buffers, Sums], row: Mapping[str, Any]):
    buffers, sums = carry
    if phase.forward:
        buffers, _ = _forward_half(run, how["embed"], buffers, row)
    if phase.backward:
        buffers, sums = _backward_half(run, how, buffers, sums, row)
    return (buffers, sums), None


def _forward_half(run: _Run, embed: How, buffers: Buffers, row: Mapping[str, Any]) -> tuple[Buffers, jax.Array]:
    """Returns the buffers, and what the stages computed [S, G, b, T, D]."""
    x = _take(buffers.forward, row["fwd_take"])
    first = lambda: run.embed(row["embed_microbatch"])
    embedded = _do(embed, row["embed_live"], first, lambda: jnp.zeros(x.shape[1:], x.dtype))
    x = jnp.where(_wide(row["fwd_embed"], x), embedded, x)
    x = run.pipeline.over_stages(x)
    saved = run.keep(_put(buffers.saved, row["fwd_save"], x))
    y = run.stages(run.slots.stages, row["fwd_chunk"], row["fwd_microbatch"], x)
    sent = run.pipeline.over_stages(_send(y, 1))
    return Buffers(saved, run.keep(_put(buffers.forward, row["fwd_put"], sent)), buffers.backward), y


def _backward_half(
    run: _Run, how: Mapping[str, How], buffers: Buffers, sums: Sums, row: Mapping[str, Any]
) -> tuple[Buffers, Sums]:
    pipeline = run.pipeline
    x = pipeline.over_stages(_take(buffers.saved, row["bwd_load"]))
    again = lambda slots, x: run.stages(slots, row["bwd_chunk"], row["bwd_microbatch"], x)
    y, pull = jax.vjp(again, run.slots.stages, x)
    dy = jnp.where(_wide(row["bwd_live"], x), _take(buffers.backward, row["bwd_take"]), 0)
    last = lambda shared, total: _loss(run, row["loss_microbatch"], y, shared, total)
    none = lambda shared, total: (pipeline.place_shared(shared), total, jnp.zeros(y.shape[1:], y.dtype))
    shared, total, dlast = _do(how["loss"], row["loss_live"], last, none, sums.shared, sums.sums)
    dy = jnp.where(_wide(row["bwd_loss"], x), dlast, dy)
    dslots, dx = pull(pipeline.over_stages(dy))
    add = pipeline.each_stage(pipeline.each_group(_add_chunk, (0, 0, None)))
    more = lambda g, d: add(g, d, row["bwd_chunk"])
    stages = map_named(REDUCE, more, sums.stages, dslots, under=pipeline.stacked)
    live = row["embed_gradient_live"]
    first = lambda shared: _embed_gradient(run, row["embed_gradient_microbatch"], jnp.where(live, dx, 0), shared)
    shared = _do(how["embed_gradient"], live, first, pipeline.place_shared, shared)
    sent = pipeline.over_stages(_send(dx, -1))
    buffers = buffers._replace(backward=run.keep(_put(buffers.backward, row["bwd_put"], sent)))
    return buffers, Sums(pipeline.place_stages(stages), shared, total)


def _add_chunk(sums: jax.Array, gradient: jax.Array, chunk: jax.Array) -> jax.Array:
    """Adds the gradient of one chunk [...] to the sums [V, ...]."""
    return sums + gradient[None] if sums.shape[0] == 1 else sums.at[chunk].add(gradient)


def _loss(run: _Run, microbatch: jax.Array, y: jax.Array, shared: Any, total: Any) -> tuple[Any, Any, jax.Array]:
    """Adds the loss of the last stage's output and its gradient; returns also the output's gradient [G, b, T, D].

    What a branch returns has no layout of its own: unconstrained, the sums would be gathered at its end.
    """
    p = run.pipeline
    slope = jax.grad(p.loss, argnums=(1, 3), has_aux=True)
    each = p.each_group(lambda mb, y: slope(run.weights.shared, run.slots.shared, mb, y))
    (dshared, dy), more = each(run.of_tick(microbatch), p.shard(_only(y.shape[0] - 1, y), p.grouped))
    total = jax.tree.map(jnp.add, total, more)
    return p.place_shared(map_named(REDUCE, jnp.add, shared, dshared)), total, p.shard(dy, p.grouped)


def _embed_gradient(run: _Run, microbatch: jax.Array, dx: jax.Array, shared: Any) -> Any:
    """Adds the embedding's gradient from the first stage's input gradient."""
    p = run.pipeline

    def slope(mb, dx):
        _, pull = jax.vjp(lambda slots: p.embed(run.weights.shared, slots, mb), run.slots.shared)
        return pull(dx)[0]

    more = p.each_group(slope)(run.of_tick(microbatch), p.shard(_only(0, dx), p.grouped))
    return p.place_shared(map_named(REDUCE, jnp.add, shared, more))


def evaluate(pipeline: Pipeline, weights: Weights, start: Any, microbatches: Any) -> Any:
    """Adds the sums of the losses of all microbatches to `start`, by the forward halves alone.

    Args:
        pipeline: what is run; slots are handed to its functions as None.
        weights: as stored.
        start: sums [G].
        microbatches: tree of [M, G, b, ...].
    """
    run = _Run(pipeline, weights, Weights(None, None), microbatches)
    schedule = pipeline.schedule
    rows = _forward_rows(schedule)
    # Nothing is saved: there is no backward.
    rows["fwd_save"] = np.full_like(rows["fwd_save"], 1)
    embed = _how(rows["embed_live"], ALWAYS["embed"])

    def tick(carry, row):
        buffers, sums = carry
        buffers, y = _forward_half(run, embed, buffers, row)
        p = pipeline
        last = p.shard(_only(schedule.stages - 1, y), p.grouped)
        each = p.each_group(lambda mb, y: p.loss(weights.shared, None, mb, y)[1])
        more = lambda sums: jax.tree.map(jnp.add, sums, each(run.of_tick(row["last_microbatch"]), last))
        return (buffers, _do("branch", row["last_live"], more, lambda sums: sums, sums)), None

    empty = run.empty(1)
    return jax.lax.scan(tick, (Buffers(empty, run.empty(schedule.fwd_slots), empty), start), rows)[0][1]


def _forward_rows(schedule: Schedule) -> dict[str, np.ndarray]:
    """The forward halves of all phases, and which microbatch leaves the last virtual stage in each."""
    parts = [schedule.rows(phase) for phase in schedule.phases if phase.forward]
    rows = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    live = rows["fwd_live"][:, -1] & (rows["fwd_chunk"][:, -1] == schedule.chunks - 1)
    return rows | {"last_microbatch": rows["fwd_microbatch"][:, -1], "last_live": live}
