"""The update of parameters, masters and moments: on the device, or with masters and moments in host memory.

ZeRO-Offload (Ren et al. 2021, arXiv 2101.06840) keeps the authoritative fp32 parameters and the moments in host memory.
One of three functions with the same signature is chosen once, so that the train step has no branch for it:

| update   | moments, masters | arithmetic | crosses between host and device             | on the device at a time |
|----------|------------------|------------|----------------------------------------------|-------------------------|
| whole    | device           | device     | nothing                                      | everything              |
| streamed | host             | device     | moments and masters, both ways               | about two layers of it  |
| hosted   | host             | host       | gradients down, parameters in their type up  | nothing of it           |

Shapes: L layers, S stages. A stacked leaf is [L, ...]; where a pipeline splits L over S stages, one turn of the
streamed loop takes one layer of every stage, [S, ...].
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

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
) -> Update:
    """Picks the update of a run.

    Args:
        mode: None (nothing is offloaded), "stream" or "host".
        layout: where everything lies.
        tx: direction of the update, without learning rate and clipping.
        part: the same for one group of parameters, {group: ...}; its state is that part of tx's.
        moments: shardings of the state of tx.
        low: bools in the same shape: which arrays of it lie in host memory.
    """
    if mode == "stream":
        return partial(_streamed, layout, part, moments, low)
    if mode == "host":
        return partial(_hosted, layout, tx, moments, low)
    return partial(_whole, layout, tx)


def advance(tx: optax.GradientTransformation, change: Change, grads: Any, old: Any, moments: Any) -> tuple[Any, Any]:
    """One update of parameters of any tree; returns (parameters, moments), both untouched unless change.good."""
    ready = lambda g: g / change.scale.astype(g.dtype) * change.factor.astype(g.dtype)
    directions, new = tx.update(jax.tree.map(ready, grads), moments, old)
    move = lambda p, d: (p.astype(d.dtype) - change.rate.astype(d.dtype) * d).astype(p.dtype)
    keep = lambda n, o: jnp.where(change.good, n, o)
    return jax.tree.map(lambda p, d: keep(move(p, d), p), old, directions), jax.tree.map(keep, new, moments)


def _constrained(tree: Any, shardings: Any) -> Any:
    return jax.tree.map(jax.lax.with_sharding_constraint, tree, shardings)


def _stored(layout: Layout, updated: Any, shardings: Any) -> Any:
    """Parameters as the devices compute from them: in their type, gathered where their table says so."""
    return _constrained(jax.tree.map(lambda p: p.astype(layout.policy.parameters), updated), shardings)


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
    params = _constrained(to_device(params, layout.optimizer), layout.parameters)
    moments = jax.tree.map(lambda x, s, is_low: x if is_low else to_device(x, s), moments, places, low)
    return Parts(params, updated if policy.masters else None, moments)


class Places(NamedTuple):
    """Shardings of one group: stored parameters, masters and updates, moments; and which moments are low."""

    params: Any
    optimizer: Any
    moments: Any
    low: Any


def _streamed(layout: Layout, part: Callable, places: Any, low: Any, grads: Any, parts: Parts, change: Change) -> Parts:
    """One group after another, and stacked layers one after another, come to the device, are updated and go back.

    Every group has an optimizer of its own, whose state is the part of the whole state with the same paths. Counts and
    constants belong to all of them: each group begins at the old count and ends at the same new one.
    """
    place, lows, moments = _by_path(places), _by_path(low), _by_path(_down(parts.moments, low))
    params, masters, updated = {}, {}, dict(moments)
    for group in parts.params:
        pick = lambda tree, group=group: {group: tree[group]}
        tx = part(group)
        old = Parts(pick(parts.params), to_host(pick(parts.masters)) if parts.masters else None, None)
        bare = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), old.masters or old.params)
        form = jax.eval_shape(tx.init, bare)
        select = lambda table, form=form: jax.tree.unflatten(jax.tree.structure(form), map(table.get, _by_path(form)))
        where = Places(pick(layout.parameters), pick(layout.optimizer), select(place), select(lows))
        visit = _layer_by_layer if group == STACKED else _visit
        new = visit(layout, tx, where, pick(grads), old._replace(moments=select(moments)), change)
        params |= new.params
        masters |= new.masters or {}
        updated |= _by_path(new.moments)
    structure = jax.tree.structure(parts.moments)
    return Parts(params, masters or None, jax.tree.unflatten(structure, updated.values()))


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


def _layer_by_layer(layout: Layout, tx, places: Places, grads: Any, old: Parts, change: Change) -> Parts:
    """Visits a stack in a loop that writes back in place, so that two layers' moments are on the device at most.

    For every optimizer the layers are a dim of independent weights, so a slice of it has the same update. The next
    layer is not fetched ahead: reading it before the last one is written back would make XLA copy the whole stack.
    """
    stages = layout.shape.stage
    every = lambda tree: jax.tree.map(lambda _: True, tree)
    stacked = Parts(every(old.params), every(old.masters), places.low)
    start = jax.tree.map(lambda x, is_stack: _split(stages, x) if is_stack else x, old, stacked)
    grads = jax.tree.map(partial(_split, stages), grads)

    def turn(i, now: Parts) -> Parts:
        take = lambda x: _take(stages, x, i)
        # Counts are those from before the loop in every turn, so they advance once.
        one = jax.tree.map(lambda x, first, is_stack: take(x) if is_stack else first, now, start, stacked)
        new = _visit(layout, tx, places, jax.tree.map(take, grads), one, change, row_major)
        return jax.tree.map(lambda x, n, is_stack: _put(stages, x, n, i) if is_stack else n, now, new, stacked)

    layers = jax.tree.leaves(old.params)[0].shape[0] // stages
    done = jax.lax.fori_loop(0, layers, turn, start)
    return jax.tree.map(lambda x, like: x.reshape(like.shape), done, old)


def _split(stages: int, x: jax.Array) -> jax.Array:
    """[L, ...] -> [S, L / S, ...] with several stages, whose dim is the sharded one; else as it is."""
    return x if stages == 1 else x.reshape(stages, x.shape[0] // stages, *x.shape[1:])


def _take(stages: int, x: jax.Array, i: jax.Array) -> jax.Array:
    """Layer i of every stage, [S, ...]."""
    if stages == 1:
        return jax.lax.dynamic_slice_in_dim(x, i, 1, 0)
    return jax.lax.dynamic_slice_in_dim(x, i, 1, 1).reshape(stages, *x.shape[2:])


def _put(stages: int, x: jax.Array, one: jax.Array, i: jax.Array) -> jax.Array:
    """Writes layer i of every stage."""
    if stages == 1:
        return jax.lax.dynamic_update_slice_in_dim(x, one, i, 0)
    return jax.lax.dynamic_update_slice_in_dim(x, one.reshape(stages, 1, *one.shape[1:]), i, 1)
