"""Several processes as one program: who calls `jax.distributed.initialize`, and when."""

import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax

from jaxshard.errors import InputError, RunError
from jaxshard.parallel.mesh import cpu_by_default, parse_mesh

ADDRESS, COUNT, RANK = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
"""Variables of the environment that start processes by hand: host:port of the first, their number, and one's own."""
LOCAL_DEVICES = "JAX_LOCAL_DEVICE_IDS"
"""jax's variable for the accelerators of its host that a process takes."""


@dataclass(frozen=True)
class Launcher:
    """A program that starts processes and tells each of them its place, in variables of the environment."""

    name: str
    count: str
    """Variable with the number of processes; above 1 it says that this launcher is at work."""
    rank: str
    local: str
    """Variable with the number of a process within its host."""
    finds: tuple[str, ...] = ()
    """Further variables, from which jax finds the first process."""
    method: str | None = None
    """jax's name for finding it so; None: jax cannot."""
    why: str = ""
    """What is known of variables that are missing."""


_OPEN_MPI = Launcher(
    "mpirun of Open MPI",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    ("OMPI_MCA_orte_hnp_uri",),
    "ompi",
    " (Open MPI 5 sets it no longer)",
)
_PMI = Launcher("mpiexec of MPICH or Intel MPI", "PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID")
_SLURM = Launcher(
    "srun",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    ("SLURM_NTASKS", "SLURM_JOB_ID", "SLURM_STEP_NODELIST"),
    "slurm",
)
_LAUNCHERS = (_OPEN_MPI, _PMI, _SLURM)
"""Inner ones first: both kinds of MPI use srun to start helpers of their own, whose numbers the processes inherit."""

_HNP = re.compile(r"\d+\..*(tcp://[^:,]+[,:]|tcp6://\[[^],]+[],])")
"""How jax reads OMPI_MCA_orte_hnp_uri: 1531576320.0;tcp://10.96.0.1,10.148.0.1:34911."""


def join_processes(mesh: str | None, kind: str, fake_devices: int | None) -> int:
    """Joins the processes that were started together, if any were; returns their number. Call before `open_devices`.

    On CPUs every process brings an equal share of the devices that the mesh (or `fake_devices`) asks for.

    Args:
        mesh, kind, fake_devices: as `open_devices` takes them.

    Raises:
        InputError: the variables of the environment do not fit together, or the devices do not divide.
        RunError: the processes do not find each other.
    """
    arguments = launch_arguments(os.environ)
    if arguments is None:
        return 1
    launcher = _launcher(os.environ)
    count = arguments.get("num_processes") or (_number(os.environ, launcher.count) if launcher else 1)
    cpu = kind == "cpu" or (kind == "auto" and cpu_by_default())
    wanted = fake_devices or math.prod(size for size in parse_mesh(mesh).values() if size != -1)
    if cpu and wanted % count:
        raise InputError(
            f"{wanted} CPU device{'s' * (wanted > 1)} cannot be shared equally by {count} processes: take a multiple, "
            f"such as --mesh dp={-(-wanted // count) * count}"
        )
    try:
        jax.distributed.initialize(**arguments)
    except RuntimeError as error:
        raise RunError(f"{count} processes could not be joined: {str(error).splitlines()[0]}") from error
    if cpu:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", wanted // count)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.devices()  # starts the backend with these
    return count


def launch_arguments(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """What `jax.distributed.initialize` is to be called with; None where this process is the only one.

    Where the three variables are not all there, a launcher's count and rank serve beside the address alone.

    Raises:
        InputError: one of the three variables is missing or wrong, or a launcher's variables are incomplete or
            contradict each other.
    """
    given = {name: environment[name] for name in (ADDRESS, COUNT, RANK) if environment.get(name)}
    if ADDRESS in given and not re.fullmatch(r"\S+:\d{1,5}", given[ADDRESS]):
        raise InputError(f"{ADDRESS}={given[ADDRESS][:60]!r} must be HOST:PORT, such as node1:12345")
    launcher = _launcher(environment)
    if launcher and set(given) <= {ADDRESS}:
        return _of_launcher(environment, launcher, given.get(ADDRESS))
    if not given:
        return None
    if len(given) < 3:
        missing = " and ".join(name for name in (ADDRESS, COUNT, RANK) if name not in given)
        raise InputError(f"{' and '.join(given)} is set, but not {missing}: several processes need all three")
    count, rank = _number(environment, COUNT), _number(environment, RANK)
    if not 0 <= rank < count:
        raise InputError(f"{RANK}={rank} must be from 0 to {COUNT} - 1 = {count - 1}")
    return {"coordinator_address": given[ADDRESS], "num_processes": count, "process_id": rank} if count > 1 else None


def _launcher(environment: Mapping[str, str]) -> Launcher | None:
    """The launcher that started this process among others, the innermost where there are several."""
    counts = {each: _number(environment, each.count) for each in _LAUNCHERS if environment.get(each.count)}
    found = [each for each, count in counts.items() if count > 1]
    if found[:2] == [_PMI, _SLURM] and counts[_PMI] == counts[_SLURM]:  # srun speaks PMI itself
        return _SLURM
    return found[0] if found else None


def _of_launcher(environment: Mapping[str, str], launcher: Launcher, address: str | None) -> dict[str, Any]:
    """The arguments of a process that a launcher started, `address` being that of the first one where it is given."""
    count = _number(environment, launcher.count)
    started = f"{launcher.name} started {count} processes ({launcher.count}={count}), but"
    alone = f"unset {launcher.count} if this process is to run alone"
    needed = (launcher.rank, *(() if address else (launcher.local, *launcher.finds) if launcher.method else ()))
    missing = [name for name in needed if not environment.get(name)]
    by_hand = f"give every process {ADDRESS}=HOST:PORT, the host of rank 0 and a port that is free there"
    if missing:
        said = f"{' and '.join(missing)} {'are' if len(missing) > 1 else 'is'} not set"
        mend = f"start it with {launcher.name}" if launcher.rank in missing else by_hand
        why = launcher.why if missing == list(launcher.finds) else ""
        raise InputError(f"{started} {said}{why}: {mend}, or {alone}")
    if not address and launcher.method is None:
        raise InputError(f"{started} it does not tell jax where the first of them is: {by_hand}, or {alone}")
    numbers = [name for name in (launcher.rank, launcher.local) if environment.get(name)]
    for name in numbers:
        if not 0 <= _number(environment, name) < count:
            raise InputError(f"{started} {name}={environment[name]}, which must be from 0 to {count - 1}: {alone}")
    if not address:
        _check_finds(environment, launcher, started, alone)
        return {"cluster_detection_method": launcher.method}
    arguments: dict[str, Any] = {
        "coordinator_address": address,
        "num_processes": count,
        "process_id": _number(environment, launcher.rank),
    }
    if environment.get(launcher.local) and not environment.get(LOCAL_DEVICES):
        arguments["local_device_ids"] = [_number(environment, launcher.local)]  # as jax does where it finds all itself
    return arguments


def _check_finds(environment: Mapping[str, str], launcher: Launcher, started: str, alone: str) -> None:
    """Raises InputError where jax would stumble over what it finds the first process by, or take it for another's."""
    if launcher is _SLURM:
        _number(environment, "SLURM_JOB_ID")
        if (tasks := _number(environment, "SLURM_NTASKS")) != _number(environment, launcher.count):
            raise InputError(f"{started} SLURM_NTASKS={tasks}: the variables are of two jobs; {alone}")
    elif not _HNP.match(uri := environment["OMPI_MCA_orte_hnp_uri"]):
        raise InputError(f"{started} OMPI_MCA_orte_hnp_uri={uri[:60]!r} names no address (tcp://...): {alone}")


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
