"""The train step: one pure function (state, batch) -> (state, metrics), the same for every layout."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxshard.config import OptimConfig, TrainConfig
from jaxshard.names import GRAD_NORM, REDUCE, map_named
from jaxshard.parallel.precision import next_loss_scale
from jaxshard.training.gradients import Recipe, gradients
from jaxshard.training.state import TrainState
from jaxshard.training.update import Change, Parts, Update


@jax.named_scope(GRAD_NORM)
def global_norm(tree: Any) -> jax.Array:
    """Euclidean norm over all leaves, every element counted once wherever it lies."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)))


def train_step(
    recipe: Recipe,
    update: Update,
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
        update: of parameters, masters and moments; see `choose_update`.
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
    grads = map_named(REDUCE, jax.lax.with_sharding_constraint, grads, layout.optimizer)
    norm = global_norm(jax.tree.map(lambda g: g / scale.astype(g.dtype), grads))
    finite = jnp.isfinite(norm)
    good = finite & (tokens > 0)
    factor = jnp.ones_like(norm)
    if optim.clip > 0:
        factor = jnp.minimum(1.0, optim.clip / jnp.maximum(norm, jnp.finfo(norm.dtype).tiny))
    rate = lr(state.step - state.skipped)
    new = update(grads, Parts(state.params, state.masters, state.moments), Change(good, scale, factor, rate))
    one = good.astype(jnp.int32)
    next_state = TrainState(
        step=state.step + 1,
        params=new.params,
        masters=new.masters,
        moments=new.moments,
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
