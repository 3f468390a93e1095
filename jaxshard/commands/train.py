"""The command `train`: the training loop, with what is known beforehand about model and chips."""

from functools import partial
from typing import Any

from jaxshard.analysis.arithmetic import flops_per_token
from jaxshard.config import Config
from jaxshard.config.options import Given
from jaxshard.console import Console
from jaxshard.data.tokenizer import Tokenizer
from jaxshard.inference.generate import sample_text
from jaxshard.planner import present
from jaxshard.training import loop
from jaxshard.training.foresight import Foresight
from jaxshard.training.program import Program
from jaxshard.xla.hardware import chip_of


def run(
    config: Config, *, console: Console, given: Given, resume: str | int | None, allow_changed_data: bool
) -> dict[str, Any]:
    """Trains; see `jaxshard.training.loop.run`."""
    handed = foresight(console, given, resume is not None)
    return loop.run(
        config,
        console=console,
        given=given,
        resume=resume,
        allow_changed_data=allow_changed_data,
        foresight=handed,
    )


def foresight(console: Console, given: Given, resume: bool) -> Foresight:
    """What the training loop is handed from the floors above it."""
    return Foresight(
        arithmetic=arithmetic,
        layout=partial(present.layout, console=console, given=given, resume=resume),
        memory=present.forecast,
        remedy=partial(present.remedy, given=given),
        sample=sample,
    )


def arithmetic(program: Program) -> tuple[float, float | None]:
    """FLOPs per token (causal attention), and the bf16 peak of all devices where the chip is known."""
    devices = program.layout.mesh.devices.flatten()
    chip = chip_of(devices[0].device_kind)
    peak = chip.bf16_flops * len(devices) if chip is not None and chip.bf16_flops else None
    return flops_per_token(program.model.arch, program.config.data.seq_len), peak


def sample(program: Program, params: Any, tokenizer: Tokenizer) -> str:
    """A text that a trained model writes, at most 120 tokens long."""
    (text,) = sample_text(program, params, tokenizer, prompt="def ", max_new_tokens=120)
    return text
