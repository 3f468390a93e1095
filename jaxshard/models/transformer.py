"""The decoder language model as pure functions over nested dicts of arrays.

`describe` turns the modules of `layers` into a table of weights; `initialise` draws them; `hidden` runs them.
The blocks are stacked: every block weight has a leading "layers" dim, and the network is one scan over it.
"""

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxshard.models.layers import Block, Context, Norm, TokenInfo, dropout, weight
from jaxshard.models.lookup import LookupSpec, lookup
from jaxshard.models.presets import Architecture
from jaxshard.models.products import whole_gradient


@dataclass(frozen=True)
class WeightRow:
    """One weight: whole shape (vocabulary padded), logical axes, initialiser, role, and rows that are not padding."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: tuple
    role: str
    rows: int


class Slotted(NamedTuple):
    """A weight and the slot that receives its gradient (None when no gradient is wanted).

    The slot is zeros in the gradient's type and is never read: it lets a 16-bit weight have an fp32 gradient.
    """

    value: jax.Array
    slot: jax.Array | None


def slotted(params: Any, slots: Any = None) -> Any:
    """Pairs every weight with its slot."""
    if slots is None:
        return jax.tree.map(lambda value: Slotted(value, None), params)
    return jax.tree.map(Slotted, params, slots)


def is_slotted(x: Any) -> bool:
    return isinstance(x, Slotted)


class Embedding(nnx.Module):
    """Token embedding, and learned positions in the gpt2 family."""

    def __init__(self, arch: Architecture, vocab: int):
        D, normal = arch.d_model, ("normal", arch.init_std)
        self.tokens = weight((vocab, D), ("vocab", "embed"), normal, "embedding")
        if arch.family == "gpt2":
            self.positions = weight((arch.max_seq_len, D), (None, "embed"), normal, "embedding")


class Head(nnx.Module):
    """Final norm and, unless tied to the embedding, the output matrix [V, D]."""

    def __init__(self, arch: Architecture, vocab: int):
        self.norm = Norm(arch)
        if not arch.tie_embeddings:
            self.out = weight((vocab, arch.d_model), ("vocab", "embed"), ("normal", arch.init_std), "embedding")


Lift = Callable[[str, Any], Any]
"""(group, tree of Slotted) -> tree of arrays ready for use. Groups: embedding, blocks (one layer), head."""


def dealt_order(layers: int, dealt: Sequence[int]) -> np.ndarray:
    """[L] natural number of the layer at each place, where (stages, chunks) are dealt as `Model.dealt` says."""
    stages, chunks = dealt
    return np.arange(layers).reshape(chunks, stages, -1).swapaxes(0, 1).ravel()


@dataclass(frozen=True)
class Model:
    """A model: its architecture, its table of weights, and the functions that run it.

    `weights` is a nested dict of `WeightRow` in the shape of the parameters.
    """

    arch: Architecture
    vocab: int
    """Rows of the embedding: the vocabulary, padded."""
    weights: dict[str, Any]
    graphs: dict[str, Any]
    dealt: tuple[int, int] = (1, 1)
    """(stages, chunks): layers are cut into chunks x stages pieces, dealt out to the stages round robin, and stored
    stage by stage. With one chunk that is the natural order."""

    @property
    def layer_order(self) -> np.ndarray:
        """[L] natural number of the layer at each place of the stack."""
        return dealt_order(self.arch.n_layers, self.dealt)

    @property
    def layer_places(self) -> np.ndarray:
        """[L] place in the stack of every layer; `a[model.layer_places]` brings a stack into its natural order."""
        return np.argsort(self.layer_order)

    def module(self, group: str, arrays: Any) -> Any:
        """Binds arrays to the module of a group: embedding, blocks (one layer of it) or head."""
        return nnx.merge(self.graphs[group], arrays)

    def initialise(self, seed: int, dtype: Any = jnp.float32) -> dict[str, Any]:
        """Draws the parameters: a pure function of seed, path, layer and position, whatever the layout or padding."""
        root = jax.random.key(seed, impl="threefry2x32")
        draw = lambda path, row: _draw(
            jax.random.fold_in(root, zlib.crc32(jax.tree_util.keystr(path).encode())), row, dtype, self.dealt
        )
        return jax.tree_util.tree_map_with_path(draw, self.weights, is_leaf=lambda x: isinstance(x, WeightRow))

    @jax.named_scope("embedding")
    def embed(self, embedding: Any, tokens_BxT: jax.Array, info: TokenInfo, ctx: Context) -> jax.Array:
        """Looks tokens (and learned positions) up; returns the residual stream [B, T, D] in the compute type."""
        spec = LookupSpec(ctx.vocab_parts, ctx.groups, ctx.dtype, ctx.shard)
        with jax.named_scope("embedding.tokens"):
            x = lookup(spec, embedding["tokens"], tokens_BxT)
        if "positions" in embedding:
            with jax.named_scope("embedding.positions"):
                x = x + lookup(replace(spec, parts=1), embedding["positions"], info.positions)
            x = whole_gradient(ctx.shard, ("batch", "sequence", "embed"), x)
        x = ctx.shard(x, ("batch", "residual_sequence", "embed"))
        x = dropout(x, ctx.dropout, info.keys, 0)
        return ctx.shard(x, ("batch", "residual_sequence", "embed"), "residual")

    def block(self, arrays: Any, x_BxTxD: jax.Array, info: TokenInfo, layer: jax.Array, ctx: Context) -> jax.Array:
        """Runs one block with the arrays of one layer."""
        return self.module("blocks", arrays)(x_BxTxD, info, layer, ctx)

    def run_blocks(
        self,
        blocks: Any,
        x_BxTxD: jax.Array,
        info: TokenInfo,
        layers_L: jax.Array,
        ctx: Context,
        lift: Lift,
        remat: Callable,
    ) -> jax.Array:
        """Scans over the stacked blocks (a tree of Slotted with leading dim L).

        Args:
            blocks: stacked weights and slots.
            x_BxTxD: residual stream.
            info: token info.
            layers_L: int32 [L], number of every layer.
            ctx: how to run.
            lift: places one layer's weights for use.
            remat: wraps the body of the scan.
        """

        def body(x, row):
            arrays, layer = row
            return self.block(lift("blocks", arrays), x, info, layer, ctx), None

        return jax.lax.scan(remat(body), x_BxTxD, (blocks, layers_L))[0]

    @jax.named_scope("final_norm")
    def final_norm(self, head: Any, x_BxTxD: jax.Array, ctx: Context) -> jax.Array:
        """Final norm; the result is whole in sequence, ready for the vocabulary-parallel head."""
        norm = {"norm": head["norm"]} | ({} if self.arch.tie_embeddings else {"out": head["out"]})
        return ctx.shard(self.module("head", norm).norm(x_BxTxD), ("batch", "sequence", "embed"))


def _draw(key: jax.Array, row: WeightRow, dtype: Any, dealt: tuple[int, int]) -> jax.Array:
    kind, *arguments = row.init
    if kind == "zeros":
        return jnp.zeros(row.shape, dtype)
    if kind == "ones":
        return jnp.ones(row.shape, dtype)
    # Drawn in fp32 for every type. Threefry's bits at an index depend on key and index only, and the padding is at the
    # end of the first dim, so neither the padding nor the sharding changes a value.
    if row.axes[0] == "layers" and dealt[1] > 1:
        stages, chunks = dealt
        natural = (chunks, stages, row.shape[0] // (stages * chunks), *row.shape[1:])
        values = _normal(key, natural, arguments[0]).swapaxes(0, 1).reshape(row.shape)
        return values.astype(dtype)
    values = _normal(key, row.shape, arguments[0])
    if row.rows < row.shape[0]:
        values = jnp.where((jnp.arange(row.shape[0]) < row.rows)[:, None], values, 0)
    return values.astype(dtype)


def _normal(key: jax.Array, shape: tuple[int, ...], std: float) -> jax.Array:
    """fp32 numbers of mean 0 and that spread, normal but for the far tails: sums of 6 uniform ones (Irwin and Hall).

    The sum is one of whole numbers and so exact, and one product is rounded. `jax.random.normal` takes a logarithm, and
    XLA's CPU compiler computes that of a narrow slice by another routine: a last bit would depend on the layout.
    """
    words, top = 3, 2**16

    def add(i, total):
        word = jax.random.bits(jax.random.fold_in(key, i), shape, jnp.uint32)
        return total + (word % top + word // top).astype(jnp.int32)

    total = jax.lax.fori_loop(0, words, add, jnp.full(shape, -words * (top - 1), jnp.int32))
    # The variance of a uniform number of [0, top) is top^2 / 12, and each word has two.
    return total.astype(jnp.float32) * jnp.float32(std / top * math.sqrt(6 / words))


def padded_vocab(vocab_size: int, ways: int) -> int:
    """Rows of the embedding: the vocabulary rounded up to a multiple of 64 and of the devices it is split over.

    64 keeps matmuls aligned, and keeps one size (and so one checkpoint) for every usual mesh.
    """
    multiple = math.lcm(64, ways)
    return -(-vocab_size // multiple) * multiple


def describe(arch: Architecture, vocab_ways: int = 1, dealt: tuple[int, int] = (1, 1)) -> Model:
    """Builds the table of weights from the modules, without allocating anything.

    Args:
        arch: the architecture.
        vocab_ways: devices that the vocabulary is split over; it is padded to a multiple.
        dealt: see `Model`.
    """
    vocab = padded_vocab(arch.vocab_size, vocab_ways)
    modules = {
        "embedding": nnx.eval_shape(lambda: Embedding(arch, vocab)),
        "blocks": nnx.eval_shape(lambda: Block(arch)),
        "head": nnx.eval_shape(lambda: Head(arch, vocab)),
    }
    weights, graphs = {}, {}
    for group, module in modules.items():
        for path, node in nnx.iter_graph(module):
            if isinstance(node, nnx.Param):
                node.set_metadata("path", ".".join((group, *map(str, path))))
        graphs[group], state = nnx.split(module)
        stack = arch.n_layers if group == "blocks" else None
        weights[group] = _rows(nnx.to_pure_dict(state), state, stack, arch.vocab_size, vocab)
    return Model(arch, vocab, weights, graphs, dealt)


def _rows(shapes: Any, state: Any, stack: int | None, vocab_size: int, vocab: int) -> Any:
    if isinstance(shapes, dict):
        return {name: _rows(shapes[name], state[name], stack, vocab_size, vocab) for name in shapes}
    meta = state.get_metadata()
    shape, axes = tuple(shapes.shape), tuple(meta["logical_axes"])
    rows = vocab_size if axes[0] == "vocab" else shape[0]
    if stack is not None:
        return WeightRow((stack, *shape), ("layers", *axes), meta["init"], meta["role"], stack)
    return WeightRow(shape, axes, meta["init"], meta["role"], rows)
