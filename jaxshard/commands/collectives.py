"""The command `collectives`: what the links of this machine do, measured."""

import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxshard.analysis.bandwidth import Measurement, cases, largest_that_fits, measure
from jaxshard.analysis.calibration import Calibration, calibrate, write_calibration
from jaxshard.analysis.roofline import seconds_text
from jaxshard.config import Config
from jaxshard.console import Console
from jaxshard.errors import InputError
from jaxshard.parallel.axes import SHORT
from jaxshard.parallel.distributed import join_processes, stdout_to_stderr
from jaxshard.parallel.mesh import build_mesh, open_devices, resolve_mesh
from jaxshard.xla.hardware import parse_target

_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def run(config: Config, *, console: Console, largest: str | None, calibration: str | None) -> dict[str, Any]:
    """Measures, checks, prints, and writes the calibration file; options as in `commands.CollectivesOptions`.

    Raises:
        InputError: there is one device only, or the file cannot be written.
    """
    asked = None if largest is None else size_of(largest)
    several = join_processes(config.mesh, config.devices, config.fake_devices) > 1
    with stdout_to_stderr() if several else nullcontext():  # Gloo tells there who is connected
        devices = open_devices(config.mesh, config.devices, config.fake_devices)
        shape = resolve_mesh(config.mesh, len(devices))
        if len(devices) == 1:
            raise InputError(
                "collectives need two devices or more, and here is one; on a CPU devices can be faked: --mesh dp=4,tp=2"
            )
        if jax.process_index():
            console.mute()
        found = _measured(build_mesh(shape, devices), asked, console)
    fitted = calibrate(found, parse_target("local"))
    _show(console, str(shape), devices, found, fitted)
    wrong = [row for row in found if not row.correct]
    for row in wrong:
        where = f"{row.collective} over {SHORT[row.axis]}, {row.bytes:,} bytes"
        console.line(f"WRONG: {where}: not what NumPy says", style="red")
    if calibration and not wrong and jax.process_index() == 0:
        write_calibration(fitted, Path(calibration))
        console.line(f"calibration: {calibration}; use it with `plan --calibration {calibration}`")
    return {
        "device": devices[0].device_kind,
        "devices": len(devices),
        "processes": jax.process_count(),
        "mesh": str(shape),
        "jax": jax.__version__,
        "measurements": [row.as_json() for row in found],
        "calibration": fitted.as_json(),
        "exit_code": 1 if wrong else 0,
    }


def _measured(mesh: Mesh, asked: int | None, console: Console) -> list[Measurement]:
    """All measurements up to the size asked for, but no more than an accelerator's memory allows."""
    most = largest_that_fits(list(mesh.devices.flat))
    if asked and asked > most and mesh.devices.flat[0].platform != "cpu":
        console.warn(f"--largest: no more than {most:,} bytes fit, and so larger sizes are left out")
        asked = most
    limit, found = asked or most, []
    with console.progress(len(cases(mesh, limit)), every=10**9, what="measured") as progress:
        for row in measure(mesh, limit):
            found.append(row)
            progress.update(len(found))
    return found


def size_of(text: str) -> int:
    """Bytes from "64MiB", "1 GiB", "4096". Raises InputError."""
    found = re.fullmatch(r"(\d{1,15})\s*([KMG]i?B?|B)?", text.strip(), re.I)
    unit = (found[2] or "").upper() if found else ""
    unit = unit if unit in _UNITS else f"{unit[:1]}IB"
    if not found or int(found[1]) * _UNITS[unit] < 1024:
        raise InputError(f"largest is {text!r}: it must be a size from 1KiB on, such as 64MiB")
    return int(found[1]) * _UNITS[unit]


def _show(console: Console, mesh: str, devices: list[Any], found: list[Measurement], fitted: Calibration) -> None:
    rows = [
        (
            row.collective,
            SHORT[row.axis],
            row.members,
            row.bytes,
            seconds_text(row.seconds),
            f"{row.algorithm_bandwidth / 1e9:.3f}",
            f"{row.bus_bandwidth / 1e9:.3f}",
            "yes" if row.correct else "WRONG",
        )
        for row in found
    ]
    columns = ("collective", "axis", "n", "bytes", "time", "algorithm GB/s", "bus GB/s", "right")
    console.table(f"Collectives on {len(devices)} x {devices[0].device_kind}, mesh {mesh}", columns, rows)
    for sentence in fitted.sentences():
        console.line(sentence)
