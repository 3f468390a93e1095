"""cuDNN's attention within documents: for rows of any length, and for use under `jax.vmap`.

The kernel takes documents as a mask of pairs of positions, [B, 1, T, T], and no other way for every GPU: sequence
lengths are one a row, and its packed layout, which has offsets of documents, needs Hopper, is no part of jax's
interface, and holds a fixed number of documents a row. So long rows are cut into bands of queries, each with the keys
up to its end and its own part of the mask, which no pass keeps for the other.

Under vmap jax's own batching rule takes a mask with one row of heads for one with all of them and fails. Here a vmapped
dim is merged into the batch, where the kernel wants it. The price: the backward pass runs the forward kernel once more.

Shapes: B batch, T sequence, H query heads, K kv heads, E head width, U keys up to the end of a band of C queries.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

WHOLE_MASK = 8192
"""Tokens of a row up to which its mask is made whole."""
BAND = 2048
"""Least queries of a band: enough to fill a GPU. A band computes up to half as many pairs of each query for nothing."""
BANDS = 32
"""Bands of a row at most: the kernel is in the program once for each."""

Kernel = Callable[..., jax.Array]
"""(q [B, C, H, E], k [B, U, K, E], v, mask) -> [B, C, H, E]; the mask is bool [B, 1, T, T], with the causal one beside
it, or whole and to be added to the logits: 0 and a large negative number, [B, 1, C, U]."""


def cudnn(q_BxTxHxE, k_BxTxKxE, v_BxTxKxE, mask_Bx1xTxT: jax.Array | None) -> jax.Array:
    """Causal attention within the mask (see `Kernel`), scale 1/sqrt(E); returns [B, T, H, E]."""
    added = mask_Bx1xTxT is not None and mask_Bx1xTxT.dtype != bool
    mask: Any = {"bias": mask_Bx1xTxT} if added else {"mask": mask_Bx1xTxT, "is_causal": True}
    return jax.nn.dot_product_attention(q_BxTxHxE, k_BxTxKxE, v_BxTxKxE, **mask, implementation="cudnn")


def band_size(seq_len: int) -> int:
    """Queries that attention within documents takes at a time: all up to `WHOLE_MASK`."""
    return seq_len if seq_len <= WHOLE_MASK else max(BAND, -(-seq_len // (BANDS * 8)) * 8)


def within_documents(kernel: Kernel, q_BxTxHxE, k_BxTxKxE, v_BxTxKxE, segments_BxT: jax.Array) -> jax.Array:
    """Causal attention within documents, a band of queries at a time; returns [B, T, H, E].

    Args:
        kernel: attends within a mask.
        q_BxTxHxE: queries.
        k_BxTxKxE: keys.
        v_BxTxKxE: values.
        segments_BxT: number of each token's document.
    """
    if band_size(q_BxTxHxE.shape[1]) >= q_BxTxHxE.shape[1]:
        mask_Bx1xTxT = segments_BxT[:, None, :, None] == segments_BxT[:, None, None, :]
        return kernel(q_BxTxHxE, k_BxTxKxE, v_BxTxKxE, mask_Bx1xTxT)
    return _banded(kernel)(q_BxTxHxE, k_BxTxKxE, v_BxTxKxE, segments_BxT)


def _banded(kernel: Kernel) -> Kernel:
    """attention(q, k, v, segments) by bands, whose backward pass makes their masks anew.

    It has its own derivative so that no policy of rematerialisation around it keeps a mask; within, only what the
    kernel gives out is kept.
    """

    def band(start: int, stop: int, q, k, v, segments):
        """Attention [B, stop - start, H, D] of these queries to the keys up to their own end."""
        q, k, v = q[:, start:stop], *(a[:, :stop].astype(q.dtype) for a in (k, v))
        # Masks are the same for all layers: jax makes before the loop over them, and keeps, all that does not depend
        # on what a layer computes, constants of a mask's size too. So all of it has to depend on the queries.
        hidden = jnp.asarray(-(2.0 ** (15 if q.dtype == jnp.float16 else 41)), q.dtype)
        seen = jnp.zeros((), q.dtype)
        parts = (q, segments, jnp.arange(stop), seen, hidden)
        q, segments, order, seen, hidden = jax.lax.optimization_barrier(parts)
        same = segments[:, None, start:stop, None] == segments[:, None, None, :stop]
        return kernel(q, k, v, jnp.where(same & (order[start:, None] >= order), seen, hidden))

    def whole(q, k, v, segments):
        """Attention [B, T, H, D], band after band."""
        T, size = q.shape[1], band_size(q.shape[1])
        # Each band adds to the gradient of the keys before it: in fp32, so that the sum of many is as exact as one.
        k, v = (a.astype(jnp.promote_types(a.dtype, jnp.float32)) for a in (k, v))
        keep = lambda primitive, *_, **__: primitive.name.startswith("dot_product_attention")
        parts = []
        for start in range(0, T, size):
            stop = min(start + size, T)
            if parts:  # one band after the other, backward too: else all their masks may be there at a time
                q, parts[-1] = jax.lax.optimization_barrier((q, parts[-1]))
            run = jax.checkpoint(partial(band, start, stop), policy=keep)
            parts.append(run(q, k, v, segments))
        return jnp.concatenate(parts, 1)

    attention = jax.custom_vjp(whole)
    attention.defvjp(
        lambda q, k, v, segments: jax.vjp(lambda q, k, v: whole(q, k, v, segments), q, k, v),
        lambda pull, dy: (*pull(dy), None),
    )
    return attention


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
