"""Host memory beside a device: what offloaded masters, moments and activations may take."""

import math
from collections.abc import Iterator

import jax

from jaxshard.analysis.memory import gib
from jaxshard.config import Config
from jaxshard.errors import InputError
from jaxshard.models.presets import Architecture
from jaxshard.parallel.offload import machine_bytes
from jaxshard.planner.ranking import Scored, Search, larger_targets, limit_of, search, state_alone
from jaxshard.planner.search import Pins
from jaxshard.xla.hardware import GB, Target

HOST_BYTES = {
    **dict.fromkeys(("a100", "h100", "h200", "b200"), 250 * GB),
    **{"v4": 101 * GB, "v5e": 48 * GB, "v5p": 112 * GB, "v6e": 180 * GB},
}
"""Bytes of host memory for each device. GPUs: 2 TB for eight (NVIDIA DGX A100 640GB, H100, H200 and B200 datasheets).
TPUs: machine types with four chips (cloud.google.com/tpu/docs: ct4p 407 GB, ct5lp 192 GB, ct5p 448 GB, ct6e 720 GB)."""
FREE = 0.1
"""Share left to the system, the data and the program itself."""


def host_limit(target: Target) -> float:
    """Bytes of host memory that one device's share may take; infinite where it is not known."""
    if target.name == "local":
        return (1 - FREE) * machine_bytes() / max(1, jax.local_device_count())
    return (1 - FREE) * HOST_BYTES.get(target.chip.name, math.inf)


def within_host(found: Search) -> list[Scored]:
    """Those of the fitting layouts whose part in host memory fits too, in order."""
    limit = host_limit(found.target)
    return [scored for scored in found.fitting if scored.memory.host <= limit]


def fitting_parts(
    config: Config, arch: Architecture, target: Target, pins: Pins, limit: float | None, most: int | None = None
) -> Iterator[Search]:
    """Searches on the targets of the same chip on which a plan fits, host memory included, smallest first.

    Args:
        limit: bytes that the user allows on a device; None: what it has.
        most: devices.
    """
    for candidate in larger_targets(target, most):
        if state_alone(config, arch, candidate, pins) > limit_of(candidate, limit):
            continue
        try:
            found = search(config, arch, candidate, pins, limit)
        except InputError:  # nothing divides there
            continue
        if within_host(found):
            yield found


def smallest_fitting(
    config: Config, arch: Architecture, target: Target, pins: Pins, limit: float | None
) -> Search | None:
    """The first of `fitting_parts`, or None."""
    return next(fitting_parts(config, arch, target, pins, limit), None)


def host_too_small(found: Search, pins: Pins, limit: float | None) -> InputError:
    """Every layout that fits the devices needs more host memory than there is: says so, and what would do."""
    least = min(found.fitting, key=lambda scored: scored.memory.host)
    larger = smallest_fitting(found.config, found.arch, found.target, pins, limit)
    hint = f"; the smallest {found.target.chip.name} target that fits is {larger.target.name}" if larger else ""
    fixed = f" with {pins}" if str(pins) else ""
    return InputError(
        f"the model fits {found.target.name}{fixed} only with {gib(least.memory.host)} of host memory for each device "
        f"(masters, moments, activations), and there are {gib(host_limit(found.target))} to use{hint}"
    )
