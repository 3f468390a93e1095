"""The update of parameters, masters and moments: on the device, or with masters and moments in host memory.

ZeRO-Offload (Ren et al. 2021, arXiv 2101.06840) keeps the authoritative fp32 parameters and the moments in host memory.
One of three functions with the same signature is chosen once, so that the train step has no branch for it:

| update   | moments, masters | arithmetic | crosses between host and device             | on the device at a time |
|----------|------------------|------------|----------------------------------------------|-------------------------|
| whole    | device           | device     | nothing                                      | everything              |
| streamed | host             | device     | moments and masters, both ways               | about two layers of it  |
| hosted   | host             | host       | gradients down, parameters in their type up  | nothing of it           |

Shapes: L layers, V rows of a vocabulary table, D its width. A streamed loop goes through the first dim of stacked
leaves [L, ...] and of tables [V, D]. Where that dim is split over devices, a turn takes as many from every part: one
layer of each stage, or some rows of each shard of the vocabulary.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxshard.names import OPTIMIZER, UPDATE, map_named
from jaxshard.parallel.layout import Layout
from jaxshard.parallel.offload import on_host, row_major, to_device, to_host

STACKED = "blocks"
"""Group of parameters whose leaves are stacked over layers."""


class Parts(NamedTuple):
    """What an update changes: parameters as stored, fp32 masters or None, state of the optimizer."""

    params: Any
    masters: Any
    moments: Any


class Change(NamedTuple):
    """Scalars of one update.

    Attributes:
        good: bool; False leaves every bit as it is.
        scale: loss scale that the gradients still carry.
        factor: of clipping; 1 where nothing is clipped.
        rate: learning rate.
    """

    good: jax.Array
    scale: jax.Array
    factor: jax.Array
    rate: jax.Array


Update = Callable[[Any, Parts, Change], Parts]
"""(gradients as `layout.optimizer` places them, old, scalars) -> new."""


def choose_update(
    mode: str | None,
    layout: Layout,
    tx: optax.GradientTransformation,
    part: Callable[[str], optax.GradientTransformation],
    moments: Any,
    low: Any,
    rowwise: bool,
) -> Update:
    """Picks the update of a run.

    Args:
        mode: None (nothing is offloaded), "stream" or "host".
        layout: where everything lies.
        tx: direction of the update, without learning rate and clipping.
        part: the same for one group of parameters, {group: ...}; its state is that part of tx's.
        moments: shardings of the state of tx.
        low: bools in the same shape: which arrays of it lie in host memory.
        rowwise: whether the rows of a vocabulary table are updated independently.
    """
    if mode == "stream":
        return partial(_streamed, layout, part, moments, low, rowwise)
    if mode == "host":
        return partial(_hosted, layout, tx, moments, low)
    return partial(_whole, layout, tx)


def advance(tx: optax.GradientTransformation, change: Change, grads: Any, old: Any, moments: Any) -> tuple[Any, Any]:
    """One update of parameters of any tree; returns (parameters, moments), both untouched unless change.good."""
    ready = lambda g: g / change.scale.astype(g.dtype) * change.factor.astype(g.dtype)
    with jax.named_scope(OPTIMIZER):
        directions, new = tx.update(jax.tree.map(ready, grads), moments, old)
    move = lambda p, d: (p.astype(d.dtype) - change.rate.astype(d.dtype) * d).astype(p.dtype)
    keep = lambda n, o: jnp.where(change.good, n, o)
    moved = map_named(OPTIMIZER, lambda p, d: keep(move(p, d), p), old, directions)
    return moved, jax.tree.map(keep, new, moments)


def _constrained(tree: Any, shardings: Any) -> Any:
    return jax.tree.map(jax.lax.with_sharding_constraint, tree, shardings)


def _stored(layout: Layout, updated: Any, shardings: Any) -> Any:
    """Parameters as the devices compute from them: in their type, gathered where their table says so."""
    place = lambda p, s: jax.lax.with_sharding_constraint(p.astype(layout.policy.parameters), s)
    return map_named(UPDATE, place, updated, shardings)


def _whole(layout: Layout, tx: optax.GradientTransformation, grads: Any, parts: Parts, change: Change) -> Parts:
    """Everything lies on the device and is updated there."""
    masters = layout.policy.masters
    old = parts.masters if masters else _constrained(parts.params, layout.optimizer)
    updated, moments = advance(tx, change, grads, old, parts.moments)
    # Pinned, so that the new parameters are gathered and not, beside them, the old ones that a bad update keeps.
    updated = _constrained(updated, layout.optimizer)
    return Parts(_stored(layout, updated, layout.parameters), updated if masters else None, moments)


def _hosted(layout: Layout, tx, places: Any, low: Any, grads: Any, parts: Parts, change: Change) -> Parts:
    """The host computes the update: gradients go down to it, parameters in the devices' type come back."""
    policy = layout.policy
    old = parts.masters if policy.masters else _constrained(parts.params, layout.optimizer)

    @on_host
    @jax.jit
    def run(grads, old, moments, change):
        updated, moments = advance(tx, change, grads, old, moments)
        return jax.tree.map(lambda p: p.astype(policy.parameters), updated), updated, moments

    grads = jax.tree.map(row_major, grads, layout.optimizer)
    params, updated, moments = run(*(to_host(tree) for tree in (grads, old, parts.moments, change)))
    there = to_device(params, layout.optimizer)
    params = map_named(UPDATE, jax.lax.with_sharding_constraint, there, layout.parameters)
    moments = jax.tree.map(lambda x, s, is_low: x if is_low else to_device(x, s), moments, places, low)
    return Parts(params, updated if policy.masters else None, moments)


class Places(NamedTuple):
    """Shardings of one group: stored parameters, masters and updates, moments; and which moments are low."""

    params: Any
    optimizer: Any
    moments: Any
    low: Any


class Cut(NamedTuple):
    """How a loop goes through arrays [N, ...] whose first dim has `shards` equal parts: `rows` of each in a turn."""

    shards: int
    rows: int
    turns: int

    @classmethod
    def of_blocks(cls, weights: Any, stages: int) -> "Cut":
        """One layer of every stage at a time."""
        return cls(stages, 1, jax.tree.leaves(weights)[0].shape[0] // stages)

    def split(self, x: jax.Array) -> jax.Array:
        """[N, ...] -> [shards, N / shards, ...] with several shards; else as it is."""
        return x if self.shards == 1 else x.reshape(self.shards, x.shape[0] // self.shards, *x.shape[1:])

    def take(self, x: jax.Array, turn: jax.Array) -> jax.Array:
        """What `split` gave -> [shards * rows, ...]."""
        if self.shards == 1:
            return jax.lax.dynamic_slice_in_dim(x, turn * self.rows, self.rows, 0)
        part = jax.lax.dynamic_slice_in_dim(x, turn * self.rows, self.rows, 1)
        return part.reshape(self.shards * self.rows, *x.shape[2:])

    def put(self, x: jax.Array, part: jax.Array, turn: jax.Array) -> jax.Array:
        """Writes what `take` gave back to where it was."""
        if self.shards == 1:
            return jax.lax.dynamic_update_slice_in_dim(x, part, turn * self.rows, 0)
        part = part.reshape(self.shards, self.rows, *part.shape[1:])
        return jax.lax.dynamic_update_slice_in_dim(x, part, turn * self.rows, 1)


LANES = 128
"""TPUs lay a table whose width is no multiple of it out by columns, and cannot write rows of that in place."""


def table_turns(rows: int, width: int, layer: int, platform: str) -> int:
    """Turns in which a table goes through a device, so that no turn has more elements than a layer.

    Args:
        rows, width: of the device's part of the table.
        layer: elements of a layer on the device.
        platform: "tpu", "gpu" or "cpu".

    Returns:
        A divisor of `rows`; 1 where the table is no larger than a layer, cannot be cut, or only into far smaller parts.
    """
    if platform == "tpu" and width % LANES:
        return 1
    least = -(-rows * width // layer)
    return next((turns for turns in range(least, min(8 * least, rows) + 1) if rows % turns == 0), 1)


def _streamed(
    layout: Layout, part: Callable, places: Any, low: Any, rowwise: bool, grads: Any, parts: Parts, change: Change
) -> Parts:
    """One group after another comes to the device, layer by layer or table rows by table rows, and goes back.

    Every group has an optimizer of its own, whose state is the part of the whole state with the same paths. Counts and
    constants belong to all of them: each group begins at the old count and ends at the same new one.
    """
    place, lows, moments = _by_path(places), _by_path(low), _by_path(_down(parts.moments, low))
    blocks = Cut.of_blocks(parts.params[STACKED], layout.shape.stage)
    local = [math.prod(shape) for shape in _local(parts.params[STACKED], layout.optimizer[STACKED])]
    params, masters, updated = {}, {}, dict(moments)
    for group in parts.params:
        pick = lambda tree, group=group: {group: tree[group]}
        tx = part(group)
        old = Parts(pick(parts.params), to_host(pick(parts.masters)) if parts.masters else None, None)
        bare = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), old.masters or old.params)
        form = jax.eval_shape(tx.init, bare)
        select = lambda table, form=form: jax.tree.unflatten(jax.tree.structure(form), map(table.get, _by_path(form)))
        where = Places(pick(layout.parameters), pick(layout.optimizer), select(place), select(lows))
        old = old._replace(moments=select(moments))
        if group == STACKED:
            visit = partial(_in_turns, blocks, None)
        elif rowwise:
            visit = _visit_of_table(bare, where.optimizer, sum(local) // blocks.turns)
        else:
            visit = _visit
        new = visit(layout, tx, where, pick(grads), old, change)
        params |= new.params
        masters |= new.masters or {}
        updated |= _by_path(new.moments)
    structure = jax.tree.structure(parts.moments)
    return Parts(params, masters or None, jax.tree.unflatten(structure, updated.values()))


def _local(weights: Any, shardings: Any) -> list[tuple[int, ...]]:
    """Shapes of one device's parts."""
    leaves = zip(jax.tree.leaves(weights), jax.tree.leaves(shardings), strict=True)
    return [sharding.shard_shape(leaf.shape) for leaf, sharding in leaves]


def _visit_of_table(weights: Any, shardings: Any, layer: int) -> Callable:
    """How to visit embedding or head: in turns of no more elements than a layer has on a device, where that divides."""
    table, local = max(zip(jax.tree.leaves(weights), _local(weights, shardings), strict=True), key=lambda x: x[0].size)
    platform = jax.tree.leaves(shardings)[0].mesh.devices.flat[0].platform
    turns = table_turns(local[0], math.prod(local[1:]), layer, platform)
    cut = Cut(table.shape[0] // local[0], local[0] // turns, turns)
    return _visit if turns == 1 else partial(_in_turns, cut, table.shape)


def _by_path(tree: Any) -> dict[Any, Any]:
    return dict(jax.tree_util.tree_leaves_with_path(tree))


def _down(tree: Any, low: Any) -> Any:
    """Moves to host memory what belongs there."""
    return jax.tree.map(lambda x, is_low: to_host(x) if is_low else x, tree, low)


def _visit(
    layout: Layout, tx, places: Places, grads: Any, old: Parts, change: Change, order: Callable = lambda x, _: x
) -> Parts:
    """Brings masters and moments to the device, updates, and sends them back; `order` pins the order of their dims.

    Only slices of a stack need it. TPUs keep a table with a narrow last dim, such as [32, 16], the other way round, and
    their compiler fails to turn it on its way from the host.
    """
    masters = layout.policy.masters
    ordered = lambda tree, places: jax.tree.map(order, tree, places)
    up = lambda tree, places: ordered(to_device(tree, places), places)
    source = up(old.masters, places.optimizer) if masters else _constrained(old.params, places.optimizer)
    updated, moments = advance(tx, change, grads, source, up(old.moments, places.moments))
    params = ordered(_stored(layout, updated, places.params), places.params)
    moments = _down(ordered(moments, places.moments), places.low)
    return Parts(params, to_host(ordered(updated, places.optimizer)) if masters else None, moments)


def _in_turns(
    cut: Cut, shape: tuple[int, ...] | None, layout: Layout, tx, places: Places, grads: Any, old: Parts, change: Change
) -> Parts:
    """Visits a group in a loop that writes back in place, so that one turn's moments are on the device at a time.

    What is cut: every weight or, given a `shape`, those that have it, with their masters and moments. The slices of a
    stack are independent weights to every optimizer, and the rows of a table to those that work entry by entry, so that
    a slice has the same update. The next one is not fetched ahead: reading it before the last one is written back would
    make XLA copy the whole array.
    """
    chosen = lambda tree: jax.tree.map(lambda x: shape in (None, x.shape), tree)
    moments = jax.tree.map(lambda x, is_low: is_low and shape in (None, x.shape), old.moments, places.low)
    is_cut = Parts(chosen(old.params), chosen(old.masters), moments)
    split = lambda tree, is_cut: jax.tree.map(lambda x, cuts: cut.split(x) if cuts else x, tree, is_cut)
    start, grads = split(old, is_cut), split(grads, is_cut.params)

    def turn(i, now: Parts) -> Parts:
        # What is not cut, such as a count, is that from before the loop in every turn, so it advances once.
        one = jax.tree.map(lambda x, first, cuts: cut.take(x, i) if cuts else first, now, start, is_cut)
        ready = jax.tree.map(lambda x, cuts: cut.take(x, i) if cuts else x, grads, is_cut.params)
        new = _visit(layout, tx, places, ready, one, change, row_major)
        return jax.tree.map(lambda x, n, cuts: cut.put(x, n, i) if cuts else n, now, new, is_cut)

    done = jax.lax.fori_loop(0, cut.turns, turn, start)
    return jax.tree.map(lambda x, like: x.reshape(like.shape), done, old)
