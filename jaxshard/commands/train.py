"""The command `train`: the training loop, with what is known beforehand about model and chips."""

from functools import partial
from typing import Any

from jaxshard.analysis.arithmetic import flops_per_token
from jaxshard.config import Config
from jaxshard.config.options import Given
from jaxshard.console import Console
from jaxshard.planner import present
from jaxshard.training import loop
from jaxshard.training.foresight import Foresight
from jaxshard.training.program import Program
from jaxshard.xla.hardware import chip_of


def run(config: Config, *, console: Console, given: Given, resume: str | int | None) -> dict[str, Any]:
    """Trains; see `jaxshard.training.loop.run`."""
    foresight = Foresight(
        arithmetic=arithmetic,
        layout=partial(present.layout, console=console, given=given, resume=resume is not None),
        memory=present.forecast,
        remedy=partial(present.remedy, given=given),
    )
    return loop.run(config, console=console, given=given, resume=resume, foresight=foresight)


def arithmetic(program: Program) -> tuple[float, float | None]:
    """FLOPs per token (causal attention), and the bf16 peak of all devices where the chip is known."""
    devices = program.layout.mesh.devices.flatten()
    chip = chip_of(devices[0].device_kind)
    peak = chip.bf16_flops * len(devices) if chip is not None and chip.bf16_flops else None
    return flops_per_token(program.model.arch, program.config.data.seq_len), peak
