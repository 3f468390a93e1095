"""cuDNN's attention with a mask, for use under `jax.vmap`.

jax's own batching rule takes a mask with one row of heads for one with all of them and fails. Here a vmapped dim is
merged into the batch, where the kernel wants it. The price: the backward pass runs the forward kernel once more.

Shapes: B batch, T sequence, H query heads, K kv heads, E head width.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap


def cudnn(q_BxTxHxE, k_BxTxKxE, v_BxTxKxE, mask_Bx1xTxT: jax.Array | None) -> jax.Array:
    """Causal attention within the mask, scale 1/sqrt(E); returns [B, T, H, E]."""
    return jax.nn.dot_product_attention(
        q_BxTxHxE, k_BxTxKxE, v_BxTxKxE, mask=mask_Bx1xTxT, is_causal=True, implementation="cudnn"
    )


def _merging(kernel: Callable[..., tuple[jax.Array, ...]]) -> Callable[..., tuple[jax.Array, ...]]:
    """A kernel over arrays whose first dim is the batch; a vmapped dim becomes part of the batch."""
    merged = custom_vmap(kernel)

    @merged.def_vmap
    def rule(size, batched, *arrays):
        whole = [a if b else jnp.broadcast_to(a[None], (size, *a.shape)) for a, b in zip(arrays, batched, strict=True)]
        # By way of `merged` again: there may be another vmap around this one.
        out = merged(*(a.reshape(-1, *a.shape[2:]) for a in whole))
        return tuple(a.reshape(size, -1, *a.shape[1:]) for a in out), (True,) * len(out)

    return merged


def batchable(kernel: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Makes attention(q, k, v, mask) whose arrays have the batch first fit for vmap, with gradients for q, k and v."""
    forward = _merging(lambda q, k, v, mask: (kernel(q, k, v, mask),))

    def slopes(q, k, v, mask, dy):
        return jax.vjp(lambda q, k, v: kernel(q, k, v, mask), q, k, v)[1](dy)

    backward = _merging(slopes)

    @jax.custom_vjp
    def attention(q, k, v, mask):
        return forward(q, k, v, mask)[0]

    attention.defvjp(
        lambda *arrays: (attention(*arrays), arrays),
        lambda arrays, dy: (*backward(*arrays, dy), None),
    )
    return attention


cudnn_batchable = batchable(cudnn)
