"""Asks the real compiler about a configuration: its step, compiled for a target that may be absent."""

from dataclasses import dataclass

from jaxshard.config import Config
from jaxshard.errors import InputError
from jaxshard.insight.absent import devices_for, mesh_for, shape_for
from jaxshard.insight.compile import Compiled, DoesNotFit, compile_for
from jaxshard.insight.hardware import Target
from jaxshard.training.program import Program, build_program


@dataclass(frozen=True)
class Confirmed:
    """A configuration's step as the target's compiler made it, or why it refused."""

    program: Program
    result: Compiled | DoesNotFit


def compile_step(config: Config, target: Target, tokenizer_size: int | None = None, buffers: bool = False) -> Confirmed:
    """Compiles the train step of a configuration for a target.

    Args:
        config: complete, with its mesh.
        target: present or absent devices.
        tokenizer_size: vocabulary, where the model leaves it open.
        buffers: also read the buffer assignment, as in `compile_for`.

    Raises:
        InputError: the compiler is not installed, or the configuration does not fit the target's devices.
    """
    devices = devices_for(target)
    shape = shape_for(target, config.mesh)
    program = build_program(config, devices, tokenizer_size, mesh=mesh_for(target, shape))
    # Not read from the shardings: those of absent GPUs have no memory kind, as these devices have no memories.
    low = (program.offloaded, False)
    step, batch = program.step, program.abstract_batch()
    result = compile_for(target, step, program.abstract, batch, host=(low, low), buffers=buffers)
    return Confirmed(program, result)


def compiler_missing(target: Target) -> str | None:
    """Why the target's compiler cannot be asked here, or None when it can."""
    try:
        devices_for(target)
    except InputError as error:
        return str(error)
    return None
