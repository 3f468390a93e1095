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
_LAUNCHERS = {
    "SLURM_STEP_NUM_TASKS": ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_JOB_ID"),
    "OMPI_COMM_WORLD_SIZE": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
}
"""Variables in which `srun` and `mpirun` say how many processes they started, and the other numbers that jax then reads
by itself."""


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
        InputError: one of the three variables is missing or wrong, or a launcher's is not a number.
    """
    given = {name: environment[name] for name in (ADDRESS, COUNT, RANK) if environment.get(name)}
    if given:
        if len(given) < 3:
            missing = " and ".join(name for name in (ADDRESS, COUNT, RANK) if name not in given)
            raise InputError(f"{' and '.join(given)} is set, but not {missing}: several processes need all three")
        count, rank = _number(environment, COUNT), _number(environment, RANK)
        if not 0 <= rank < count:
            raise InputError(f"{RANK}={rank} must be from 0 to {COUNT} - 1 = {count - 1}")
        return (
            {"coordinator_address": given[ADDRESS], "num_processes": count, "process_id": rank} if count > 1 else None
        )
    if max(_launched(environment)) <= 1:
        return None
    for name in (name for names in _LAUNCHERS.values() for name in names if environment.get(name)):
        _number(environment, name)
    return {}


def _launched(environment: Mapping[str, str]) -> list[int]:
    """Processes by each launcher's account; one launcher may run inside another."""
    return [_number(environment, name) if environment.get(name) else 1 for name in _LAUNCHERS]


def _number(environment: Mapping[str, str], name: str) -> int:
    """A variable of the environment as a whole number. Raises InputError where it is none."""
    try:
        return int(environment[name])
    except ValueError:
        raise InputError(
            f"the environment says {name}={environment[name][:60]!r}, which must be a whole number: set it to one, or "
            "unset it if this process is to run alone"
        ) from None


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
