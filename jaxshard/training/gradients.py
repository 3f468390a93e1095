"""Loss and gradients of one global batch: accumulation, data groups, rematerialisation; a pipeline where there is one.

Shapes: A accumulation steps, B sequences of one accumulation step, G groups that keep gradient sums apart, T sequence
length.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxshard.models.layers import Context, TokenInfo
from jaxshard.models.products import sum_groups
from jaxshard.models.transformer import slotted
from jaxshard.names import METRICS, REDUCE, map_named
from jaxshard.parallel.layout import Layout
from jaxshard.training.loss import IGNORED, cross_entropy
from jaxshard.training.pipeline_gradients import evaluate_pipelined, pipelined
from jaxshard.training.recipe import Recipe, dropout_keys


def batch_objective(
    recipe: Recipe, weights: Any, batch: dict[str, jax.Array], keys: jax.Array | None, ctx: Context
) -> Any:
    """Runs the model on sequences [B, T]; returns (objective sum, cross-entropy sum) over positions with a target.

    Args:
        recipe: how.
        weights: tree of `Slotted`.
        batch: inputs, targets, segments, positions; int32 [B, T].
        keys: dropout keys [B], or None.
        ctx: the recipe's context, or one without dropout.
    """
    model, lift = recipe.model, recipe.layout.lift
    info = TokenInfo(batch["segments"], batch["positions"], keys)
    embedding = lift("embedding", weights["embedding"])
    x = model.embed(embedding, batch["inputs"], info, ctx)
    layers = jnp.arange(model.arch.n_layers, dtype=jnp.int32)
    x = model.run_blocks(weights["blocks"], x, info, layers, ctx, lift, recipe.remat)
    head = lift("head", weights["head"])
    x = model.final_norm(head, x, ctx)
    if model.arch.tie_embeddings:
        # Where the parameters are gathered for use, gather again rather than keep the table through the blocks.
        again = lift("embedding", weights["embedding"]) if recipe.layout.gathers else embedding
        out = again["tokens"]
    else:
        out = head["out"]
    return cross_entropy(recipe.loss_spec(), x, out, batch["targets"])


@jax.named_scope(METRICS)
def count_targets(batch: dict[str, jax.Array]) -> jax.Array:
    """Number of positions that have a target, int32."""
    return (batch["targets"] != IGNORED).sum(dtype=jnp.int32)


def gradients(recipe: Recipe, params: Any, batch: dict[str, jax.Array], step: jax.Array, scale: jax.Array):
    """Gradients of scale x (objective / number of targets), over the whole batch.

    Args:
        recipe: how.
        params: parameters as stored.
        batch: int32 [A, B, T] arrays.
        step: finished updates, for dropout.
        scale: loss scale.

    Returns:
        (gradients in the gradients' type and, where they are produced sharded, layout; mean cross-entropy; targets).
    """
    layout, dtype = recipe.layout, recipe.layout.policy.gradients
    A, B, _ = batch["inputs"].shape
    total = count_targets(batch)
    weight = scale.astype(dtype) / jnp.maximum(total, 1).astype(dtype)
    sequences = jnp.arange(A * B, dtype=jnp.uint32).reshape(A, B)
    if recipe.pipeline is not None:
        start = (zero_sums(layout, params), jnp.zeros((), dtype))
        grads, entropy = pipelined(recipe, params, start, batch | {"sequences": sequences}, step, weight)
    else:
        grads, entropy = _whole(recipe, params, batch, sequences, step, weight)
    if layout.deferred:
        # The one reduction of the step over the axes that keep their sums apart.
        grads = map_named(REDUCE, sum_groups, grads)
    return grads, entropy / jnp.maximum(total, 1).astype(dtype), total


def _whole(recipe: Recipe, params: Any, batch: Any, sequences: jax.Array, step: jax.Array, weight: jax.Array):
    """Gradients where every device holds all layers; with a leading dim of groups where they are deferred."""
    layout, dtype = recipe.layout, recipe.layout.policy.gradients
    zeros = lambda sharding, p: jax.lax.with_sharding_constraint(jnp.zeros(p.shape, dtype), sharding)
    slots = jax.tree.map(zeros, layout.gradients, params)

    def objective(slots, part, ids):
        loss, entropy = batch_objective(
            recipe, slotted(params, slots), part, dropout_keys(recipe, step, ids), recipe.context
        )
        return loss * weight, entropy

    one = jax.grad(objective, has_aux=True)
    if layout.deferred:
        one = _by_group(recipe, one)
    if sequences.shape[0] == 1:
        return one(slots, jax.tree.map(lambda a: a[0], batch), sequences[0])

    def body(carry, row):
        grads, entropy = one(slots, *row)
        return (place_sums(layout, map_named(REDUCE, jnp.add, carry[0], grads)), carry[1] + entropy), None

    start = (zero_sums(layout, params), jnp.zeros((), dtype))
    return jax.lax.scan(body, start, (batch, sequences))[0]


def place_sums(layout: Layout, grads: Any) -> Any:
    """Constrains gradients to the layout in which a step sums them: [G, ...] where groups keep their own."""
    is_spec = lambda x: isinstance(x, PartitionSpec)
    specs = jax.tree.map(lambda s: s.spec, layout.gradients)
    if layout.deferred:
        specs = jax.tree.map(layout.group_spec, specs, is_leaf=is_spec)
    return map_named(REDUCE, lambda g, s: jax.lax.with_sharding_constraint(g, layout.sharding(s)), grads, specs)


def zero_sums(layout: Layout, params: Any) -> Any:
    """Gradients to begin a sum with."""
    lead = (layout.sums,) if layout.deferred else ()
    return place_sums(layout, jax.tree.map(lambda p: jnp.zeros((*lead, *p.shape), layout.policy.gradients), params))


def _by_group(recipe: Recipe, one: Callable) -> Callable:
    """Lets every group keep its own gradient: [G, ...] leaves, split over the axes kept apart, not yet summed."""
    layout = recipe.layout
    groups = layout.sums
    spec = layout.group_spec(PartitionSpec(layout.axes_of_a_sum))

    def run(slots, part, ids):
        cut = lambda a: jax.lax.with_sharding_constraint(
            a.reshape(groups, a.shape[0] // groups, *a.shape[1:]), layout.sharding(spec)
        )
        each = jax.vmap(one, in_axes=(None, 0, 0), spmd_axis_name=layout.apart)
        grads, entropy = each(slots, jax.tree.map(cut, part), cut(ids))
        return grads, entropy.sum()

    return run


def evaluate_batch(recipe: Recipe, params: Any, batch: dict[str, jax.Array]):
    """Cross-entropy sum and number of targets of sequences [B, T], without dropout."""
    plain = replace(recipe, layout=replace(recipe.layout, apart=()))
    ctx = replace(recipe.context.without_dropout(), shard=plain.layout.shard)
    if recipe.pipeline is not None:
        entropy = evaluate_pipelined(replace(plain, context=ctx), params, batch)
    else:
        _, entropy = batch_objective(plain, slotted(params), batch, None, ctx)
    return entropy, count_targets(batch)
