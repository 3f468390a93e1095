"""Device memory of a training step in closed form: no devices, no compiler, well below a millisecond per layout.

State is exact (`state_bytes`). What lives only within a step follows from the code: the names that a
rematerialisation policy keeps (models/layers.py), chunks of logits (training/loss.py), sums of gradients
(training/gradients.py), buffers of a pipeline's table (parallel/schedule.py). The step is a sequence of moments; the
peak is the largest of them:

    loss      saved activations + logits of one chunk + head gradient
    backward  saved activations + gradients of the blocks + head gradient + one block's working set
    update    all gradients, once more where an optimizer reads them in another layout

A pipeline of two stages has phases of one tick, which XLA unrolls on GPUs; it then keeps the zeros that loops over
layers begin with a second time (seen in every such case).

Counts of saved arrays per policy are those of jax's partial evaluation of `Block`; the working sets are what XLA's
buffer assignment holds at its peak (docs/planner-memory.md compares both with the compiler, case by case).

Legend: b sequences of one microbatch on one device, T sequence, D model width, H query heads, K kv heads, E head width,
F hidden width, V vocabulary, L layers, S stages, M microbatches, N = b T tokens. Sizes are those of one device.
"""

import math
from dataclasses import asdict, dataclass, fields
from functools import cache
from typing import Literal

import jax.numpy as jnp

from jaxshard.analysis.state_bytes import (
    StateBytes,
    elements_per_device,
    group_gradients,
    state_bytes,
    table_of,
)
from jaxshard.config import Config
from jaxshard.models.fused_attention import band_size
from jaxshard.models.layers import DOT_NAMES, SAVED_NAMES
from jaxshard.models.presets import Architecture
from jaxshard.models.transformer import padded_vocab
from jaxshard.parallel.axes import ZERO_TABLES, MeshShape
from jaxshard.parallel.precision import POLICIES
from jaxshard.parallel.remat import parse_remat
from jaxshard.parallel.resolve import (
    attention_kernel,
    kv_heads_of_a_device,
    microbatches_of,
    pipeline_schedule,
    zero_stage,
    zero_tables,
)
from jaxshard.parallel.schedule import make
from jaxshard.training.optimizer import rowwise
from jaxshard.training.update import table_turns

Platform = Literal["gpu", "tpu", "cpu"]


@dataclass(frozen=True)
class Memory:
    """Bytes on one device at the peak of a step, by class; `host` is host memory and not part of the total."""

    parameters: int
    gradients: int
    """Sums over microbatches, and those that the backward pass is producing."""
    optimizer: int
    master: int
    activations: int
    """Saved for the backward pass, the working set of one block, and the buffers of a pipeline."""
    logits: int
    """One chunk of them, with their gradient."""
    buffers: int
    """Gathered weights, gradients before their reduction, the batch."""
    host: int
    moment: str
    """Which part of the step the peak falls into: loss, backward or update."""

    @property
    def total(self) -> int:
        return sum(getattr(self, f.name) for f in fields(self) if f.name not in ("host", "moment"))

    def by_class(self) -> dict[str, int]:
        """As `plan --json` prints it."""
        return {name: value for name, value in asdict(self).items() if name != "moment"} | {"total": self.total}

    def largest(self, count: int = 3) -> list[tuple[str, int]]:
        """The classes that take the most, largest first."""
        sizes = {name: value for name, value in self.by_class().items() if name not in ("host", "total")}
        return sorted(sizes.items(), key=lambda item: -item[1])[:count]


@dataclass(frozen=True)
class Local:
    """Sizes of one microbatch on one device, in elements, and widths of a number in bytes."""

    tokens: float
    """N."""
    stream: float
    """Residual stream, N D, split over the sequence with sequence parallelism."""
    wide: float
    """N D."""
    queries: float
    """N H E."""
    keys: float
    """N K E."""
    hidden: float
    """N F."""
    heads: float
    """N H: statistics of attention."""
    scores: float
    """b H T T; 0 where attention is fused."""
    mask: float
    """b C T: documents of packed sequences, of the C queries that fused attention takes at a time."""
    vocab: int
    """V."""
    layers: int
    """Layers whose activations are saved at a time: of one chunk of a stage."""
    width: int
    """Of activations."""
    wide_width: int
    """Of gradients and statistics: 4, or 8 in fp64."""


def estimate(config: Config, arch: Architecture, shape: MeshShape, platform: Platform) -> Memory:
    """Memory of one device during a step.

    Args:
        config: all but its mesh is read. Sizes that do not divide are refused elsewhere (`training.program.check_fit`).
        arch: the model.
        shape: sizes of the mesh axes.
        platform: decides the attention kernel, and which tables an offloaded update cuts.
    """
    state = state_bytes(config, arch, shape)
    saved_slots, received, chunks, microbatches = pipeline_slots(config, shape)
    local = sizes(config, arch, shape, platform, microbatches, chunks)
    kept, to_host = saved_per_layer(config, arch, local)
    ring = (saved_slots + received) * local.stream * local.width
    groups = group_gradients(config, arch, shape)
    several = config.parallel.accumulation * microbatches > 1
    sums = sum(groups.values()) if several else 0
    head = local.vocab * arch.d_model
    head_gradient = head * local.wide_width
    gathers = "parameters" in ZERO_TABLES[zero_stage(config, shape)] and shape.data > 1
    table = head * local.width if gathers or shape.model * shape.stage > 1 else 0
    producing = groups["blocks"] // chunks
    stacks = local.layers * kept + ring
    twice = platform == "gpu" and shape.stage == 2 and microbatches > 1 and chunks == 1
    again = local.layers * kept + producing if twice and config.parallel.schedule != "gpipe" else 0
    logits = logits_bytes(config, local)
    weights, unreduced = block_buffers(config, arch, shape)
    batch = state.batch + state.counters
    # The gradients of both uses of the table. TPUs reduce one into shards from a copy of its own, beside the
    # inputs of all blocks.
    scattered = platform == "tpu" and shape.data > 1 and "gradients" in ZERO_TABLES[zero_tables(config, shape)]
    tables, kept_on = (3, local.layers * local.stream * local.width) if scattered else (2, 0)
    moments = {
        "loss": (sums, stacks + 3 * local.stream * local.width, logits, head_gradient + table),
        "backward": (
            sums + producing,
            stacks + working_set(arch, local, platform),
            0,
            head_gradient + weights + unreduced + again,
        ),
        "embedding": (sums + producing, 2 * local.wide * local.wide_width + kept_on, 0, tables * head_gradient),
        "update": (max(sums, sum(groups.values())) + _relaid(config, shape, groups), 0, 0, 0),
    }
    streamed = _streamed(config, arch, shape, state, platform)
    moments["update"] = (*moments["update"][:3], streamed)
    moment = max(moments, key=lambda name: sum(moments[name]))
    gradients, activations, loss, buffers = (int(x) for x in moments[moment])
    return Memory(
        parameters=state.parameters,
        gradients=gradients,
        optimizer=state.counts if state.offloaded else state.optimizer,
        master=0 if state.offloaded else state.master,
        activations=activations,
        logits=loss,
        buffers=buffers + batch,
        host=state.host + int(local.layers * to_host),
        moment=moment,
    )


def sizes(
    config: Config, arch: Architecture, shape: MeshShape, platform: Platform, microbatches: int, chunks: int
) -> Local:
    """Sizes on one device under tensor, sequence, data and pipeline parallelism."""
    train, T, tp = config.train, config.data.seq_len, shape.model
    policy = POLICIES[train.precision]
    b = train.global_batch / (shape.batch_ways * config.parallel.accumulation * microbatches)
    tokens = b * T
    heads = arch.n_heads // tp
    kv_heads = int(kv_heads_of_a_device(arch, tp))
    width = jnp.dtype(policy.compute).itemsize
    fused = attention_kernel(arch, train.precision, platform) == "cudnn"
    return Local(
        tokens=tokens,
        stream=tokens * arch.d_model / (tp if config.parallel.sequence_parallel else 1),
        wide=tokens * arch.d_model,
        queries=tokens * heads * arch.head_dim,
        keys=tokens * kv_heads * arch.head_dim,
        hidden=tokens * arch.d_ff // tp,
        heads=tokens * heads,
        scores=0 if fused else b * heads * T * T,
        mask=b * band_size(T) * T if fused and config.data.pack else 0,
        vocab=padded_vocab(arch.vocab_size, shape.stage * tp) // (shape.stage * tp),
        layers=arch.n_layers // (shape.stage * chunks),
        width=width,
        wide_width=jnp.dtype(policy.gradients).itemsize,
    )


def pipeline_slots(config: Config, shape: MeshShape) -> tuple[int, int, int, int]:
    """(slots of saved stage inputs, slots of received values, chunks per stage, microbatches); (0, 0, 1, 1) without."""
    if shape.stage == 1:
        return 0, 0, 1, 1
    (name, chunks), count = pipeline_schedule(config.parallel), microbatches_of(config, shape)
    return (*_slots(name, shape.stage, count, chunks), chunks, count)


@cache
def _slots(name: str, stages: int, count: int, chunks: int) -> tuple[int, int]:
    # Beyond a few groups of microbatches a 1F1B table's buffers grow no more, and a GPipe table's are known.
    if name == "gpipe":
        return count, 2
    short = make(name, stages, min(count, 4 * stages + count % stages), chunks)
    return short.saved_slots, short.fwd_slots + short.bwd_slots


def saved_per_layer(config: Config, arch: Architecture, local: Local) -> tuple[float, float]:
    """Bytes that one layer keeps for its backward pass: (on the device, in host memory).

    full keeps the block's input. dots and names:... add the named activations, as far as the backward pass reads
    them: the MLP's output it does not. none keeps what jax's partial evaluation of `Block` keeps: `_everything`.
    """
    kind = parse_remat(config.parallel.remat, SAVED_NAMES)
    stream = local.stream * local.width
    if kind == "full":
        return stream, 0.0
    if kind == "none":
        return _everything(arch, local), 0.0
    named = named_bytes(arch, local)
    if kind == "offload":
        return 0.0, stream + sum(named[name] for name in DOT_NAMES)
    return stream + sum(named[name] for name in (DOT_NAMES if kind == "dots" else kind)), 0.0


def named_bytes(arch: Architecture, local: Local) -> dict[str, float]:
    """Bytes of the named activations of a block that the backward pass reads."""
    gated = arch.family == "llama"
    elements = {
        "residual": local.stream,
        "norm": 2 * local.wide,
        "query": local.queries,
        "key": local.keys,
        "value": local.keys,
        "attention": local.queries,
        "attention_out": local.stream,
        "mlp_gate": local.hidden if gated else 0,
        "mlp_up": local.hidden,
        "mlp_hidden": local.hidden,
        "mlp_out": 0,
    }
    assert elements.keys() == {*SAVED_NAMES}
    return {name: count * local.width for name, count in elements.items()}


def _everything(arch: Architecture, local: Local) -> float:
    """Bytes of a layer under remat none.

    llama: the stream twice before and once inside each norm (wide), both norms' outputs; q, k, v, attention's output;
    six arrays of the MLP's hidden size (gate, up, sigmoid, silu and their products). gpt2: four wide arrays of
    LayerNorm; six of the MLP's hidden size for the tanh form of GELU. Unfused attention also keeps the weights, in fp32
    and in the compute type; fused, one statistic per query, and the rotated queries and keys in fp32. Dropout keeps
    what it drops, a byte each, behind both branches.
    """
    w, g = local.width, local.wide_width
    norms = 4 * g * local.tokens
    if arch.family == "llama":
        stream = 2 * g * local.stream + 2 * w * (local.stream + local.wide)
        rotated = 0 if local.scores else g * (local.queries + local.keys) - w * local.keys
        values = w * (2 * local.queries + 2 * local.keys) + rotated
    else:
        stream = 4 * g * local.stream + 2 * w * local.wide
        values = w * (3 * local.queries + 2 * local.keys) - (w * local.queries if local.scores else 0)
    attention = (g + w) * local.scores + (2 if local.scores else 1) * g * local.heads
    dropped = 2 * local.stream if arch.dropout else 0
    return norms + stream + values + attention + 6 * w * local.hidden + dropped


def working_set(arch: Architecture, local: Local, platform: Platform) -> float:
    """Bytes of the activations of one block while its backward pass runs.

    At the MLP: the hidden layer and its gradients, four arrays with a gate. At attention that is not fused: scores,
    weights and their gradients; TPUs keep one array in fp32 and one in the compute type, GPUs two of each.
    """
    w, g = local.width, local.wide_width
    streams = 3 * w * local.wide
    mlp = (4 if arch.family == "llama" else 3) * w * local.hidden + streams
    scores = (1 if platform == "tpu" else 2) * (g + w) * local.scores + streams
    return max(mlp, scores) + w * local.mask


def logits_bytes(config: Config, local: Local) -> float:
    """Bytes of one chunk's logits: in fp32, and their gradient in the compute type (training/loss.py)."""
    chunk = min(config.parallel.loss_chunk, config.data.seq_len)
    return local.tokens / config.data.seq_len * chunk * local.vocab * (local.wide_width + local.width)


def block_buffers(config: Config, arch: Architecture, shape: MeshShape) -> tuple[float, float]:
    """Bytes of one layer's (gathered weights, whole gradients before they are reduced into shards)."""
    rows = [r for r in table_of(arch, config.optim, config.train.precision).weights if r.group == "blocks"]
    layers = arch.n_layers / shape.stage
    each = [elements_per_device(row, shape=shape, spread=False) / layers for row in rows]
    policy = POLICIES[config.train.precision]
    several = shape.data > 1
    gathered = sum(each) * jnp.dtype(policy.compute).itemsize if several and zero_stage(config, shape) == 3 else 0.0
    sharded = several and "gradients" in ZERO_TABLES[zero_tables(config, shape)]
    return gathered, max(each) * jnp.dtype(policy.gradients).itemsize if sharded else 0.0


def _relaid(config: Config, shape: MeshShape, groups: dict[str, int]) -> float:
    """Bytes of the gradients in the optimizer's layout, beside sums in another (ZeRO-1 over several microbatches)."""
    other = zero_tables(config, shape) == 1 and shape.data > 1
    return sum(groups.values()) / shape.data if other else 0.0


def _streamed(config: Config, arch: Architecture, shape: MeshShape, state: StateBytes, platform: Platform) -> float:
    """Bytes of offloaded masters and moments that are on the device at a time: two layers of them, or of a table."""
    if not state.offloaded or config.parallel.offload_mode == "host":
        return 0.0
    rows = table_of(arch, config.optim, config.train.precision).weights
    spread = zero_stage(config, shape) > 0
    local = lambda row: elements_per_device(row, shape=shape, spread=spread)
    layer = sum(local(row) for row in rows if row.group == "blocks") * shape.stage // arch.n_layers
    table = max(local(row) for row in rows if row.group != "blocks")
    ways = shape.stage * shape.model
    vocab = padded_vocab(arch.vocab_size, ways) // ways
    turns = table_turns(vocab, table // vocab, layer, platform) if rowwise(config.optim) else 1
    return max(2 * layer, table if turns == 1 else 2 * table // turns) * state.host / sum(map(local, rows))


def gib(count: float) -> str:
    """ "22.35 GiB"."""
    return f"{count / 2**30:,.2f} GiB" if count >= 2**29 else f"{math.ceil(count / 2**20):,} MiB"
