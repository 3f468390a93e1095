"""Published training runs, and what the analytic time model says of them (used by planner_accuracy.py --published)."""

from dataclasses import dataclass, field, fields, replace

import numpy as np

from jaxshard.analysis.arithmetic import flops_per_token, mfu
from jaxshard.analysis.cost import Parallelism, StepTime, step_time
from jaxshard.analysis.efficiency import XLA, Constants
from jaxshard.analysis.kernels import machine
from jaxshard.config import ModelConfig
from jaxshard.models.presets import Architecture, architecture
from jaxshard.xla.hardware import parse_target


@dataclass(frozen=True)
class Published:
    """A published run: what is known of it, and what had to be assumed."""

    name: str
    model: str | Architecture
    target: str
    layout: Parallelism
    seq_len: int
    tokens_per_second: float
    """Per device."""
    source: str
    assumed: str
    half_remat: bool = False
    """Half of the matmuls run again: taken as the mean of the times with remat dots and full."""
    part: dict[str, float] = field(default_factory=dict)
    """Figures of the part used, where they differ from the target's."""

    def seconds(self, constants: Constants | None) -> StepTime:
        arch = self.model if isinstance(self.model, Architecture) else architecture(ModelConfig(preset=self.model))
        hw = replace(machine(parse_target(self.target)), **self.part)
        remats = ("dots", "full") if self.half_remat else (self.layout.remat,)
        runs = [replace(self.layout, remat=remat) for remat in remats]
        steps = [step_time(arch, run, hw, self.seq_len, XLA, constants) for run in runs]
        mean = lambda name: float(np.mean([getattr(step, name) for step in steps]))
        return StepTime(*(mean(f.name) for f in fields(StepTime)))


_TITAN = "pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
_PART = {"bandwidth": 2.4e12, "flops": 989e12 * 500 / 700}
"""96 GB HBM2e at 2.4 TB/s with a limit of 500 W, of the 700 W that a matmul of an SXM part takes."""
_TITAN_ASSUMED = "half of the matmuls run again; matmul speed in proportion to the power limit (500 of 700 W)"
_MAXTEXT = "AI-Hypercomputer/maxtext, README and benchmarks/maxtext_trillium_model_configs.py"
_V5P = "AI-Hypercomputer/maxtext, configs/v5p/README.md and 32b.sh"
_32B = Architecture("llama", 32000, 8192, 32, 64, 64, 28672, 2048, False, 128)
_DGX = "NVIDIA DGX Cloud benchmarking recipes, MaxText Llama 2 70B and Llama 3 70B (jax:maxtext-2024-12-09), bf16"
_FOUNDRY = "mosaicml/llm-foundry, scripts/train/benchmarking/README.md"
_MPT = {
    "7B": Architecture("gpt2", 50368, 4096, 32, 32, 32, 16384, 2048, True, 128),
    "70B": Architecture("gpt2", 50368, 8192, 80, 64, 64, 32768, 2048, True, 128),
}


def _titan(devices: int, rate: float) -> Published:
    layout = Parallelism(data=devices, zero=3, sequences=2)
    name = f"torchtitan Llama3.1-8B, {devices} H100, torch.compile"
    args = (name, "llama3.1-8b", f"h100:{devices}", layout, 8192, rate, _TITAN, _TITAN_ASSUMED)
    return Published(*args, half_remat=True, part=_PART)


def _maxtext(name: str, model: str, batch: int, seq_len: int, rate: float, assumed: str) -> Published:
    layout = Parallelism(data=256, zero=3, sequences=batch, remat="full")
    return Published(name, model, "v6e:16x16", layout, seq_len, rate, _MAXTEXT, assumed)


def _dgx(model: str, devices: int, seq_len: int, seconds: float) -> Published:
    layout = Parallelism(data=devices, zero=3, sequences=2, remat="full")
    name = f"MaxText {model.replace('llama', 'Llama').replace('b', 'B')}, {devices} H100"
    return Published(name, model, f"h100:{devices}", layout, seq_len, 2 * seq_len / seconds, _DGX, "full remat")


def _mpt(size: str, target: str, sequences: int, accumulation: int, remat: str, rate: float) -> Published:
    devices = parse_target(target).count
    layout = Parallelism(data=devices, zero=3, sequences=sequences, accumulation=accumulation, remat=remat)
    name = f"llm-foundry MPT-{size}, {target}"
    return Published(name, _MPT[size], target, layout, 2048, rate, _FOUNDRY, "eager PyTorch of 2023, predicted as XLA")


PUBLISHED = (
    _dgx("llama2-70b", 64, 4096, 6.999),
    _dgx("llama2-70b", 256, 4096, 7.153),
    _dgx("llama3-70b", 128, 8192, 15.563),
    _dgx("llama3-70b", 256, 8192, 15.444),
    _titan(8, 6667),
    _titan(128, 6514),
    _maxtext(
        "MaxText Llama3.1-8B, 256 v6e", "llama3.1-8b", 4, 8192, 7207, "q, k, v, out kept on the host: as full remat"
    ),
    _maxtext("MaxText Llama2-70B, 256 v6e", "llama2-70b", 2, 4096, 900, "q, k, v kept on the host: as full remat"),
    Published(
        "MaxText 32B, 64 v5p",
        _32B,
        "v5p:4x4x4",
        Parallelism(data=16, model=4, zero=3, sequences=28, remat="dots"),
        2048,
        328e12 / flops_per_token(_32B, 2048, causal=False),
        _V5P,
        "remat minimal as dots; 328 TFLOP/s count full attention",
    ),
)
"""Runs of compiled programs whose settings are known."""
EAGER = (
    _mpt("70B", "a100:64", 8, 4, "full", 410),
    _mpt("7B", "a100:8", 6, 2, "none", 4641),
    _mpt("70B", "h100:64", 8, 4, "full", 1039),
    _mpt("7B", "h100:8", 6, 1, "none", 10643),
)
"""Runs of a program that is not compiled: they show what launching kernel by kernel costs."""


def published(constants: Constants | None = None) -> str:
    """Markdown: predicted and published tokens per second and device."""
    lines = ["| run | published tokens/s | predicted | error % | MFU causal, full % | assumed |", "|---" * 6 + "|"]
    for run in (*PUBLISHED, *EAGER):
        arch = run.model if isinstance(run.model, Architecture) else architecture(ModelConfig(preset=run.model))
        rate = run.layout.global_batch * run.seq_len / run.seconds(constants).total / run.layout.devices
        error = 100 * (rate / run.tokens_per_second - 1)
        peak = parse_target(run.target).chip.bf16_flops
        causal, full = (100 * mfu(arch, run.seq_len, rate, peak, causal) for causal in (True, False))
        figures = f"{run.tokens_per_second:,.0f} | {rate:,.0f} | {error:+.0f} | {causal:.0f}, {full:.0f}"
        lines.append(f"| {run.name} | {figures} | {run.assumed} |")
    return "\n".join(lines)
