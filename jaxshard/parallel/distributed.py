"""Several processes as one program: who calls `jax.distributed.initialize`, and when."""

import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax

from jaxshard.errors import InputError
from jaxshard.parallel.mesh import cpu_by_default, parse_mesh

ADDRESS, COUNT, RANK = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
"""Variables of the environment that start processes by hand: host:port of the first, their number, and one's own."""
_LAUNCHERS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
"""Variables in which `srun` and `mpirun` say how many processes they started; jax finds the rest by itself."""


def join_processes(mesh: str | None, kind: str, fake_devices: int | None) -> int:
    """Joins the processes that were started together, if any were; returns their number. Call before `open_devices`.

    On CPUs every process brings an equal share of the devices that the mesh (or `fake_devices`) asks for.

    Args:
        mesh, kind, fake_devices: as `open_devices` takes them.

    Raises:
        InputError: the variables of the environment do not fit together, or the devices do not divide.
    """
    arguments = launch_arguments(os.environ)
    if arguments is None:
        return 1
    count = arguments.get("num_processes") or max(_launched(os.environ))
    cpu = kind == "cpu" or (kind == "auto" and cpu_by_default())
    wanted = fake_devices or math.prod(size for size in parse_mesh(mesh).values() if size != -1)
    if cpu and wanted % count:
        raise InputError(
            f"{wanted} CPU device{'s' * (wanted > 1)} cannot be shared equally by {count} processes: take a multiple, "
            f"such as --mesh dp={-(-wanted // count) * count}"
        )
    jax.distributed.initialize(**arguments)
    if cpu:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", wanted // count)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.devices()  # starts the backend with these
    return count


def launch_arguments(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """What `jax.distributed.initialize` is to be called with; None where this process is the only one.

    Raises:
        InputError: one of the three variables is missing or wrong.
    """
    given = {name: environment[name] for name in (ADDRESS, COUNT, RANK) if environment.get(name)}
    if given:
        if len(given) < 3:
            missing = " and ".join(name for name in (ADDRESS, COUNT, RANK) if name not in given)
            raise InputError(f"{' and '.join(given)} is set, but not {missing}: several processes need all three")
        try:
            count, rank = int(given[COUNT]), int(given[RANK])
        except ValueError:
            raise InputError(f"{COUNT}={given[COUNT]} and {RANK}={given[RANK]} must be whole numbers") from None
        if not 0 <= rank < count:
            raise InputError(f"{RANK}={rank} must be from 0 to {COUNT} - 1 = {count - 1}")
        return (
            {"coordinator_address": given[ADDRESS], "num_processes": count, "process_id": rank} if count > 1 else None
        )
    return {} if max(_launched(environment)) > 1 else None


def _launched(environment: Mapping[str, str]) -> list[int]:
    """Processes by each launcher's account; one launcher may run inside another."""
    return [int(environment.get(name) or 1) for name in _LAUNCHERS]


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Sends to stderr what libraries of C++ print on stdout meanwhile, where a program may be reading a result."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(saved, 1)
        os.close(saved)
