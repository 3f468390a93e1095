"""Host memory as a place for arrays: which kind it is, whether a device has it, and the way there and back."""

import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental.compute_on import compute_on
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import NamedSharding

from jaxshard.errors import InputError

HOST_KIND = "pinned_host"
"""jax's name of page-locked memory of the device's host, which the device copies from and to by itself."""


def machine_bytes() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def in_host_memory(sharding: NamedSharding) -> NamedSharding:
    """The same placement over the mesh, in the hosts' memory."""
    return sharding.with_memory_kind(HOST_KIND)


def to_host(tree: Any) -> Any:
    """Moves every array to host memory, inside jit; what lies there already stays."""
    return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Host), tree)


def on_host(function: Callable) -> Callable:
    """Lets the processor of the device's host compute `function`, inside jit; its results lie in host memory."""
    newer: Any = compute_on  # jax 0.12 made a decorator of what was a context before
    if "out_memory_spaces" in inspect.signature(newer).parameters:
        return newer(function, compute_type="device_host", out_memory_spaces=jax.memory.Space.Host)
    return newer("device_host")(function)


def row_major(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Keeps the compiler from choosing another order of dims for `x`, which lies on the device.

    It likes another one for some gradients, and then turns whole stacks in host memory around, by way of the device.
    """
    # The partitioner would gather for a layout constraint; each device constrains its own slice.
    own = lambda local: with_layout_constraint(local, Layout(tuple(range(local.ndim))))
    return jax.shard_map(own, mesh=sharding.mesh, in_specs=sharding.spec, out_specs=sharding.spec)(x)


def to_device(tree: Any, shardings: Any) -> Any:
    """Moves every array to device memory, inside jit, as sharded.

    Args:
        tree: arrays, in host memory or not.
        shardings: in the shape of `tree`; their memory kind is not looked at.
    """
    bring = lambda x, s: jax.lax.with_sharding_constraint(
        jax.device_put(x, jax.memory.Space.Device), NamedSharding(s.mesh, s.spec)
    )
    return jax.tree.map(bring, tree, shardings)


def check_host_memory(option: str, devices: Sequence[Any]) -> None:
    """Refuses devices without page-locked host memory; devices that are absent are taken at their compiler's word.

    Args:
        option: what needs it, such as "parallel.offload optimizer".
        devices: of the mesh.

    Raises:
        InputError: names the option, the backend and what it has.
    """
    device = devices[0]
    try:
        kinds = sorted({memory.kind for memory in device.addressable_memories()})
    except (AttributeError, NotImplementedError, RuntimeError, ValueError):
        # Absent devices have no memories to ask for, and say so in one of these ways, depending on plugin and version;
        # their compiler refuses what it cannot place.
        return
    if kinds and HOST_KIND not in kinds:
        instead = "--parallel.remat full" if "remat" in option else "--zero 1 to 3 to split the state over more devices"
        raise InputError(
            f"{option} needs {HOST_KIND} memory, and backend {device.platform} has only {', '.join(kinds)}: leave it "
            f"out, or use {instead}"
        )
