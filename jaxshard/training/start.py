"""From a configuration to a program ready to run: data, devices, folder, first or restored state."""

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax

from jaxshard.config import Config
from jaxshard.config_file import config_to_yaml
from jaxshard.data import Dataset, build, check_vocabulary
from jaxshard.errors import InputError
from jaxshard.parallel.mesh import open_devices
from jaxshard.training.checkpoint import Checkpoints
from jaxshard.training.layer_order import in_layer_order
from jaxshard.training.program import Program, build_program
from jaxshard.training.state import TrainState

CONFIG_FILE = "config.yaml"


def open_run(config: Config) -> tuple[Dataset, Program]:
    """Reads the data, opens the devices and derives the program; compiles nothing.

    Raises:
        InputError: data, mesh, model or batch do not fit; see the parts.
    """
    devices = open_devices(config.mesh, config.devices, config.fake_devices)
    dataset = build(config.data)
    program = build_program(config, devices, dataset.tokenizer.vocab_size)
    check_vocabulary(dataset, program.model.arch.vocab_size)
    return dataset, program


def checkpoints(config: Config) -> Checkpoints:
    """The checkpoints of the run in `config.output`."""
    return Checkpoints(Path(config.output or ".") / "checkpoints", config.checkpoint.keep)


def prepare_output(config: Config, resume: str | None) -> Path:
    """Makes the run's folder, and refuses one that cannot be written or holds another run.

    Args:
        config: of the run.
        resume: "required", "auto" or None.

    Raises:
        InputError: the folder cannot be made or written, holds a run that is not to be resumed, or holds none.
    """
    folder = Path(config.output or ".")
    holds_run = (folder / CONFIG_FILE).exists()
    if holds_run and resume is None:
        raise InputError(
            f"{folder} already holds a run: choose another --output, go on with it (--resume), or delete it first"
        )
    if resume == "required" and not holds_run:
        raise InputError(f"--resume: {folder} holds no run; start one without --resume, or name its folder (--output)")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(f"output folder {folder} cannot be written ({reason}): choose another --output") from None
    return folder


def write_config(config: Config, folder: Path) -> None:
    """Saves the configuration as resolved, whole or not at all."""
    draft = folder / f".{CONFIG_FILE}.tmp"
    draft.write_text(config_to_yaml(config))
    os.replace(draft, folder / CONFIG_FILE)


def resolved(config: Config, program: Program) -> Config:
    """The configuration with every default of the model and the mesh written out."""
    arch = program.model.arch
    fields = {name: value for name, value in asdict(arch).items() if hasattr(config.model, name)}
    return replace(config, mesh=str(program.layout.shape), model=replace(config.model, **fields))


def run_facts(program: Program) -> dict[str, Any]:
    """What is recorded with every checkpoint, beside the arrays."""
    return {
        "mesh": str(program.layout.shape),
        "zero": program.layout.zero,
        "layers_dealt": program.model.dealt,
        "precision": program.layout.policy.name,
        "seed": program.config.train.seed,
        "prng": "threefry2x32, partitionable",
        "jax": jax.__version__,
    }


def first_or_restored(program: Program, saved: Checkpoints, resume: str | None) -> tuple[TrainState, int]:
    """Creates the state, or restores the newest checkpoint; returns it with its step."""
    latest = saved.latest() if resume else None
    if latest is None:
        if resume == "required":
            raise InputError("--resume: the run has no complete checkpoint; start it anew in another --output")
        return program.init(), 0
    state, facts = saved.restore(latest, program.abstract, axes=program.logical_axes, sizes=_unpadded(program))
    return _in_own_order(program, state, program.logical_axes, facts), latest


def restore_parameters(program: Program, folder: Path, step: int | None) -> tuple[int, Any]:
    """Restores a checkpoint of a run and returns (step, parameters).

    Raises:
        InputError: there is no such checkpoint.
    """
    saved = Checkpoints(folder / "checkpoints", keep=1_000_000)
    steps = saved.steps()
    if not steps:
        raise InputError(f"{folder} holds no complete checkpoint; train it first")
    if step is not None and step not in steps:
        raise InputError(f"--checkpoint {step}: {folder} holds {', '.join(map(str, steps))}")
    chosen = steps[-1] if step is None else step
    only = lambda state: TrainState(None, state.params, None, None, None, None, None)
    axes = only(program.logical_axes)
    state, facts = saved.restore(chosen, only(program.abstract), partial=True, axes=axes, sizes=_unpadded(program))
    return chosen, _in_own_order(program, state, axes, facts).params


def _in_own_order(program: Program, state: TrainState, axes: TrainState, facts: dict[str, Any]) -> TrainState:
    """Brings layers that the checkpoint holds in the order of another pipeline into the order of this program."""
    saved = facts.get("layers_dealt", (1, 1))
    return in_layer_order(state, axes, program.model.arch.n_layers, saved, program.model.dealt)


def _unpadded(program: Program) -> dict[str, int]:
    """Sizes of the padded logical axes without their padding, which may differ from mesh to mesh."""
    return {"vocab": program.model.arch.vocab_size}
