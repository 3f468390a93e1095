"""Layers of the decoder: what is computed, with no knowledge of devices.

Shapes in names: B batch, T sequence, D model width, H query heads, K kv heads, E head width, F hidden width.

Every weight is declared in one row: shape, logical axes, initialiser, role. Sharding, initial values, weight decay and
memory figures all derive from that row.

How weights are placed and how activations are constrained enters through `Context`, as functions.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxshard.models.fused_attention import cudnn, cudnn_batchable, within_documents
from jaxshard.models.presets import Architecture
from jaxshard.models.products import add_bias, einsum, repeat_heads, whole_gradient
from jaxshard.names import KV_HEADS

DOT_NAMES = ("query", "key", "value", "attention", "attention_out", "mlp_gate", "mlp_up", "mlp_out")
"""Names of the activations that come out of a matmul; `--parallel.remat dots` keeps these."""
SAVED_NAMES = ("residual", "norm", *DOT_NAMES, "mlp_hidden")
"""Every named activation of a block, for `--parallel.remat names:...`."""


class TokenInfo(NamedTuple):
    """What travels beside the residual stream.

    Attributes:
        segments: int32 [B, T], number of the document; 0 is padding.
        positions: int32 [B, T], position within the document.
        keys: PRNG keys [B], one a sequence of the global batch, or None without dropout.
    """

    segments: jax.Array
    positions: jax.Array
    keys: jax.Array | None = None


def _constrain_nothing(x, axes, name=None):
    return x if name is None else checkpoint_name(x, name)


@dataclass(frozen=True)
class Context:
    """How the model is run.

    Attributes:
        dtype: type of activations and matmuls.
        shard: (array, logical axes, name) -> the array, constrained to a layout and named for rematerialisation.
        dropout: probability of dropping an element, 0 when evaluating.
        attention: "xla" or "cudnn".
        packed: several documents share a sequence, so attention needs their boundaries beside causality.
        split_kv: kv heads are split over the model axis as the query heads are; otherwise they are repeated to one a
            query head before attention.
        mixed_kv: not split, and some device has query heads of several kv heads.
        vocab_parts: parts that the rows of the token embedding are split into.
        groups: data groups that each sum their own gradient of the embedding, reduced once.
        vmapped: blocks run under `jax.vmap`, over data groups or stages.
    """

    dtype: Any = jnp.float32
    shard: Callable[..., jax.Array] = _constrain_nothing
    dropout: float = 0.0
    attention: str = "xla"
    packed: bool = True
    split_kv: bool = True
    mixed_kv: bool = False
    vocab_parts: int = 1
    groups: int = 1
    vmapped: bool = False

    def without_dropout(self) -> "Context":
        return replace(self, dropout=0.0)


def weight(shape: tuple[int, ...], axes: tuple[str | None, ...], init: tuple, role: str) -> nnx.Param:
    """Declares one weight.

    Args:
        shape: of the whole array.
        axes: logical name of every dim; None is never sharded.
        init: ("normal", standard deviation), ("ones",) or ("zeros",).
        role: matrix, embedding, norm or bias; weight decay goes by it.
    """
    assert len(shape) == len(axes), (shape, axes)
    return nnx.Param(jnp.zeros(shape), logical_axes=axes, init=init, role=role)


def named(param: nnx.Param) -> Any:
    """The scope of a weight: its path in the model, as `transformer.describe` numbers it, around where it is used."""
    return jax.named_scope(param.get_metadata("path"))


def product(spec: str, x: jax.Array, param: nnx.Param) -> jax.Array:
    """`products.einsum` with a weight, under its name."""
    with named(param):
        return einsum(spec, x, param[...])


def shifted(x: jax.Array, param: nnx.Param) -> jax.Array:
    """`products.add_bias`, under the bias's name."""
    with named(param):
        return add_bias(x, param[...])


def dropout(x_BxTxD: jax.Array, rate: float, keys_B: jax.Array | None, site: jax.Array | int) -> jax.Array:
    """Drops elements with a mask that depends on (seed, step, layer, sequence, position) and never on the layout.

    Args:
        x_BxTxD: activations.
        rate: probability of dropping.
        keys_B: one key for each sequence of the global batch.
        site: number of this place in the network.
    """
    if rate == 0.0 or keys_B is None:
        return x_BxTxD
    draw = lambda key: jax.random.bernoulli(jax.random.fold_in(key, site), 1.0 - rate, x_BxTxD.shape[1:])
    return jnp.where(jax.vmap(draw)(keys_B), x_BxTxD / (1.0 - rate), 0).astype(x_BxTxD.dtype)


class Norm(nnx.Module):
    """LayerNorm (gpt2) or RMSNorm (llama) over the last dim; statistics in fp32 or wider."""

    def __init__(self, arch: Architecture):
        self.eps, self.center = arch.norm_eps, arch.family == "gpt2"
        self.scale = weight((arch.d_model,), ("embed",), ("ones",), "norm")
        if self.center:
            self.bias = weight((arch.d_model,), ("embed",), ("zeros",), "norm")

    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        scale = self.scale[...]
        x = x_BxTxD.astype(jnp.promote_types(scale.dtype, jnp.float32))
        if self.center:
            x = x - x.mean(-1, keepdims=True)
        x = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + self.eps)
        with named(self.scale):
            x = x * scale
        if self.center:
            with named(self.bias):
                x = x + self.bias[...]
        return x.astype(x_BxTxD.dtype)


def rope_frequencies(arch: Architecture, dtype) -> jax.Array:
    """Angular frequencies [E / 2] of rotary embeddings (Su et al. 2021), stretched as `rope_scaling` says.

    linear: all divided by the factor (Chen et al. 2023). llama3: long wavelengths divided, short ones kept, in between
    interpolated (Llama 3 report, Grattafiori et al. 2024).
    """
    exponent = jnp.arange(0, arch.head_dim, 2, dtype=dtype) / arch.head_dim
    frequency = 1.0 / jnp.asarray(arch.rope_theta, dtype) ** exponent
    if arch.rope_scaling == "none":
        return frequency
    if arch.rope_scaling == "linear":
        return frequency / arch.rope_factor
    turns = arch.rope_original_max * frequency / (2 * jnp.pi)
    low, high = arch.rope_low_freq_factor, arch.rope_high_freq_factor
    keep = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
    return frequency * (keep + (1.0 - keep) / arch.rope_factor)


def rope(x_BxTxHxE: jax.Array, positions_BxT: jax.Array, arch: Architecture) -> jax.Array:
    """Rotates pairs (i, i + E/2) of every head by position x frequency, in fp32 or wider."""
    dtype = jnp.promote_types(x_BxTxHxE.dtype, jnp.float32)
    angle = positions_BxT[..., None, None].astype(dtype) * rope_frequencies(arch, dtype)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = jnp.split(x_BxTxHxE.astype(dtype), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x_BxTxHxE.dtype)


def attend(q_BxTxHxE, k_BxTxKxE, v_BxTxKxE, segments_BxT: jax.Array, ctx: Context) -> jax.Array:
    """Causal attention within documents, scale 1/sqrt(E), softmax in fp32 or wider; returns [B, T, H, E].

    Padding stands at the end of a sequence, so without packing causality alone hides it.
    """
    if ctx.attention == "cudnn":
        if not ctx.packed:
            return cudnn(q_BxTxHxE, k_BxTxKxE, v_BxTxKxE, None)
        kernel = cudnn_batchable if ctx.vmapped else cudnn
        return within_documents(kernel, q_BxTxHxE, k_BxTxKxE, v_BxTxKxE, segments_BxT)
    mask = jnp.tri(q_BxTxHxE.shape[1], dtype=bool)[None]
    if ctx.packed:
        mask = mask & (segments_BxT[:, :, None] == segments_BxT[:, None, :])
    return attend_masked(q_BxTxHxE, k_BxTxKxE, v_BxTxKxE, mask)


def attend_masked(q_BxTxHxE, k_BxUxKxE, v_BxUxKxE, mask_BxTxU: jax.Array) -> jax.Array:
    """Attention of T queries over U keys where the mask is true, softmax in fp32 or wider; returns [B, T, H, E].

    Written out because jax's own softmax is always fp32, and comparisons in fp64 need all of it.
    """
    B, T, H, E = q_BxTxHxE.shape
    K = k_BxUxKxE.shape[2]
    dtype = jnp.promote_types(q_BxTxHxE.dtype, jnp.float32)
    q = q_BxTxHxE.reshape(B, T, K, H // K, E)
    logits = jnp.einsum("btkge,buke->bkgtu", q, k_BxUxKxE, preferred_element_type=dtype) / E**0.5
    logits = jnp.where(mask_BxTxU[:, None, None], logits, jnp.finfo(dtype).min)
    weights = jax.nn.softmax(logits, axis=-1).astype(v_BxUxKxE.dtype)
    return jnp.einsum("bkgtu,buke->btkge", weights, v_BxUxKxE).reshape(B, T, H, E)


Recall = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array, jax.Array, Any]]
"""(keys [B, T, K, E], values) of the new tokens -> (keys [B, U, K, E], values, mask [B, T, U], memory): all that the
new tokens may look at, and the memory with them in it."""


class Attention(nnx.Module):
    """Causal self-attention; query heads share kv heads when there are fewer (GQA, Ainslie et al. 2023)."""

    def __init__(self, arch: Architecture):
        D, H, K, E = arch.d_model, arch.n_heads, arch.n_kv_heads, arch.head_dim
        self.arch, self.biased = arch, arch.family == "gpt2"
        normal, out = ("normal", arch.init_std), ("normal", arch.init_std / (2 * arch.n_layers) ** 0.5)
        self.query = weight((D, H, E), ("embed", "heads", "head_dim"), normal, "matrix")
        self.key = weight((D, K, E), ("embed", "kv_heads", "head_dim"), normal, "matrix")
        self.value = weight((D, K, E), ("embed", "kv_heads", "head_dim"), normal, "matrix")
        self.out = weight((H, E, D), ("heads", "head_dim", "embed"), out, "matrix")
        if self.biased:
            self.query_bias = weight((H, E), ("heads", "head_dim"), ("zeros",), "bias")
            self.key_bias = weight((K, E), ("kv_heads", "head_dim"), ("zeros",), "bias")
            self.value_bias = weight((K, E), ("kv_heads", "head_dim"), ("zeros",), "bias")
            self.out_bias = weight((D,), ("embed",), ("zeros",), "bias")

    def project(self, x_BxTxD: jax.Array, positions_BxT: jax.Array, ctx: Context):
        """Returns queries [B, T, H, E], keys and values [B, T, K, E], rotated where the family does."""
        spec = "btd,dhe->bthe"
        q, k, v = (product(spec, x_BxTxD, w) for w in (self.query, self.key, self.value))
        if self.biased:
            q, k, v = shifted(q, self.query_bias), shifted(k, self.key_bias), shifted(v, self.value_bias)
        q = ctx.shard(q, ("batch", "sequence", "heads", "head_dim"), "query")
        k = ctx.shard(k, ("batch", "sequence", "kv_heads", "head_dim"), "key")
        v = ctx.shard(v, ("batch", "sequence", "kv_heads", "head_dim"), "value")
        if self.arch.family == "llama":
            q = rope(q, positions_BxT, self.arch)
            with jax.named_scope(KV_HEADS):
                k = rope(k, positions_BxT, self.arch)
        return q, k, v

    def spread(self, k_BxUxKxE: jax.Array, v_BxUxKxE: jax.Array, ctx: Context) -> tuple[jax.Array, jax.Array]:
        """Keys and values as attention takes them: repeated to one a query head where they are not split with them."""
        if ctx.split_kv:
            return k_BxUxKxE, v_BxUxKxE
        # Each device holds all kv heads and only its query heads: give every query head its own copy.
        each = self.arch.n_heads // self.arch.n_kv_heads
        copies = repeat_heads if ctx.mixed_kv else partial(jnp.repeat, axis=2)
        repeat = lambda a: ctx.shard(copies(a, each), ("batch", "sequence", "heads", "head_dim"))
        with jax.named_scope(KV_HEADS):
            return repeat(k_BxUxKxE), repeat(v_BxUxKxE)

    def merge(self, y_BxTxHxE: jax.Array, ctx: Context) -> jax.Array:
        """Output projection; heads are summed over."""
        y_BxTxHxE = ctx.shard(y_BxTxHxE, ("batch", "sequence", "heads", "head_dim"), "attention")
        y = product("bthe,hed->btd", y_BxTxHxE, self.out)
        return shifted(y, self.out_bias) if self.biased else y

    def __call__(self, x_BxTxD: jax.Array, info: TokenInfo, ctx: Context) -> jax.Array:
        q, k, v = self.project(x_BxTxD, info.positions, ctx)
        return self.merge(attend(q, *self.spread(k, v, ctx), info.segments, ctx), ctx)

    def recalling(self, x_BxTxD: jax.Array, info: TokenInfo, recall: Recall, ctx: Context) -> tuple[jax.Array, Any]:
        """Attention over what `recall` remembers; returns it with the memory."""
        q, k, v = self.project(x_BxTxD, info.positions, ctx)
        k, v, mask_BxTxU, memory = recall(k, v)
        return self.merge(attend_masked(q, *self.spread(k, v, ctx), mask_BxTxU), ctx), memory


class MLP(nnx.Module):
    """GELU (gpt2, tanh form) or SwiGLU (llama; Shazeer 2020) feed-forward layer."""

    def __init__(self, arch: Architecture):
        D, F = arch.d_model, arch.d_ff
        self.gated = arch.family == "llama"
        normal, out = ("normal", arch.init_std), ("normal", arch.init_std / (2 * arch.n_layers) ** 0.5)
        self.up = weight((D, F), ("embed", "mlp"), normal, "matrix")
        if self.gated:
            self.gate = weight((D, F), ("embed", "mlp"), normal, "matrix")
        else:
            self.up_bias = weight((F,), ("mlp",), ("zeros",), "bias")
            self.down_bias = weight((D,), ("embed",), ("zeros",), "bias")
        self.down = weight((F, D), ("mlp", "embed"), out, "matrix")

    def __call__(self, x_BxTxD: jax.Array, ctx: Context) -> jax.Array:
        axes = ("batch", "sequence", "mlp")
        up = product("btd,df->btf", x_BxTxD, self.up)
        if self.gated:
            up = ctx.shard(up, axes, "mlp_up")
            gate = ctx.shard(product("btd,df->btf", x_BxTxD, self.gate), axes, "mlp_gate")
            hidden = jax.nn.silu(gate) * up
        else:
            hidden = jax.nn.gelu(ctx.shard(shifted(up, self.up_bias), axes, "mlp_up"))
        y = product("btf,fd->btd", ctx.shard(hidden, axes, "mlp_hidden"), self.down)
        return y if self.gated else shifted(y, self.down_bias)


class Block(nnx.Module):
    """One pre-norm transformer block."""

    def __init__(self, arch: Architecture):
        self.norm1, self.attention = Norm(arch), Attention(arch)
        self.norm2, self.mlp = Norm(arch), MLP(arch)

    def __call__(self, x_BxTxD: jax.Array, info: TokenInfo, layer: jax.Array, ctx: Context) -> jax.Array:
        """Args: residual stream [B, T, D]; its token info; number of the layer (for dropout); how to run."""
        with jax.named_scope("attention"):
            y = self.attention(self.normed(self.norm1, x_BxTxD, ctx), info, ctx)
            x_BxTxD = self.add(x_BxTxD, y, "attention_out", info, 2 * layer + 1, ctx)
        return self.feed_forward(x_BxTxD, info, layer, ctx)

    def recalling(self, x_BxTxD: jax.Array, info: TokenInfo, recall: Recall, ctx: Context) -> tuple[jax.Array, Any]:
        """The same without dropout, with attention over what `recall` remembers; also returns the memory."""
        with jax.named_scope("attention"):
            y, memory = self.attention.recalling(self.normed(self.norm1, x_BxTxD, ctx), info, recall, ctx)
            x_BxTxD = self.add(x_BxTxD, y, "attention_out", info, 0, ctx)
        return self.feed_forward(x_BxTxD, info, 0, ctx), memory

    @jax.named_scope("mlp")
    def feed_forward(self, x_BxTxD: jax.Array, info: TokenInfo, layer: jax.Array | int, ctx: Context) -> jax.Array:
        """The block's second half."""
        y = self.mlp(self.normed(self.norm2, x_BxTxD, ctx), ctx)
        return self.add(x_BxTxD, y, "mlp_out", info, 2 * layer + 2, ctx)

    def normed(self, norm: Norm, x_BxTxD: jax.Array, ctx: Context) -> jax.Array:
        """The input of a branch: normed, and whole in sequence."""
        # In the stream's layout first, so that what is gathered is the result, in its narrower type.
        y = ctx.shard(norm(x_BxTxD), ("batch", "residual_sequence", "embed"))
        return ctx.shard(y, ("batch", "sequence", "embed"), "norm")

    def add(self, x_BxTxD, y_BxTxD, name: str, info: TokenInfo, site: jax.Array | int, ctx: Context) -> jax.Array:
        """x + dropout(y), with y and the stream in the stream's own layout."""
        stream = ("batch", "residual_sequence", "embed")
        # Both of the branch's last products need the gradient whole in sequence: gathered here, not once for each.
        y = whole_gradient(ctx.shard, ("batch", "sequence", "embed"), y_BxTxD)
        y = ctx.shard(y, stream, name)
        return ctx.shard(x_BxTxD + dropout(y, ctx.dropout, info.keys, site), stream, "residual")
