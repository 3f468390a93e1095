"""The command `plan`: which parallelism for this model on this hardware, before any of it is used."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxshard.analysis.calibration import calibrated
from jaxshard.analysis.lock import check_writable
from jaxshard.config import Config
from jaxshard.config.options import Given
from jaxshard.console import Console
from jaxshard.data.tokenizer import IdTokenizer, load_tokenizer
from jaxshard.errors import InputError
from jaxshard.models.presets import Architecture, architecture
from jaxshard.parallel.mesh import open_devices
from jaxshard.parallel.resolve import attention_kernel
from jaxshard.planner.asking import Progress
from jaxshard.planner.confirm import tokenizer_size
from jaxshard.planner.planner import find
from jaxshard.planner.prediction import is_known
from jaxshard.views.plan_report import write_report
from jaxshard.views.plan_tables import model_name, show
from jaxshard.xla.hardware import CHIPS, Target, parse_target


def run(
    config: Config,
    *,
    console: Console,
    given: Given,
    target: str,
    best: bool,
    network: str | None,
    memory_limit: float | None,
    fewest: bool,
    confirm: int,
    calibration: str | None,
    report: str | None,
) -> dict[str, Any]:
    """Searches, confirms, and prints; options as in `commands.PlanOptions`.

    Raises:
        InputError: unknown target or preset, pins that cannot be met, or nothing fits.
    """
    hardware = hardware_of(config, target, given, network)
    if calibration is not None:
        hardware = calibrated(hardware, Path(calibration), network)
    check_options(hardware, memory_limit, fewest, report)
    config, notes = _with_precision(config, hardware, given)
    arch = architecture(config.model, tokenizer_size(config), config.data.seq_len)
    if config.data.seq_len == Config().data.seq_len < arch.max_seq_len and "data.seq_len" not in given.options:
        notes.append(
            f"Sequences of {config.data.seq_len} tokens, the default; the model takes up to "
            f"{arch.max_seq_len:,}: --data.seq_len."
        )
    _runs(config, arch, hardware)
    found, plans, more = find(config, arch, hardware, given, memory_limit, fewest, confirm, Progress().asking)
    if best:
        console.command(plans[0].command)
    else:
        show(console, found, plans, notes + more)
    if report is not None:
        write_report(found, plans, notes + more, Path(report))
        if not best:
            console.line(f"report: {report}")
    return {"target": found.target.name, "model": model_name(config, arch), "plans": [plan.as_json() for plan in plans]}


def hardware_of(config: Config, target: str, given: Given, network: str | None) -> Target:
    """What is planned for: a named target, or the devices that a run would take here.

    Raises:
        InputError: no such target or devices, or an option that says nothing about it.
    """
    if target.strip().lower() == "local":
        mesh = None if config.mesh == "auto" else config.mesh
        devices = open_devices(mesh, config.devices, config.fake_devices)
        found = parse_target(f"cpu:{len(devices)}" if devices[0].platform == "cpu" else "local")
    else:
        found = parse_target(target)
        for name in ("devices", "fake_devices"):
            if name in given.options:
                raise InputError(
                    f"--{name} {given.options[name]} and --target {target} both say what the devices are: drop one"
                )
    if network is None:
        return found
    bandwidth = _network(network)
    if not is_known(found) or found.hosts == 1 or found.chip.platform == "tpu":
        why = "all chips of a slice are joined by ICI" if found.chip.platform == "tpu" else "it is one host"
        why = why if is_known(found) else "no time is predicted for it"
        raise InputError(f"--network {network} changes nothing on {found.name}: {why}; leave it out")
    return found.with_network(bandwidth)


def check_options(target: Target, memory_limit: float | None, fewest: bool, report: str | None) -> None:
    """Refuses, before anything is searched, a file that cannot be written and options without a meaning here."""
    usable = target.chip.usable_bytes
    if memory_limit is not None and usable and memory_limit * 2**30 > usable:
        raise InputError(
            f"--memory_limit {memory_limit:g} limits nothing: a program has {usable / 2**30:.2f} GiB of a device of "
            f"{target.name}; give less, or leave it out"
        )
    if fewest and target.chip.name not in CHIPS:
        raise InputError(f"--fewest needs a target whose sizes are known, such as --target h100:64, not {target.name}")
    if report is not None and not report.strip():
        raise InputError("--report is empty: name a file, or leave it out")
    if report is not None:
        check_writable("--report", Path(report))


def _runs(config: Config, arch: Architecture, target: Target) -> None:
    """Refuses what no layout can run: a kernel that the chip does not have, ids that the model does not know."""
    attention_kernel(arch, config.train.precision, target.chip.platform)
    try:
        tokenizer = load_tokenizer(config.data.tokenizer)
    except InputError:
        return  # it may lie where the run will be
    if not isinstance(tokenizer, IdTokenizer) and arch.vocab_size < tokenizer.vocab_size:
        raise InputError(
            f"model.vocab_size is {arch.vocab_size:,}, but data.tokenizer {tokenizer.name!r} has "
            f"{tokenizer.vocab_size:,} tokens: set --model.vocab_size to at least {tokenizer.vocab_size:,}"
        )


def _with_precision(config: Config, target: Target, given: Given) -> tuple[Config, list[str]]:
    """bf16 on accelerators, unless the user says otherwise."""
    free = "train.precision" not in given.options and config.train.precision == Config().train.precision
    if not free or target.chip.platform == "cpu":
        return config, []
    note = "Precision bf16 (fp32 masters and moments): --train.precision chooses another."
    return replace(config, train=replace(config.train, precision="bf16")), [note]


def _network(text: str) -> float:
    """Bytes a second from "gbps=25": Gbit/s that one device sends between hosts."""
    found = re.fullmatch(r"(?:gbps=)?(\d+(?:\.\d+)?)", text.strip().lower())
    if not found or float(found[1]) <= 0:
        raise InputError(f"network {text!r}: write gbps=25 for 25 Gbit/s that one device can send between hosts")
    return float(found[1]) * 1e9 / 8
