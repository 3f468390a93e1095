"""Vocabulary-parallel cross-entropy that never holds the logits of a whole sequence.

Shapes: B batch, T sequence, C positions of a chunk, D model width, V padded vocabulary, G data groups.

A loop over chunks computes logits [B, C, V] (split over the vocabulary), their loss and at once their gradient; so the
logits are computed once and are gone after the chunk. Over the vocabulary only [B, C] maxima, sums and target logits
are reduced, and the [B, C, D] gradient of the input.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxshard.models.products import sum_groups
from jaxshard.names import INPUT_GRAD, WEIGHT_GRAD

IGNORED = -1
"""Target of a position that has no loss."""


@dataclass(frozen=True, eq=False)
class LossSpec:
    """How the loss is computed.

    Attributes:
        vocab_size: ids from here on are padding and have probability 0.
        chunk: positions whose logits exist at one time.
        z_loss: weight of the squared log-normaliser (PaLM, Chowdhery et al. 2022, section 5).
        groups: data groups; each sums its own gradient of the head over the chunks, reduced once at the end.
        shard: constrains an array by logical axes.
        table: path of the weight that makes the logits.
    """

    vocab_size: int
    chunk: int
    z_loss: float
    groups: int
    shard: Callable[..., jax.Array]
    table: str = "head.out"


def cross_entropy(
    spec: LossSpec, x_BxTxD: jax.Array, w_VxD: jax.Array, targets_BxT: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Sums over all positions with a target: (objective, cross-entropy), scalars in the type of w.

    The objective is cross-entropy + z_loss x logsumexp^2. Only the objective carries a gradient.
    """
    sums: Any = _cross_entropy(spec, x_BxTxD, w_VxD, targets_BxT)
    return sums[0], sums[1]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cross_entropy(spec: LossSpec, x, w, targets) -> Any:
    sums, _ = _run(spec, x, w, targets, with_gradients=False)
    return sums


def _forward(spec, x, w, targets):
    return _run(spec, x, w, targets, with_gradients=True)


def _backward(spec, saved, cotangents):
    dx, dw = saved
    scale = cotangents[0]
    return (dx * scale.astype(dw.dtype)).astype(dx.dtype), dw * scale.astype(dw.dtype), None


_cross_entropy.defvjp(_forward, _backward)


@jax.named_scope("loss")
def _run(spec: LossSpec, x, w, targets, with_gradients: bool):
    B, T, _ = x.shape
    chunk = min(spec.chunk, T)
    count = -(-T // chunk)
    pad = count * chunk - T
    x_padded = jnp.pad(x, ((0, 0), (0, pad), (0, 0)))
    targets_padded = jnp.pad(targets, ((0, 0), (0, pad)), constant_values=IGNORED)
    cut = lambda a: jnp.moveaxis(a.reshape(B, count, chunk, *a.shape[2:]), 1, 0)
    head = w.astype(x.dtype)
    zero = jnp.zeros((), w.dtype)
    dw0 = _by_group(spec, jnp.zeros((spec.groups, *w.shape), w.dtype)) if with_gradients else zero

    def body(carry, row):
        """One chunk of positions: adds to objective, entropy and dw [V, D], and gives dx [B, C, D]."""
        objective, entropy, dw = carry
        x_c, targets_c = row
        loss, ce, dlogits = _chunk(spec, x_c, head, targets_c, w.dtype)
        carry = (objective + loss, entropy + ce, dw)
        if not with_gradients:
            return carry, None
        dlogits = spec.shard(dlogits.astype(x.dtype), ("batch", "sequence", "vocab"))
        with jax.named_scope(f"{INPUT_GRAD}/{spec.table}"):
            dx = spec.shard(jnp.einsum("bcv,vd->bcd", dlogits, head), ("batch", "sequence", "embed"))
        each = lambda a: a.reshape(spec.groups, B // spec.groups, *a.shape[1:])
        with jax.named_scope(f"{WEIGHT_GRAD}/{spec.table}"):
            more = jnp.einsum("gbcv,gbcd->gvd", each(dlogits), each(x_c), preferred_element_type=w.dtype)
            dw = _by_group(spec, dw + more)
        return (*carry[:2], dw), dx

    if count == 1:
        (objective, entropy, dw), dx = body((zero, zero, dw0), (x_padded, targets_padded))
    else:
        (objective, entropy, dw), dx = jax.lax.scan(body, (zero, zero, dw0), (cut(x_padded), cut(targets_padded)))
        if with_gradients:
            dx = jnp.moveaxis(jnp.asarray(dx), 0, 1).reshape(B, count * chunk, -1)[:, :T]
    if not with_gradients:
        return (objective, entropy), None
    with jax.named_scope(f"{WEIGHT_GRAD}/{spec.table}"):
        return (objective, entropy), (dx, sum_groups(dw))


def _by_group(spec: LossSpec, dw_GxVxD: jax.Array) -> jax.Array:
    return spec.shard(dw_GxVxD, ("batch", "vocab", "embed"))


def _chunk(spec: LossSpec, x_BxCxD, w_VxD, targets_BxC, dtype):
    """Returns the chunk's objective, its cross-entropy, and d objective / d logits [B, C, V]."""
    logits = jnp.einsum("bcd,vd->bcv", x_BxCxD, w_VxD, preferred_element_type=dtype)
    logits = spec.shard(logits, ("batch", "sequence", "vocab"))
    ids = jax.lax.broadcasted_iota(jnp.int32, (1, 1, w_VxD.shape[0]), 2)
    logits = jnp.where(ids < spec.vocab_size, logits, -jnp.inf)
    top = jax.lax.stop_gradient(logits.max(-1, keepdims=True))
    powers = jnp.exp(logits - top)
    total = powers.sum(-1, keepdims=True)
    normaliser = (top + jnp.log(total))[..., 0]
    is_target = ids == targets_BxC[..., None]
    target = jnp.where(is_target, logits, 0).sum(-1)
    valid = (targets_BxC != IGNORED).astype(dtype)
    entropy = ((normaliser - target) * valid).sum()
    objective = entropy + spec.z_loss * (normaliser**2 * valid).sum()
    slope = valid * (1 + 2 * spec.z_loss * normaliser)
    dlogits = powers / total * slope[..., None] - jnp.where(is_target, valid[..., None], 0)
    return objective, entropy, dlogits
