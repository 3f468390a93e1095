"""The command `train`: the training loop, with what is known beforehand about model and chips."""

from typing import Any

from jaxshard.config import Config
from jaxshard.console import Console
from jaxshard.insight.arithmetic import flops_per_token
from jaxshard.insight.hardware import chip_of
from jaxshard.training import loop
from jaxshard.training.program import Program


def run(config: Config, *, console: Console, resume: str | None) -> dict[str, Any]:
    """Trains; see `jaxshard.training.loop.run`."""
    return loop.run(config, console=console, resume=resume, arithmetic=arithmetic)


def arithmetic(program: Program) -> tuple[float, float | None]:
    """FLOPs per token (causal attention), and the bf16 peak of all devices where the chip is known."""
    devices = program.layout.mesh.devices.flatten()
    chip = chip_of(devices[0].device_kind)
    peak = chip.bf16_flops * len(devices) if chip is not None and chip.bf16_flops else None
    return flops_per_token(program.model.arch, program.config.data.seq_len), peak
