"""The model in the pipeline: its embedding, stages and loss as functions for the executor, its weights cut for it.

Shapes: A accumulation steps, B sequences of one accumulation step, M microbatches, G groups that keep gradient sums
apart, S stages, V chunks of layers per stage, L layers, T sequence length.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxshard.models.layers import TokenInfo
from jaxshard.models.transformer import Slotted, slotted
from jaxshard.names import GATHER, REDUCE, map_named
from jaxshard.parallel.layout import Layout
from jaxshard.parallel.pipeline import Pipeline, Sums, Weights, evaluate, gradients
from jaxshard.parallel.rules import spec_entry
from jaxshard.training.loss import cross_entropy
from jaxshard.training.recipe import Recipe, dropout_keys


@dataclass(frozen=True)
class _Cut:
    """How trees of gradients and weights are seen by the executor.

    Gradients of the blocks are [G, L, ...] outside and [S, G, V, L / (S V), ...] inside; without groups the dim G is
    absent. Every reshape and transpose moves nothing between devices: S and G are split to one a device.
    """

    layout: Layout
    stages: int
    chunks: int

    @property
    def lead(self) -> int:
        return 1 if self.layout.deferred else 0

    def inside(self, g: jax.Array) -> jax.Array:
        lead = self.lead
        cut = g.reshape(*g.shape[:lead], self.stages, self.chunks, -1, *g.shape[lead + 1 :])
        return jnp.moveaxis(cut, lead, 0)

    def outside(self, g: jax.Array) -> jax.Array:
        lead = self.lead
        g = jnp.moveaxis(g, 0, lead)
        return g.reshape(*g.shape[:lead], -1, *g.shape[lead + 3 :])

    def weights(self, a: jax.Array, spec: PartitionSpec) -> jax.Array:
        """[L, ...] -> [S, L / S, ...]."""
        split = a.reshape(self.stages, -1, *a.shape[1:])
        return jax.lax.with_sharding_constraint(split, self.layout.sharding(PartitionSpec(spec[0], None, *spec[1:])))

    def place_stages(self, blocks: Any) -> Any:
        """Constrains gradients of the blocks, inside of the executor, to the layout in which they are summed."""
        groups = (spec_entry(self.layout.apart),) if self.lead else ()
        spec = lambda s: PartitionSpec(s.gradients[0], *groups, None, None, *s.gradients[1:])
        put = lambda g, s: jax.lax.with_sharding_constraint(g, self.layout.sharding(spec(s)))
        return map_named(REDUCE, put, blocks, self.layout.specs["blocks"], under="blocks")

    def place_shared(self, shared: Any) -> Any:
        """The same for gradients of all other weights."""
        spec = lambda s: self.layout.group_spec(s.gradients) if self.lead else s.gradients
        put = lambda g, s: jax.lax.with_sharding_constraint(g, self.layout.sharding(spec(s)))
        return map_named(REDUCE, put, shared, {name: self.layout.specs[name] for name in shared})


def _microbatches(layout: Layout, count: int, batch: Any) -> Any:
    """Cuts arrays [B, ...] into [M, G, B / (G M), ...], or [M, B / M, ...] without groups; nothing moves."""
    lead = (layout.sums,) if layout.deferred else ()
    spec = PartitionSpec(None, *((spec_entry(layout.apart),) if lead else ()), layout.axes_of_a_sum)

    def cut(a):
        parts = jnp.moveaxis(a.reshape(layout.groups, count, -1, *a.shape[1:]), 1, 0)
        whole = parts.reshape(count, *lead, -1, *a.shape[1:])
        return jax.lax.with_sharding_constraint(whole, layout.sharding(spec))

    return jax.tree.map(cut, batch)


def _gathered(recipe: Recipe, params: dict[str, Any]) -> dict[str, Any]:
    """The parameters as the ticks read them: as stored, or gathered once for the whole step."""
    layout = recipe.layout
    assert recipe.pipeline is not None
    if recipe.pipeline.gather == "tick":
        return params
    base = layout.tree(lambda s: s.base)
    return map_named(GATHER, jax.lax.with_sharding_constraint, params, base)


def _pipeline(recipe: Recipe, step: jax.Array | int, weight: jax.Array) -> Pipeline:
    """The functions that the executor runs, of one data group.

    The objective is that of the loss times `weight`; its sums are the cross-entropy.
    """
    model, layout, ctx = recipe.model, recipe.layout, recipe.context
    assert recipe.pipeline is not None
    if recipe.pipeline.gather == "step":
        layout = layout.once_gathered()
    each = model.arch.n_layers // (recipe.pipeline.schedule.stages * recipe.pipeline.schedule.chunks)

    def info(microbatch):
        keys = dropout_keys(recipe, step, microbatch["sequences"])
        return TokenInfo(microbatch["segments"], microbatch["positions"], keys)

    def ready(group, shared, slots):
        return layout.lift(group, slotted(shared[group], None if slots is None else slots[group]))

    def embed(shared, slots, microbatch):
        return model.embed(ready("embedding", shared, slots), microbatch["inputs"], info(microbatch), ctx)

    def stage(weights, slots, chunk, microbatch, x):
        """Runs a microbatch through the layers of one chunk of this stage."""
        values, layers = weights
        about = info(microbatch)

        def body(x, row):
            """One layer."""
            slots, place = row
            # Each layer is read where it lies: no copy of the chunk is made.
            one = lambda a: jax.lax.dynamic_index_in_dim(a, place, 0, keepdims=False)
            arrays = (
                slotted(jax.tree.map(one, values))
                if slots is None
                else jax.tree.map(lambda a, slot: Slotted(one(a), slot), values, slots)
            )
            return model.block(layout.lift("blocks", arrays), x, about, one(layers), ctx), None

        places = jnp.arange(each, dtype=jnp.int32)
        first = 0 if layers.shape[0] == each else chunk * each
        return jax.lax.scan(recipe.remat(body), x, (slots, first + places))[0]

    def loss(shared, slots, microbatch, y):
        head = ready("head", shared, slots)
        x = model.final_norm(head, y, ctx)
        out = ready("embedding", shared, slots)["tokens"] if model.arch.tie_embeddings else head["out"]
        objective, entropy = cross_entropy(recipe.loss_spec(), x, out, microbatch["targets"])
        return objective * weight, entropy

    def shard(x, lead):
        rest = x.ndim - len(lead)
        stream = ("batch", "residual_sequence", "embed") if rest == 3 else ("batch", *[None] * (rest - 1))
        return layout.shard(x, (*lead, *stream))

    return Pipeline(recipe.pipeline.schedule, embed, stage, loss, layout.apart, shard)


def _weights(recipe: Recipe, cut: _Cut, params: Any) -> Weights:
    """Cuts the stored parameters: blocks, with the natural number of every layer, and the rest."""
    params = {**_gathered(recipe, params)}
    assert recipe.pipeline is not None
    once = recipe.pipeline.gather == "step"
    spec = lambda s: s.base if once else s.parameters
    blocks = jax.tree.map(lambda a, s: cut.weights(a, spec(s)), params.pop("blocks"), recipe.layout.specs["blocks"])
    layers = jnp.asarray(recipe.model.layer_order.reshape(cut.stages, -1), jnp.int32)
    return Weights((blocks, layers), params)


def pipelined(
    recipe: Recipe, params: Any, start: Any, batch: dict[str, jax.Array], step: jax.Array, weight: jax.Array
) -> tuple[Any, jax.Array]:
    """Adds the gradients of all microbatches of a batch to `start`.

    Args:
        recipe: how; with a pipeline.
        params: parameters as stored.
        start: (gradients in the shape of the parameters, with a leading dim of groups where the layout keeps their
            sums apart; cross-entropy sum).
        batch: [A, B, T] arrays, and "sequences" uint32 [A, B]: places in the global batch.
        step: finished updates, for dropout.
        weight: factor of the objective.
    """
    layout = recipe.layout
    assert recipe.pipeline is not None
    schedule = recipe.pipeline.schedule
    cut = _Cut(layout, schedule.stages, schedule.chunks)
    run = replace(_pipeline(recipe, step, weight), place_stages=cut.place_stages, place_shared=cut.place_shared)
    weights = _weights(recipe, cut, params)
    shared, entropy = dict(start[0]), start[1]
    blocks = jax.tree.map(cut.inside, shared.pop("blocks"))
    zero = jnp.zeros((layout.sums,) if layout.deferred else (), entropy.dtype)
    sums = Sums(cut.place_stages(blocks), cut.place_shared(shared), zero)

    def add(sums, part):
        return gradients(run, weights, sums, _microbatches(layout, schedule.microbatches, part)), None

    first = jax.tree.map(lambda a: a[0], batch)
    sums = add(sums, first)[0] if batch["inputs"].shape[0] == 1 else jax.lax.scan(add, sums, batch)[0]
    grads = {**sums.shared, "blocks": jax.tree.map(cut.outside, sums.stages)}
    return grads, entropy + sums.sums.sum()


def evaluate_pipelined(recipe: Recipe, params: Any, batch: dict[str, jax.Array]) -> jax.Array:
    """Cross-entropy sum of sequences [B, T], by a pipeline of forwards without dropout.

    Args:
        recipe: how; with a pipeline, without dropout and deferred gradients.
        params: parameters as stored.
        batch: int32 [B, T] arrays.
    """
    layout = recipe.layout
    assert recipe.pipeline is not None
    schedule = recipe.pipeline.evaluation
    recipe = replace(recipe, pipeline=replace(recipe.pipeline, schedule=schedule))
    B = batch["inputs"].shape[0]
    dtype = layout.policy.gradients
    parts = _microbatches(layout, schedule.microbatches, batch | {"sequences": jnp.arange(B, dtype=jnp.uint32)})
    run = _pipeline(recipe, 0, jnp.ones((), dtype))
    weights = _weights(recipe, _Cut(layout, schedule.stages, schedule.chunks), params)
    return evaluate(run, weights, jnp.zeros((), dtype), parts)
