"""What hardware and software reach of the datasheet: the constants of the time model, and kernel lists as data.

All figures are global: none belongs to a model, a layout or a measured row. `benchmarks/planner_accuracy.py --fit`
fits those marked "fitted" again; docs/time-model.md says on what, and what error remains.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Constants:
    """Shares of datasheet figures that real kernels reach, and the time that software adds."""

    misaligned: float = 0.43
    """Share of the chip's best matmul (`MATRIX_UNITS`) that a matmul of 16-bit numbers reaches when its rows start at
    multiples of 2 bytes only (a vocabulary of odd size): tensor cores then load number by number. From 16 bytes on
    nothing is lost, and each halving below costs the same factor. Fitted."""
    memory: float = 0.61
    """Share of the memory bandwidth that element-wise kernels and the optimizer of a compiled program reach in effect:
    what published runs on H100 suggest (docs/time-model.md)."""
    dispatch: float = 93e-6
    """Seconds that the host needs to launch one kernel of an eager framework from Python, forward. Fitted."""
    engine: float = 5e-6
    """The same in the backward pass, which autograd's engine launches without Python. Fitted; at its lower bound, which
    is what a launch costs in CUDA itself."""
    long_rows: float = 2.3
    """Times that an eager framework's kernels over attention scores take longer when a row holds more than 1024: its
    fused softmax keeps a row in the registers of one warp, and fewer warps then fit. Fitted."""
    kernel_gap: float = 1e-6
    """Seconds added to every kernel of an eager framework whose host is ahead of the device: the low end of what NVIDIA
    states for kernels that wait in a queue (1 to 3 us)."""
    rendezvous: float = 85e-6
    """Seconds that a collective of an eager framework takes besides moving bytes: its launch, two stream waits and the
    meeting of all members; no launching of other kernels hides it. Fitted; nccl-tests on A100 leave 43 to 108 beside
    the bytes (VIA-Research/vTrain, trace/a100, 2 to 32 MiB, 2 to 8 GPUs)."""
    slow_links: float = 0.9
    """Share of the bandwidth between hosts that collectives reach (InfiniBand: 92 % in perftest, 85 to 92 % in
    published nccl-tests)."""
    fast_links: float = 0.78
    """The same inside a host or slice. Bus bandwidth of large all-reduces on 8 A100: 235 of 300 GB/s
    (NVIDIA/nccl-tests, doc/PERFORMANCE.md and published runs)."""
    flash: float = 0.55
    """Share of the peak of fused attention, forward and backward (FlashAttention-2, Dao 2023, figure 4: 50 to 73 % on
    A100; FlashAttention-3, Shah et al. 2024: up to 75 % on H100). On TPU a head narrower than the matrix unit fills a
    part of it."""
    borrowed: float = 0.15
    """Share of a GPU that collectives hold while they run beside computation (NCCL: up to 16 to 24 thread blocks, one
    multiprocessor each, of 132 on H100). TPUs move data with engines of their own."""
    hop: float = 5e-6
    """Seconds of one step of a ring or tree (NCCL, Simple protocol, tuning tables: 4 to 15 us)."""


@dataclass(frozen=True)
class Kernels:
    """Element-wise kernels of one block: a number each, the bytes read and written per element, in 16-bit types."""

    wide: tuple[float, ...]
    """Over the residual stream [tokens, D]: norms, biases, dropout, residual sums."""
    hidden: tuple[float, ...]
    """Over the hidden layer of the MLP [tokens, F / model]; half as much again with a gate."""
    heads: tuple[float, ...]
    """Over the attention's values [tokens, H Dh / model]: layout changes, rotary positions, biases."""
    scores: tuple[float, ...]
    """Over the attention scores [b, H / model, T, T], when attention is not fused."""
    split_softmax: tuple[float, ...] = ()
    """What comes on top where one kernel for scale, mask and softmax does not take the scores: conversion to 32
    bits and back, scale and mask by themselves."""

    @property
    def count(self) -> int:
        return len(self.wide) + len(self.hidden) + len(self.heads)


@dataclass(frozen=True)
class Software:
    """How a framework runs the same mathematics."""

    name: str
    attention: Literal["unfused", "flash"]
    forward: Kernels
    backward: Kernels
    eager: bool
    """The host launches kernel by kernel; otherwise the compiled program runs without it."""
    softmax_heads: int = 1
    """Its kernel for scale, mask and softmax takes [T, T] scores of a multiple of so many heads and sequences only;
    others go through one kernel after another (`Kernels.split_softmax`)."""
    kernel_gap: float | None = None
    """Seconds added to every kernel; None takes the constant of eager frameworks."""
    memory: float | None = None
    """Share of the memory bandwidth that element-wise kernels reach; None takes the constant of compiled programs."""
    end_kernels: int = 0
    """Kernels of a microbatch outside the blocks that the device waits for: it has nothing else to do meanwhile."""
    rendezvous: float | None = None
    """Seconds a collective takes besides moving bytes; None takes the fitted constant."""
    overlap: float = 0.0
    """Share of the window (the backward pass; for gathers also the forward pass) in which data-parallel collectives can
    hide. 0: they start when the pass is over."""
    logit_bytes: float = 12.0
    """Bytes read and written per logit by the loss, forward and backward, beyond the matmuls' own."""
    accumulation_bytes: float = 12.0
    """Bytes per parameter to add one microbatch's gradient to the sum."""
    stacked: bool = True
    """Layers lie in stacked arrays: a pass copies each layer's weights out of them, and its gradients into them."""
    optimizer_bytes: float = 30.0
    """Bytes per parameter of one update: gradient, two moments and master read and written, parameter written."""
    gradient_width: int = 4
    """Bytes per number of a gradient when it is reduced."""
    embedding: tuple[float, ...] = (8, 8)
    """Kernels over [tokens, D] of the embedding, forward and backward, as in `Kernels`."""
    recomputed_reductions: int = 1
    """Model-axis reductions that recomputing a block repeats, of its two."""
    pipeline_recomputes: bool = True
    """The backward half of a pipeline tick recomputes its stage from the saved input, whatever the remat policy."""
    head_on_all_stages: bool = True
    """Embedding and head are split over the stages too; otherwise they lie on the first and the last."""
    sends_split: bool = False
    """A send between stages is split over the model axis."""
    pads_matmuls: bool = True
    """Odd sizes are padded to what the matrix units want."""


XLA = Software(
    name="XLA",
    attention="flash",
    # Norm with the residual sum: reads stream and branch, writes both. Backward: reads gradient, input and the gradient
    # that passes by, writes one; and the reduction for the scale.
    forward=Kernels(wide=(8, 8), hidden=(4,), heads=(8,), scores=(8, 6)),
    backward=Kernels(wide=(8, 8, 4, 4), hidden=(7,), heads=(8,), scores=(12, 8)),
    eager=False,
    kernel_gap=2e-6,
    rendezvous=15e-6,
    overlap=0.7,
)
"""What jaxshard compiles to. Gap: back-to-back kernels of a CUDA graph start 1 to 3 us apart (NVIDIA, Getting Started
with CUDA Graphs); rendezvous: the smallest NCCL collectives take 10 to 20 us (nccl-tests)."""

XLA_UNFUSED = Software(**{**vars(XLA), "name": "XLA, attention not fused", "attention": "unfused"})
"""The same where no fused attention kernel exists."""

MEGATRON_DEEPSPEED = Software(
    name="Megatron-DeepSpeed",
    attention="unfused",
    # Norm; bias + dropout + residual (with its mask); GELU with bias; layout of the context; softmax, dropout.
    forward=Kernels(wide=(4, 4, 7, 7), hidden=(4,), heads=(4,), scores=(4, 5), split_softmax=(6, 8, 9, 6)),
    # Norm and its two parameter sums; dropout, bias sum, residual sum; GELU and bias sum; layouts of q, k, v, context.
    backward=Kernels(
        wide=(6, 6, 2, 2, 5, 5, 2, 2, 6, 6), hidden=(6, 2), heads=(4, 12, 6), scores=(6, 5), split_softmax=(6, 8, 8, 6)
    ),
    eager=True,
    softmax_heads=4,
    memory=0.85,
    # Lookups, positions and dropout; the last norm, logits; the loss over a split vocabulary, and all their gradients.
    end_kernels=24,
    logit_bytes=40.0,
    accumulation_bytes=6.0,
    stacked=False,
    optimizer_bytes=26.0,
    gradient_width=2,
    embedding=(7, 4, 5, 5, 4),
    recomputed_reductions=2,
    pipeline_recomputes=False,
    head_on_all_stages=False,
    sends_split=True,
    pads_matmuls=False,
)
"""The framework of the measured rows: PyTorch, one kernel after another, fp16, gradients reduced when the backward pass
is over. Traffic counted from its operators (Megatron-LM, model/transformer.py: masked softmax, dropout, bias-GELU and
bias-dropout-add are one kernel each; attention scores go through memory; its fused softmax wants a multiple of four
score matrices, fused_softmax.py). Memory: between element-wise
kernels of MLX on an A100 80 GB, 1,677 of 2,039 GB/s (ml-explore/mlx, issue 2273), and of PyTorch on an A800, 1,727 of
1,935 GB/s (mli/transformers-benchmarks, issue 4)."""


@dataclass(frozen=True)
class MatrixUnits:
    """What computes matmuls in a chip."""

    units: int
    """Units that each compute one tile of the result at a time."""
    tile: int
    """Side of such a tile."""
    best: float
    """Share of the datasheet's 16-bit peak that the best matmul found reaches (clocks fall under load)."""
    systolic: bool = False
    """TPU: an inner dimension shorter than the tile leaves a part of the unit idle."""
    integer: int = 48
    """FLOPs of 16-bit matmuls at the peak in the time of one 32-bit integer instruction on one number."""


MATRIX_UNITS: dict[str, MatrixUnits] = {
    "a100": MatrixUnits(108, 128, 0.869, integer=32),
    "h100": MatrixUnits(132, 128, 0.803, integer=60),
    "h200": MatrixUnits(132, 128, 0.803, integer=60),
    "b200": MatrixUnits(148, 128, 0.776, integer=60),
    "v4": MatrixUnits(8, 128, 0.95, True),
    "v5e": MatrixUnits(4, 128, 0.95, True),
    "v5p": MatrixUnits(8, 128, 0.95, True),
    "v6e": MatrixUnits(2, 256, 0.75, True, integer=192),
}
"""GPUs: streaming multiprocessors (openxla/xla, target_config/specs), cuBLAS's usual 128 x 128 tile, and the best of
many shapes measured (stas00/ml-engineering, compute/accelerator, "Maximum Achievable Matmul FLOPS": A100 271.2, H100
and H200 794.5, B200 1,745 TFLOP/s). TPUs: matrix units of 128 x 128, from v6e on 256 x 256 (jax-ml.github.io/
scaling-book, part 2). No such table is known for them: 0.95 and 0.75 are what MaxText's published runs on v5p and v6e
suggest (docs/time-model.md), and v4 and v5e are taken to be like v5p.
Integers: 64 instructions a multiprocessor and clock, beside 2,048 (A100) and 4,096 (H100) FLOPs of tensor cores
(NVIDIA's whitepapers: 19.5 and 33.5 int32 TOPS, of two operations each). TPUs: 4 units of 8 x 128 lanes (scaling-book),
where a rotation takes three instructions."""
