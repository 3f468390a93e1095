"""Step time of a layout in closed form, from shapes alone: no devices, no compiler, microseconds per layout.

The step is cut into parts that add up to its time; docs/time-model.md explains each. Every size may be a number or a
numpy array, so one call predicts a whole search (`stack`).

Legend: D model width, L layers, T sequence, V vocabulary, S stages, b sequences of a microbatch on one device.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from jaxshard.analysis.dropping import dropped
from jaxshard.analysis.efficiency import XLA, Constants, Software
from jaxshard.analysis.kernels import Machine, Rates, Work, block, ends
from jaxshard.analysis.links import all_reduce, group, reduce_scatter, send
from jaxshard.models.presets import Architecture
from jaxshard.parallel.resolve import kv_heads_of_a_device

Number = Any
"""int, float or numpy array."""


@dataclass(frozen=True)
class Parallelism:
    """How a step is cut. Numbers, or arrays with an entry per layout (`stack`)."""

    replica: Number = 1
    stage: Number = 1
    data: Number = 1
    model: Number = 1
    zero: Number = 0
    sequences: Number = 1
    """Sequences of one microbatch in one data group (b)."""
    microbatches: Number = 1
    """Microbatches of one pass through the pipeline; 1 without stages."""
    accumulation: Number = 1
    """Passes whose gradients are added up before the update."""
    schedule: Any = "1f1b"
    """gpipe, 1f1b (the same time) or interleaved."""
    virtual_stages: Number = 1
    """Chunks of layers per stage of the interleaved schedule."""
    remat: Any = "none"
    """none, dots, full or offload."""
    sequence_parallel: Any = False
    offload: Any = False
    """Moments and masters in host memory."""
    precision: Any = "bf16"
    banded: Number = 0.0
    """Pairs that attention in bands of queries computes beyond the causal ones, as a share of those."""

    @property
    def devices(self) -> Number:
        return self.replica * self.stage * self.data * self.model

    @property
    def rounds(self) -> Number:
        """Microbatches that one device sees in a step."""
        return self.microbatches * self.accumulation

    @property
    def global_batch(self) -> Number:
        """Sequences of a step."""
        return self.replica * self.data * self.sequences * self.rounds


def stack(layouts: Sequence[Parallelism]) -> Parallelism:
    """One Parallelism of arrays, an entry per layout."""
    return Parallelism(*(np.array([getattr(x, f.name) for x in layouts]) for f in fields(Parallelism)))


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step on one device, in parts that add up to `total`."""

    matmul: Number
    attention: Number
    elementwise: Number
    """Norms, activations, residual sums, loss, and adding up gradients."""
    idle: Number
    """The device waits for the host to launch kernels (eager frameworks)."""
    model_comm: Number
    """Collectives over the model axis."""
    data_comm: Number
    """Collectives over data and replica that nothing hides."""
    sends: Number
    """Between pipeline stages."""
    bubble: Number
    """Stages without work while the pipeline fills and drains."""
    optimizer: Number
    offload: Number
    """Transfers to and from host memory that nothing hides."""
    data_comm_hidden: Number
    """Collectives over data and replica behind computation; not part of the total."""

    @property
    def total(self) -> Number:
        return sum(getattr(self, f.name) for f in fields(self) if f.name != "data_comm_hidden")


def step_time(
    arch: Architecture,
    layout: Parallelism,
    hw: Machine,
    seq_len: Number,
    software: Software = XLA,
    constants: Constants | None = None,
) -> StepTime:
    """Predicts one step.

    Args:
        arch: the model; sizes may be arrays.
        layout: one layout, or `stack`ed ones.
        hw: `kernels.machine` of a target.
        seq_len: T, tokens of a sequence.
        software: what runs the step.
        constants: efficiencies; by default the fitted ones.
    """
    c = constants or Constants()
    rates = Rates(hw, c, software, np.where(np.asarray(layout.precision) == "fp32", 4, 2))
    drops = dropped(arch, layout, rates, seq_len)
    forward, backward = (
        replace(work, attention=work.attention * (1 + layout.banded)) + more
        for work, more in zip(block(arch, layout, rates, seq_len), drops, strict=True)
    )
    again = _recomputed(forward, layout, software)
    held = parameters(arch, layout, seq_len, software)
    per_stage = arch.n_layers / layout.stage
    added = Work(elementwise=_accumulate(held, per_stage, layout, rates) + _stacking(arch, layout, rates))
    passes = forward.settled() + (again + backward).settled()  # the host does not run ahead from one to the next
    blocks = passes * per_stage + added
    worst, filling, sends = _pipeline(arch, layout, rates, blocks, seq_len)
    exposed, hidden = _data_comm(arch, layout, rates, held, forward * per_stage, (backward + again) * per_stage)
    optimizer, transfers = _update(held, layout, rates)
    stored = _offloaded_activations(arch, layout, rates, seq_len, blocks.compute)
    rounds = layout.rounds
    return StepTime(
        matmul=rounds * worst.matmul,
        attention=rounds * worst.attention,
        elementwise=rounds * worst.elementwise,
        idle=rounds * worst.idle,
        model_comm=rounds * worst.model_comm,
        data_comm=exposed,
        sends=rounds * sends,
        bubble=layout.accumulation * filling,
        optimizer=optimizer,
        offload=transfers + rounds * stored,
        data_comm_hidden=hidden,
    )


def parameters(arch: Architecture, layout: Parallelism, seq_len: Number, software: Software) -> Number:
    """Matrix parameters that the fullest device computes with (after a gather, under ZeRO-3)."""
    blocks = _block_parameters(arch, layout)
    table = arch.vocab_size * arch.d_model / layout.model
    positions = 0 if arch.family == "llama" else seq_len * arch.d_model
    tables = np.where(arch.tie_embeddings, 1, 2)
    if software.head_on_all_stages:
        return blocks + tables * table / layout.stage + positions
    return blocks + np.where(np.asarray(layout.stage) > 1, 1, tables) * table + positions


def _block_parameters(arch: Architecture, layout: Parallelism) -> Number:
    """Matrix parameters of the blocks of one stage and model shard."""
    D, matrices = arch.d_model, 3 if arch.family == "llama" else 2
    heads = 2 * arch.n_heads / layout.model + 2 * kv_heads_of_a_device(arch, layout.model)
    return arch.n_layers / layout.stage * D * (arch.head_dim * heads + matrices * arch.d_ff / layout.model)


def _recomputed(forward: Work, layout: Parallelism, software: Software) -> Work:
    """Forward work of a block that the backward pass repeats.

    full: all of it, with the reductions that it needs. dots and offload: what lies between the matmuls; fused attention
    counts as no matmul. A pipeline that recomputes stages runs one more forward of everything.
    """
    remat = np.asarray(layout.remat)
    full = (remat == "full") * 1.0
    between = ((remat == "dots") | (remat == "offload")) * 1.0
    flash = software.attention == "flash"
    reductions = software.recomputed_reductions / 2
    whole = full + (np.asarray(layout.stage) > 1) * (1.0 if software.pipeline_recomputes else 0.0)
    return Work(
        matmul=forward.matmul * whole,
        attention=forward.attention * (whole + (between if flash else 0)),
        elementwise=forward.elementwise * (whole + between),
        model_comm=forward.model_comm * whole * reductions,
        host=forward.host * (whole + between),
    )


def _accumulate(held: Number, per_stage: Number, layout: Parallelism, rates: Rates) -> Number:
    """Seconds to add one microbatch's gradients to the sum: twelve weights a block, all their bytes."""
    shard = np.where(np.asarray(layout.zero) >= 2, layout.data, 1)
    traffic = rates.software.accumulation_bytes * held / shard / rates.memory
    return np.where(np.asarray(layout.rounds) > 1, traffic + 12 * per_stage * rates.gap, 0.0)


def _stacking(arch: Architecture, layout: Parallelism, rates: Rates) -> Number:
    """Seconds per microbatch to copy each layer's weights out of the stacked arrays, and its gradients into them.

    A loop over layers copies the weights once in every pass that computes with them. Under ZeRO a gather writes the
    same bytes, and a reduce-scatter reads them.
    """
    if not rates.software.stacked:
        return 0.0
    staged = (np.asarray(layout.stage) > 1) & rates.software.pipeline_recomputes
    passes = 2 + (np.asarray(layout.remat) == "full") + staged
    copied = 2 * (rates.width * passes + rates.software.gradient_width)
    return copied * _block_parameters(arch, layout) / rates.memory


def _pipeline(
    arch: Architecture, layout: Parallelism, rates: Rates, blocks: Work, seq_len: Number
) -> tuple[Work, Number, Number]:
    """Returns (one microbatch on the slowest stage, seconds of filling and draining per pass, seconds of sends).

    A stage works on M microbatches one after another; before and after, the others' one microbatch passes by:
    sum of all stages minus the slowest, cut by the chunks per stage (Narayanan et al. 2021, section 2.2). With equal
    stages of time t: (S - 1) t / chunks.
    """
    S, chunks = np.asarray(layout.stage), layout.virtual_stages
    embedding, head = ends(arch, layout, rates, seq_len)
    if rates.software.head_on_all_stages:
        first = last = middle = blocks + embedding + head
    else:
        alone = np.where(S == 1, 1.0, 0.0)
        first, last, middle = blocks + embedding + head * alone, blocks + head + embedding * alone, blocks
    slow_end = last.device > first.device
    worst = Work(*(np.where(slow_end, getattr(last, f.name), getattr(first, f.name)) for f in fields(Work)))
    stages = np.where(S > 1, first.device + last.device + np.maximum(S - 2, 0) * middle.device, worst.device)
    payload = rates.width * layout.sequences * seq_len * arch.d_model
    split = rates.software.sends_split | np.asarray(layout.sequence_parallel)
    crosses = layout.model * layout.data * S > rates.hw.net.node
    one = send(payload / np.where(split, layout.model, 1), crosses, rates.hw.net, rates.c, rates.software)
    sends = np.where(S > 1, 2 * one, 0.0)
    filling = (stages - worst.device) / chunks + (S - 1) * sends
    return worst, filling, sends * chunks


def _data_comm(
    arch: Architecture, layout: Parallelism, rates: Rates, held: Number, forward: Work, backward: Work
) -> tuple[Number, Number]:
    """Seconds of gradient and parameter collectives over data and replica: (exposed, hidden).

    ZeRO 0 and 1: once per step an all-reduce, or a reduce-scatter and a gather of the updated parameters. ZeRO 2:
    reduce-scatter per microbatch. ZeRO 3: also two gathers per microbatch (Rajbhandari et al. 2020, section 7).
    A pipeline does this in every tick, also in those in which this stage has no microbatch, and gathers once more for
    the stage that its backward half recomputes. Over replicas the shards are all-reduced once.

    Hidden is at most `overlap` of the passes beside which they run, and never one block's share; what is summed over
    microbatches first (ZeRO 0 and 1) runs when all passes are over, and nothing hides it. On a GPU the hidden part
    still slows the computation beside it, by the share `borrowed`.
    """
    net, c, software = rates.hw.net, rates.c, rates.software
    S, tp, dp, zero = layout.stage, layout.model, layout.data, np.asarray(layout.zero)
    rounds = np.asarray(layout.rounds)
    data, replica = group(net, dp, tp), group(net, layout.replica, S * dp * tp)
    gradients, values = software.gradient_width * held, rates.width * held
    scatter = reduce_scatter(data, gradients, net, c, software)
    gather = reduce_scatter(data, values, net, c, software)
    across = all_reduce(replica, gradients / dp, net, c, software)
    once = np.where(zero == 0, all_reduce(data, gradients, net, c, software), scatter + gather)
    times, gathers = _passes(layout), np.where(np.asarray(S) > 1, 3, 2)
    total = np.select([zero == 3, zero == 2], [times * (scatter + gathers * gather), times * scatter + gather], once)
    window = np.select(
        [zero == 3, zero == 2], [rounds * (forward.compute + backward.compute), rounds * backward.compute],
        np.where(rounds == 1, backward.compute, 0.0),
    )  # fmt: skip
    hidden = np.minimum(total * (1 - 1 / arch.n_layers), software.overlap * window)
    borrowed = 0.0 if rates.hw.matrix.systolic else c.borrowed
    exposed = total - hidden * (1 - borrowed) + across
    if not software.head_on_all_stages:  # the two uses of a tied table lie on different stages
        table = software.gradient_width * arch.vocab_size * arch.d_model / tp
        ends = group(net, np.where(np.asarray(S) > 1, 2, 1), (S - 1) * dp * tp)
        exposed = exposed + np.where(arch.tie_embeddings, all_reduce(ends, table, net, c, software), 0.0)
    return exposed, hidden


def _passes(layout: Parallelism) -> Number:
    """Times in a step that a stage's weights are used: M + (S - 1) / chunks ticks of a stage in a pipeline."""
    filling = np.where(np.asarray(layout.stage) > 1, (layout.stage - 1) / layout.virtual_stages, 0)
    return layout.accumulation * (layout.microbatches + filling)


def _update(held: Number, layout: Parallelism, rates: Rates) -> tuple[Number, Number]:
    """Seconds of (the optimizer's update, its transfers when moments and masters lie in host memory).

    Offloaded state is streamed through the device, 12 bytes per parameter in and as many out at the same time.
    """
    own = held / np.where(np.asarray(layout.zero) >= 1, layout.data, 1)
    transfers = np.where(layout.offload, 12 * own / max(rates.hw.host, 1.0), 0.0)
    return rates.software.optimizer_bytes * own / rates.memory, transfers


def _offloaded_activations(
    arch: Architecture, layout: Parallelism, rates: Rates, seq_len: Number, compute: Number
) -> Number:
    """Seconds per microbatch by which moving matmul outputs to host memory and back outlasts the computation."""
    n, tp = layout.sequences * seq_len, layout.model
    qkv = arch.head_dim * (arch.n_heads / tp + 2 * kv_heads_of_a_device(arch, tp))
    outputs = qkv + 2 * arch.d_model + (2 if arch.family == "llama" else 1) * arch.d_ff / tp
    moved = 2 * rates.width * n * outputs * arch.n_layers / layout.stage / max(rates.hw.host, 1.0)
    return np.where(np.asarray(layout.remat) == "offload", np.maximum(0.0, moved - compute), 0.0)
