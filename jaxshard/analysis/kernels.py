"""Seconds of the work of one microbatch on one device: a block, the embedding, the head.

Matmuls by a roofline with an efficiency that depends on their shape, element-wise kernels by their bytes, attention by
its implementation, model-axis collectives by their payload.

Legend: D model width, F hidden width, H heads, K key/value heads, Dh head width, L layers, T sequence, V vocabulary,
S stages, b sequences of a microbatch on one device, n = b T tokens. Sizes may be numpy arrays.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from jaxshard.analysis.efficiency import MATRIX_UNITS, Constants, Kernels, MatrixUnits, Software
from jaxshard.analysis.links import Fabric, all_reduce, fabric, group
from jaxshard.errors import InputError
from jaxshard.models.presets import Architecture
from jaxshard.parallel.resolve import kv_heads_of_a_device
from jaxshard.xla.hardware import Target

Number = Any
"""int, float or numpy array."""


@dataclass(frozen=True)
class Machine:
    """A target as the time model sees it."""

    flops: float
    """Peak of a 16-bit matmul, FLOP/s."""
    bandwidth: float
    """Device memory, bytes a second."""
    host: float
    """Device to host memory, bytes a second, one direction."""
    matrix: MatrixUnits
    net: Fabric


def machine(target: Target) -> Machine:
    """Figures of a target. Raises InputError for chips whose matrix units are not in the table (a CPU)."""
    chip = target.chip
    if chip.name not in MATRIX_UNITS:
        raise InputError(
            f"target {target.name!r}: no step time can be predicted for {chip.name!r}, whose speed depends on the "
            f"machine; targets with a prediction: {', '.join(MATRIX_UNITS)}"
        )
    units = MATRIX_UNITS[chip.name]
    return Machine(chip.bf16_flops, chip.memory_bandwidth, chip.host_bandwidth, units, fabric(target))


@dataclass(frozen=True)
class Work:
    """Seconds of some work on one device by kind, and the seconds in which the host launches it."""

    matmul: Number = 0.0
    attention: Number = 0.0
    elementwise: Number = 0.0
    model_comm: Number = 0.0
    idle: Number = 0.0
    """The device waits for the host."""
    host: Number = 0.0
    """Of launching; becomes `idle` when the work is `settled`."""

    def __add__(self, other: "Work") -> "Work":
        return Work(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Work)))

    def __mul__(self, times: Number) -> "Work":
        return Work(*(getattr(self, f.name) * times for f in fields(Work)))

    @property
    def compute(self) -> Number:
        return self.matmul + self.attention + self.elementwise

    @property
    def device(self) -> Number:
        return self.compute + self.model_comm + self.idle

    def settled(self) -> "Work":
        """Host and device run side by side: the device waits only where launching takes longer than computing in all.

        Collectives hide no launching: in the measured rows they come on top of it.
        """
        return replace(self, idle=self.idle + np.maximum(0.0, self.host - self.compute), host=0.0)


@dataclass(frozen=True)
class Rates:
    """Seconds of single kernels, given sizes."""

    hw: Machine
    c: Constants
    software: Software
    width: Number
    """Bytes of a number in matmuls: 2, or 4 in fp32, which runs at half the peak (TF32)."""

    @property
    def gap(self) -> float:
        """Seconds added to every kernel."""
        return self.c.kernel_gap if self.software.kernel_gap is None else self.software.kernel_gap

    @property
    def memory(self) -> float:
        """Bytes a second that streaming kernels reach."""
        return self.hw.bandwidth * (self.c.memory if self.software.memory is None else self.software.memory)

    @property
    def peak(self) -> Number:
        """FLOP/s of the datasheet."""
        return self.hw.flops * 2 / self.width

    @property
    def best(self) -> Number:
        """FLOP/s of the best matmul."""
        return self.peak * self.hw.matrix.best

    def matmul(self, m: Number, k: Number, n: Number, batch: Number = 1) -> Number:
        """`batch` times [m, k] x [k, n]: the longer of arithmetic and memory traffic.

        The result is computed in tiles, `units` of them at a time: what sticks out of the last tiles is lost, and
        on average half a round of tiles at the end. Sizes that are no multiples of 8, 4, 2 slow loads down step by
        step where nothing pads them.
        """
        unit = self.hw.matrix
        tiles = batch * np.ceil(m / unit.tile) * np.ceil(n / unit.tile)
        share = (batch * m * n / unit.tile**2) / (tiles + unit.units / 2)
        if not self.software.pads_matmuls:
            steps = sum((np.mod(m, size) != 0) | (np.mod(k, size) != 0) | (np.mod(n, size) != 0) for size in (8, 4, 2))
            share = np.minimum(share, self.c.misaligned ** (steps / 3))
        traffic = self.width * batch * (m * k + k * n + m * n) / self.memory
        return np.maximum(2 * batch * m * k * n / (self.best * share), traffic) + self.gap

    def gradients(self, m: Number, k: Number, n: Number) -> Number:
        """Of both operands of [m, k] x [k, n]."""
        return self.matmul(m, n, k) + self.matmul(k, m, n)

    def stream(self, traffic: tuple[float, ...], elements: Number) -> Number:
        """Kernels that pass over `elements`, each moving so many bytes per element (of 16-bit types)."""
        return elements * sum(traffic) * (self.width / 2) / self.memory + len(traffic) * self.gap

    def attention(self, heads: Number, t: Number, depth: Number, backward: bool) -> Number:
        """Products with the [T, T] scores of `heads` heads: two forward, four backward.

        Fused attention computes half of the scores (causal) and recomputes them backward: a fifth product
        (FlashAttention-2, Dao 2023, section 4.1). Otherwise whole scores go through memory.
        """
        if self.software.attention == "flash":
            flops = heads * t * t * depth * (5 if backward else 2)
            filled = np.minimum(1, depth / self.hw.matrix.tile) if self.hw.matrix.systolic else 1.0
            return flops / (self.peak * self.c.flash * filled) + self.gap
        scores, values = self.matmul(t, depth, t, heads), self.matmul(t, t, depth, heads)
        return scores + 3 * values if backward else scores + values


def block(arch: Architecture, layout: Any, rates: Rates, seq_len: Number) -> tuple[Work, Work]:
    """Forward and backward work of one block for one microbatch [b, T, D]; `layout` is a cost.Parallelism."""
    tp, n = layout.model, layout.sequences * seq_len
    D, F = arch.d_model, arch.d_ff / tp
    heads, depth = arch.n_heads / tp, arch.head_dim
    values = heads * depth
    gated = arch.family == "llama"
    qkv = values + 2 * kv_heads_of_a_device(arch, tp) * depth
    products = [(n, D, qkv), (n, values, D), *[(n, D, F)] * (2 if gated else 1), (n, F, D)]
    wide = n * D / np.where(layout.sequence_parallel, tp, 1)
    hidden = n * F * (1.5 if gated else 1)
    scores = layout.sequences * heads * seq_len * seq_len
    comm = reductions(arch, layout, rates, n, 2)
    long = np.where(np.asarray(seq_len) > 1024, rates.c.long_rows, 1.0) if rates.software.eager else 1.0

    def one(kernels: Kernels, matmuls: Number, launches: int, backward: bool) -> Work:
        """Work of one direction: `matmuls` in seconds, `launches` of them and of attention."""
        streams = (
            rates.stream(kernels.wide, wide)
            + rates.stream(kernels.hidden, hidden)
            + rates.stream(kernels.heads, n * values)
        )
        attention = rates.attention(layout.sequences * heads, seq_len, depth, backward)
        count = launches + kernels.count
        if rates.software.attention == "unfused":
            split = np.mod(layout.sequences * heads, rates.software.softmax_heads) != 0
            attention = attention + rates.stream(kernels.scores, scores) * long
            attention = attention + np.where(split, rates.stream(kernels.split_softmax, scores), 0.0)
            count = count + len(kernels.scores) + np.where(split, len(kernels.split_softmax), 0)
        each = rates.c.engine if backward else rates.c.dispatch
        return Work(matmuls, attention, streams, comm, host=count * each if rates.software.eager else 0.0)

    total = lambda cost: sum(cost(*shape) for shape in products)
    forward = one(rates.software.forward, total(rates.matmul), len(products) + 2, False)
    backward = one(rates.software.backward, total(rates.gradients), 2 * len(products) + 4, True)
    return forward, backward


def ends(arch: Architecture, layout: Any, rates: Rates, seq_len: Number) -> tuple[Work, Work]:
    """Work of one microbatch outside the blocks, forward and backward: (embedding, head with the loss).

    Before and after the blocks of a microbatch the device of an eager framework waits for each launch.
    """
    tp, n = layout.model, layout.sequences * seq_len
    split = layout.stage if rates.software.head_on_all_stages else 1
    D, V = arch.d_model, arch.vocab_size / (tp * split)
    head = rates.matmul(n, D, V) + rates.gradients(n, D, V)
    loss = rates.stream((rates.software.logit_bytes,), n * V)
    comm = reductions(arch, layout, rates, n, 1)
    if rates.software.head_on_all_stages:  # sums over the vocabulary reach over the stages too
        net = rates.hw.net
        across = group(net, layout.stage, tp * layout.data)
        comm = comm + all_reduce(across, rates.width * n * D, net, rates.c, rates.software)
    lookup = rates.stream(rates.software.embedding, n * D) + 2 * V * D / rates.memory
    idle = rates.software.end_kernels * rates.c.dispatch
    return Work(elementwise=lookup, model_comm=comm), Work(matmul=head, elementwise=loss, model_comm=comm, idle=idle)


def reductions(arch: Architecture, layout: Any, rates: Rates, n: Number, times: int) -> Number:
    """Seconds of `times` reductions of [n, D] over the model axis.

    With sequence parallelism each is a reduce-scatter and an all-gather (Korthikanti et al. 2022): the same bytes.
    """
    net = rates.hw.net
    payload = rates.width * n * arch.d_model
    return times * all_reduce(group(net, layout.model, 1), payload, net, rates.c, rates.software)
