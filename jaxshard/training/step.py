"""The train step: one pure function (state, batch) -> (state, metrics), the same for every layout."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxshard.config import OptimConfig, TrainConfig
from jaxshard.parallel.precision import next_loss_scale
from jaxshard.training.gradients import Recipe, gradients
from jaxshard.training.state import TrainState


def global_norm(tree: Any) -> jax.Array:
    """Euclidean norm over all leaves, every element counted once wherever it lies."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)))


def train_step(
    recipe: Recipe,
    tx: optax.GradientTransformation,
    lr: Callable[[jax.Array], jax.Array],
    optim: OptimConfig,
    train: TrainConfig,
    state: TrainState,
    batch: dict[str, jax.Array],
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One update.

    An update whose gradient is not finite, or whose batch has no target, changes nothing but the counters and the
    loss scale: parameters, moments, their counts and the schedule stay bit-equal.

    Args:
        recipe: how gradients are computed.
        tx: direction of the update, without learning rate and clipping.
        lr: learning rate by finished updates.
        optim, train: configuration.
        state: donated by the caller's jit.
        batch: int32 [A, B, T] arrays.

    Returns:
        The next state and scalar metrics: loss, grad_norm, lr, tokens, skipped, skipped_in_row, loss_scale.
    """
    layout = recipe.layout
    policy = layout.policy
    scale = state.loss_scale.scale if state.loss_scale is not None else jnp.ones((), policy.gradients)
    grads, loss, tokens = gradients(recipe, state.params, batch, state.step, scale)
    place = lambda tree: jax.tree.map(jax.lax.with_sharding_constraint, tree, layout.optimizer)
    grads = jax.tree.map(lambda g: g / scale.astype(g.dtype), place(grads))
    norm = global_norm(grads)
    finite = jnp.isfinite(norm)
    good = finite & (tokens > 0)
    if optim.clip > 0:
        factor = jnp.minimum(1.0, optim.clip / jnp.maximum(norm, jnp.finfo(norm.dtype).tiny))
        grads = jax.tree.map(lambda g: g * factor.astype(g.dtype), grads)

    old = state.masters if policy.masters else place(state.params)
    directions, moments = tx.update(grads, state.moments, old)
    rate = lr(state.step - state.skipped)
    move = lambda p, d: (p.astype(d.dtype) - rate.astype(d.dtype) * d).astype(p.dtype)
    updated = jax.tree.map(move, old, directions)
    keep = lambda new, before: jax.tree.map(lambda n, o: jnp.where(good, n, o), new, before)
    updated, moments = keep(updated, old), keep(moments, state.moments)
    params = jax.tree.map(
        lambda p, sharding: jax.lax.with_sharding_constraint(p.astype(policy.parameters), sharding),
        updated,
        layout.parameters,
    )
    one = good.astype(jnp.int32)
    next_state = TrainState(
        step=state.step + 1,
        params=params,
        masters=updated if policy.masters else None,
        moments=moments,
        loss_scale=None
        if state.loss_scale is None
        else next_loss_scale(state.loss_scale, finite, train.loss_scale_interval),
        skipped=state.skipped + 1 - one,
        skipped_in_row=(state.skipped_in_row + 1) * (1 - one),
    )
    metrics = {
        "loss": loss,
        "grad_norm": norm,
        "lr": rate,
        "tokens": tokens,
        "skipped": next_state.skipped,
        "skipped_in_row": next_state.skipped_in_row,
        "loss_scale": scale,
    }
    return next_state, metrics
