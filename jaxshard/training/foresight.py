"""What the training loop is handed by the floors above it: the planner's forecasts, and a sample of the model."""

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax

from jaxshard.config import Config
from jaxshard.data.tokenizer import Tokenizer
from jaxshard.errors import RunError
from jaxshard.parallel.mesh import Device
from jaxshard.training.program import Program

AUTO = "auto"
"""Value of --mesh that leaves the layout to the planner."""
OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "Out of memory")
"""What accelerators, and what CPUs say."""


@dataclass(frozen=True)
class Forecast:
    """Memory of a step before it is compiled."""

    total: int
    """Bytes on one device."""
    line: str
    """The forecast as a line."""
    warning: str
    """What to do where it is more than a device has, or ""."""


@dataclass(frozen=True)
class Foresight:
    """Functions of a run that stand on higher floors."""

    arithmetic: Callable[[Program], tuple[float, float | None]]
    """From a program to (FLOPs per token, FLOP/s of all devices together or None where the chip is not known)."""
    layout: Callable[[Config, Sequence[Device], int], Config]
    """From a configuration whose mesh is `AUTO`, the devices and the vocabulary of the tokenizer to one with a mesh."""
    memory: Callable[[Program], Forecast]
    remedy: Callable[[Program], str]
    """After out-of-memory: the largest consumers and the nearest plan that takes less."""
    sample: Callable[[Program, Any, Tokenizer], str]
    """From a program, its parameters and the tokenizer to a text that the model writes."""


@contextmanager
def explained(program: Program, foresight: Foresight):
    """Turns out-of-memory, of the compiler or while running, into an error that says what would fit.

    Raises:
        RunError: instead of jax's error.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not any(words in str(error) for words in OUT_OF_MEMORY):
            raise
        said = str(error).splitlines()[0].strip().rstrip(".")
        raise RunError(f"out of memory: {said}. {foresight.remedy(program)}") from None
