"""Step times of the layouts of a search, all in one call of the analytic time model."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from jaxshard.analysis.cost import Parallelism, StepTime, stack, step_time
from jaxshard.analysis.efficiency import MATRIX_UNITS, XLA, XLA_UNFUSED, MatrixUnits
from jaxshard.analysis.kernels import Machine, machine
from jaxshard.analysis.links import Fabric, with_measured
from jaxshard.config import Config
from jaxshard.models.fused_attention import band_size
from jaxshard.models.presets import Architecture
from jaxshard.parallel.resolve import attention_kernel
from jaxshard.planner.search import Candidate
from jaxshard.xla.hardware import Target

NOMINAL = Machine(1e12, 50e9, 10e9, MatrixUnits(8, 16, 0.9), Fabric(64, 10e9, 1e9))
"""Stands in for machines whose figures are not known (a CPU): it ranks layouts, and no seconds are quoted from it."""

OVERLAP = {"a100": 0.0}
"""Chip -> `Software.overlap` where its compiler by default does otherwise than `XLA` says. For A100s nothing overlaps:
XLA's latency-hiding scheduler runs by itself only from Hopper on, where its cost model knows the GPU (openxla/xla,
sol_latency_estimator.cc: IsSupportedForModule); docs/time-model.md has what compiled schedules show."""


def machine_of(target: Target) -> Machine:
    """The target for the time model; `NOMINAL`, but for a measured network, where its figures are not known."""
    if is_known(target):
        return machine(target)
    return NOMINAL if target.measured is None else replace(NOMINAL, net=with_measured(NOMINAL.net, target.measured))


def is_known(target: Target) -> bool:
    """Whether seconds can be predicted: the chip's speed is in the tables."""
    return target.chip.name in MATRIX_UNITS


def predict_times(
    config: Config, arch: Architecture, target: Target, layouts: Sequence[Candidate]
) -> tuple[StepTime, np.ndarray]:
    """The parts of each layout's step time, and their sums in seconds."""
    train = config.train
    fused = attention_kernel(arch, train.precision, target.chip.platform) == "cudnn"
    band, T = band_size(config.data.seq_len), config.data.seq_len
    banded = band / T if fused and config.data.pack and band < T else 0.0
    rows = replace(stack([_parallelism(config, c) for c in layouts]), banded=banded)
    software = replace(XLA if fused else XLA_UNFUSED, overlap=OVERLAP.get(target.chip.name, XLA.overlap))
    parts = step_time(arch, rows, machine_of(target), T, software)
    return parts, np.broadcast_to(np.asarray(parts.total, float), (len(layouts),))


def _parallelism(config: Config, c: Candidate) -> Parallelism:
    s, train = c.shape, config.train
    rounds = c.accumulation * (c.microbatches or 1)
    return Parallelism(
        replica=s.replica,
        stage=s.stage,
        data=s.data,
        model=s.model,
        zero=c.zero,
        sequences=train.global_batch // (s.batch_ways * rounds),
        microbatches=c.microbatches or 1,
        accumulation=c.accumulation,
        schedule=c.schedule or "1f1b",
        virtual_stages=c.virtual_stages or 1,
        remat=c.remat if c.remat in ("none", "dots", "full", "offload") else "dots",
        sequence_parallel=c.sequence_parallel,
        offload=c.offload != "none",
        precision="fp32" if train.precision in ("fp32", "fp64") else "bf16",
    )
