"""The model over a KV cache: reads many tokens (a prompt) or one, and remembers keys and values.

Shapes: B sequences, T new tokens, U slots of the cache, L layers, K kv heads, E head width, D model width, V vocabulary
(its padding left out).

Parameters stay where training keeps them: each layer is gathered for use as in the training step (`Layout.lift`), and
on a pipeline mesh it comes from the stage that holds it, one layer at a time.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxshard.models.layers import Context, TokenInfo
from jaxshard.models.transformer import Model, slotted
from jaxshard.parallel.axes import STAGE
from jaxshard.parallel.layout import Layout


class Cache(NamedTuple):
    """Keys and values of the tokens so far. All sequences stand flush right: the next token takes the same slot in all.

    Attributes:
        keys, values: [L, B, U, K, E].
        padding: int32 [B], slots at the left that hold no token.
        length: int32, slots in use.
    """

    keys: jax.Array
    values: jax.Array
    padding: jax.Array
    length: jax.Array


def empty_cache(model: Model, ctx: Context, padding_B: jax.Array, slots: int) -> Cache:
    """A cache without tokens: sequences over the data axes, kv heads over the model axis where they divide."""
    arch = model.arch
    shape = (arch.n_layers, padding_B.shape[0], slots, arch.n_kv_heads, arch.head_dim)
    zeros = lambda: _place(jnp.zeros(shape, ctx.dtype), ctx)
    return Cache(zeros(), zeros(), padding_B, jnp.zeros((), jnp.int32))


def _place(a_LxBxUxKxE: jax.Array, ctx: Context) -> jax.Array:
    return ctx.shard(a_LxBxUxKxE, (None, "batch", None, "kv_heads", "head_dim"))


def read(
    model: Model, layout: Layout, ctx: Context, params: Any, tokens_BxT: jax.Array, cache: Cache
) -> tuple[jax.Array, Cache]:
    """Runs the blocks over new tokens; returns the residual stream of the last token [B, 1, D] and the longer cache."""
    T = tokens_BxT.shape[1]
    at_T = cache.length + jnp.arange(T, dtype=jnp.int32)
    positions = jnp.maximum(at_T - cache.padding[:, None], 0)
    info = TokenInfo(jnp.ones_like(positions), positions)
    slots = jnp.arange(cache.keys.shape[2], dtype=jnp.int32)
    mask_BxTxU = (slots <= at_T[:, None]) & (slots >= cache.padding[:, None, None])
    x = model.embed(layout.lift("embedding", slotted(params["embedding"])), tokens_BxT, info, ctx)

    places_L = jnp.asarray(np.argsort(model.layer_order), jnp.int32)  # A pipeline may store its layers shuffled.

    def body(layer, carry):
        """One layer: hidden states and both stacks of the cache -> the same, with this step's keys and values."""
        x, keys, values = carry

        def recall(k, v):
            memory = tuple(_write(a, new, layer, cache.length, ctx) for a, new in ((keys, k), (values, v)))
            own = [jax.lax.dynamic_index_in_dim(a, layer, 0, keepdims=False) for a in memory]
            return *own, mask_BxTxU, memory

        arrays = layout.lift("blocks", slotted(_one_layer(layout, params["blocks"], places_L[layer])))
        x, memory = model.module("blocks", arrays).recalling(x, info, recall, ctx)
        return x, *memory

    x, keys, values = jax.lax.fori_loop(0, model.arch.n_layers, body, (x, cache.keys, cache.values))
    return x[:, -1:], Cache(keys, values, cache.padding, cache.length + T)


def _write(a_LxBxUxKxE: jax.Array, new_BxTxKxE: jax.Array, layer: jax.Array, at: jax.Array, ctx: Context) -> jax.Array:
    zero = jnp.zeros((), jnp.int32)
    start = (jnp.asarray(layer, jnp.int32), zero, at, zero, zero)
    return _place(jax.lax.dynamic_update_slice(a_LxBxUxKxE, new_BxTxKxE[None].astype(a_LxBxUxKxE.dtype), start), ctx)


def _one_layer(layout: Layout, blocks: Any, place: jax.Array) -> Any:
    """Takes the layer at a place of the stack, on whichever stage that is."""
    if layout.shape.stage == 1:
        return jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, place, 0, keepdims=False), blocks)

    def pick(a, specs):
        """[L, ...] -> layer `place`, [...], whichever stage has it."""
        # Indexing a sharded dim would gather the whole stack. Every stage offers one of its own layers instead, and
        # the sum over stages takes the right one: adding zeros is exact.
        stages = layout.shape.stage
        each = a.shape[0] // stages
        split = layout.sharding(PartitionSpec(STAGE, None, *specs.parameters[1:]))
        stacks = jax.lax.with_sharding_constraint(a.reshape(stages, each, *a.shape[1:]), split)
        offers = jax.lax.dynamic_index_in_dim(stacks, place % each, 1, keepdims=False)
        right = (jnp.arange(stages) == place // each).reshape(stages, *[1] * (offers.ndim - 1))
        return jnp.where(right, offers, 0).sum(0, dtype=a.dtype)

    return jax.tree.map(pick, blocks, layout.specs["blocks"])


def logits(model: Model, layout: Layout, ctx: Context, params: Any, x_Bx1xD: jax.Array) -> jax.Array:
    """Returns the logits [B, V] of the token after each sequence, fp32 or wider, without the vocabulary's padding."""
    head = layout.lift("head", slotted(params["head"]))
    table = layout.lift("embedding", slotted(params["embedding"]))["tokens"] if model.arch.tie_embeddings else None
    out = head["out"] if table is None else table
    x = model.final_norm(head, x_Bx1xD, ctx)
    y = jnp.einsum("btd,vd->btv", x, out.astype(x.dtype), preferred_element_type=out.dtype)
    y = ctx.shard(y, ("batch", "sequence", "vocab"))[:, 0, : model.arch.vocab_size]
    return ctx.shard(y, ("batch", None))


PREFILL_CHUNK = 512
"""Tokens of a prompt that are read together: attention's [B, H, T, U] logits exist for so many at a time."""


def prefill(
    model: Model, layout: Layout, ctx: Context, slots: int, params: Any, tokens_BxP: jax.Array, padding_B: jax.Array
) -> Cache:
    """Reads prompts into a new cache.

    Args:
        model, layout, ctx: what runs, where, and how.
        slots: size of the cache.
        params: parameters as stored.
        tokens_BxP: prompts, flush right; P is a power of two.
        padding_B: int32, positions at the left that are not of the prompt.
    """
    B, P = tokens_BxP.shape
    chunk = math.gcd(P, PREFILL_CHUNK)
    parts = jnp.moveaxis(tokens_BxP.reshape(B, P // chunk, chunk), 1, 0)
    body = lambda cache, tokens_BxC: (read(model, layout, ctx, params, tokens_BxC, cache)[1], None)
    return jax.lax.scan(body, empty_cache(model, ctx, padding_B, slots), parts)[0]
