"""From a configuration to a program ready to run: data, devices, folder, first or restored state."""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, BinaryIO

import jax

from jaxshard.config import ONE_RUN, Config
from jaxshard.config.file import from_values, load_run, run_to_yaml, saved_values
from jaxshard.config.options import options_of
from jaxshard.data import Dataset, build, check_vocabulary, with_whole_paths
from jaxshard.errors import InputError, obstacle
from jaxshard.models.presets import Architecture, architecture
from jaxshard.parallel.axes import MeshShape
from jaxshard.parallel.mesh import Device, open_devices, resolve_mesh
from jaxshard.parallel.offload import machine_bytes
from jaxshard.parallel.resolve import zero_stage
from jaxshard.training.checkpoint import Checkpoints, describe, remove_unfinished
from jaxshard.training.describe import size_text
from jaxshard.training.foresight import AUTO
from jaxshard.training.layer_order import in_layer_order
from jaxshard.training.metrics import METRICS_FILE
from jaxshard.training.place import RECORD_FILE
from jaxshard.training.program import Program, build_program
from jaxshard.training.saved import doubts
from jaxshard.training.state import TrainState

CONFIG_FILE, LOCK_FILE = "config.yaml", ".lock"
FREE_TO_CHANGE = {"dropout", "attention", "max_seq_len"}
"""Fields of the model that may change when a run goes on: the parameters mean the same."""


def open_run(
    config: Config,
    layout: Callable[[Config, Sequence[Device], int], Config] | None = None,
    adapt: Callable[[Config, Architecture, MeshShape], Config] | None = None,
) -> tuple[Dataset, Program]:
    """Reads the data, opens the devices and derives the program; compiles nothing.

    Args:
        config: of the run.
        layout: chooses the layout where the mesh is `AUTO`, as in `Foresight`.
        adapt: fits the options of a saved run to its model on the mesh, where that is not `AUTO`.

    Raises:
        InputError: data, mesh, model or batch do not fit; see the parts.
    """
    _check_batch(config)
    automatic = layout if config.mesh == AUTO else None
    devices = open_devices(None if automatic else config.mesh, config.devices, config.fake_devices)
    dataset = build(config.data)
    if automatic:
        config = automatic(config, devices, dataset.tokenizer.vocab_size)
    elif adapt:
        arch = architecture(config.model, dataset.tokenizer.vocab_size, config.data.seq_len)
        config = adapt(config, arch, resolve_mesh(config.mesh, len(devices)))
    if not automatic:
        _check_allowed(config, resolve_mesh(config.mesh, len(devices)))
    program = build_program(config, devices, dataset.tokenizer.vocab_size)
    check_vocabulary(dataset, program.model.arch.vocab_size)
    return dataset, program


def _check_allowed(config: Config, shape: MeshShape) -> None:
    """Refuses permission for weights to stay whole where nothing asks to split them. A planner may yet ask.

    Raises:
        InputError: there is no ZeRO.
    """
    if config.parallel.allow_replicated and zero_stage(config, shape) == 0:
        raise InputError(
            f"parallel.allow_replicated = [{', '.join(config.parallel.allow_replicated)}] changes nothing: with ZeRO-0 "
            "every weight may stay whole; leave it out, or use --zero 1, 2 or 3"
        )


def _check_batch(config: Config) -> None:
    """Refuses a batch that cannot be gathered, which would otherwise be tried row by row until the memory is full.

    Raises:
        InputError: the arrays of a global batch, int32 [B, T], take more than this machine has.
    """
    batch, length = config.train.global_batch, config.data.seq_len
    need, has = 4 * 4 * batch * length, machine_bytes()
    if need > has:
        raise InputError(
            f"train.global_batch = {batch:,} sequences of data.seq_len = {length:,} tokens cannot be gathered: "
            f"inputs, targets, segments and positions of 4 bytes each take {size_text(need)}, and this machine has "
            f"{size_text(has)}; lower train.global_batch: even {batch * has // need:,} would fill it"
        )


def checkpoints(config: Config) -> Checkpoints:
    """The checkpoints of the run in `config.output`."""
    folder = Path(config.output or ".")
    return Checkpoints(folder / "checkpoints", config.checkpoint.keep, folder / RECORD_FILE)


@contextmanager
def output_folder(config: Config, resume: str | int | None) -> Iterator[Path]:
    """Makes the run's folder and keeps other runs out of it until the block ends or the process is gone.

    Args:
        config: of the run.
        resume: "required", "auto", the step of a checkpoint, or None.

    Raises:
        InputError: the folder cannot be made or written, is in use, holds a run that is not to be resumed, or none.
    """
    folder = Path(config.output or ".")
    with ExitStack() as stack:
        try:
            if what := obstacle(folder) or obstacle(folder / "checkpoints"):
                raise InputError(f"output folder {folder} cannot be written: {what}; or choose another --output")
            if resume not in (None, "auto") and not (folder / CONFIG_FILE).exists():
                raise InputError(
                    f"--resume: {folder} holds no run; start one without --resume, or name its folder (--output)"
                )
            folder.mkdir(parents=True, exist_ok=True)
            _keep_others_out(stack.enter_context((folder / LOCK_FILE).open("wb")), folder)
            if resume is None and _holds_run(folder):
                raise InputError(
                    f"{folder} already holds a run: choose another --output, go on with it (--resume), or delete it "
                    "first"
                )
            remove_unfinished(folder / "checkpoints")  # A save that found the disk full has left it full.
            _check_writable(folder / ".writable")
        except (OSError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(
                f"output folder {folder} cannot be written ({_reason(error)}): free some space, or choose another "
                "--output"
            ) from None
        yield folder


def _check_writable(probe: Path) -> None:
    """Writes 64 KB and removes them again, whatever happens."""
    try:
        probe.write_text(" " * 65536)
    finally:
        probe.unlink(missing_ok=True)


def _keep_others_out(lock: BinaryIO, folder: Path) -> None:
    """Locks the file; the system lets go of it when the process ends, however it ends."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(
            f"another run is writing into {folder}: wait until it has ended, or choose another --output"
        ) from None
    except OSError:
        pass  # A file system without locks.


def _holds_run(folder: Path) -> bool:
    # Killed before it wrote its configuration, a run may leave metrics without a line: nothing to go on with or lose.
    metrics = folder / METRICS_FILE
    logged = metrics.exists() and metrics.stat().st_size > 0
    return logged or any((folder / name).exists() for name in (CONFIG_FILE, "checkpoints"))


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def write_config(config: Config, folder: Path, start: int = 0) -> None:
    """Saves the configuration as resolved, whole or not at all; one that differs is kept as config.before-<step>.yaml.

    Raises:
        InputError: the disk is full or the folder cannot be written.
    """
    path, draft = folder / CONFIG_FILE, folder / f".{CONFIG_FILE}.tmp"
    before = folder / f"config.before-{start}.yaml"
    text = run_to_yaml(saved_values(config)).encode()
    try:
        draft.write_bytes(text)
        # The first one stays: what the run was until that step. Others that were tried from there have left nothing.
        if path.exists() and path.read_bytes() != text and not before.exists():
            shutil.copyfile(path, before)
        # At every moment there is one: without it the run could neither go on nor be begun again.
        os.replace(draft, path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise InputError(
            f"{path} cannot be written ({_reason(error)}): free some space, or choose another --output"
        ) from None


def resolved(config: Config, program: Program) -> Config:
    """The configuration with every default of the model and the mesh written out, and files by their whole path."""
    arch = program.model.arch
    fields = {name: value for name, value in asdict(arch).items() if hasattr(config.model, name)}
    parallel = replace(config.parallel, mesh=str(program.layout.shape), zero=program.config.zero)
    model = replace(config.model, **fields)
    return replace(config, parallel=parallel, model=model, data=with_whole_paths(config.data))


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
        "model": asdict(program.model.arch),
    }


def check_same_model(program: Program, saved: Checkpoints, step: int) -> None:
    """Refuses to go on with a model whose parameters mean something else, although their shapes may fit.

    Raises:
        InputError: names the fields, with both values.
    """
    before = describe(saved.folder, step).meta.get("model", {})
    now = asdict(program.model.arch)
    changed = [name for name in now if name not in FREE_TO_CHANGE and name in before and before[name] != now[name]]
    if changed:
        what = ", ".join(f"model.{name} is {before[name]!r} in the run and {now[name]!r} here" for name in changed)
        raise InputError(f"--resume: {what}; drop the option, or start another run in another --output")


def changes_since(config: Config, folder: Path, place: int | None) -> list[str]:
    """What differs from the run's configuration so far, as "train.seed 0 -> 5", the output folder left out.

    The configuration so far is what the checkpoint of step `place` recorded, so that a change within the file is told
    too; without one it is the file.
    """
    path = folder / CONFIG_FILE
    if not path.exists():
        return []
    recorded = None if place is None else describe(folder / "checkpoints", place).meta.get("config")
    flat = lambda c: {option.name: option.default for option in options_of(c)}
    try:
        before, now = flat(load_run(path) if recorded is None else from_values(recorded)), flat(config)
    except InputError:  # The user has stated the run in full, which is what helps against this.
        return [f"{path}, which was damaged, is written anew"]
    left_out = {"output", *ONE_RUN}
    return [
        f"{name} {before[name]} -> {now[name]}" for name in now if name not in left_out and before[name] != now[name]
    ]


def first_or_restored(program: Program, saved: Checkpoints, step: int | None) -> tuple[TrainState, int]:
    """Creates the state, or restores the checkpoint of that step; returns it with its step."""
    if step is None:
        return program.init(), 0
    state, facts = saved.restore(step, program.abstract, axes=program.logical_axes, sizes=unpadded(program))
    return _in_own_order(program, state, program.logical_axes, facts), step


def restore_parameters(
    program: Program, folder: Path, step: int | None, warn: Callable[[str], None]
) -> tuple[int, Any]:
    """Restores a checkpoint of a run and returns (step, parameters); warns of newer ones that are passed over.

    Raises:
        InputError: there is no such checkpoint, or it is damaged.
    """
    saved = Checkpoints(folder / "checkpoints", keep=1_000_000)
    steps = saved.steps()
    if not steps:
        raise InputError(f"{folder} holds no complete checkpoint; train it first")
    if step is not None and step not in steps:
        raise InputError(f"--checkpoint {step}: {folder} holds {', '.join(map(str, steps))}")
    chosen = steps[-1] if step is None else step
    for said in doubts(saved.folder, chosen) if step is None else ():
        warn(said)
    only = lambda state: TrainState(None, state.params, None, None, None, None, None)
    axes = only(program.logical_axes)
    state, facts = saved.restore(chosen, only(program.abstract), partial=True, axes=axes, sizes=unpadded(program))
    return chosen, _in_own_order(program, state, axes, facts).params


def _in_own_order(program: Program, state: TrainState, axes: TrainState, facts: dict[str, Any]) -> TrainState:
    """Brings layers that the checkpoint holds in the order of another pipeline into the order of this program."""
    saved = facts.get("layers_dealt", (1, 1))
    return in_layer_order(state, axes, program.model.arch.n_layers, saved, program.model.dealt)


def unpadded(program: Program) -> dict[str, int]:
    """Sizes of the padded logical axes without their padding, which may differ from mesh to mesh."""
    return {"vocab": program.model.arch.vocab_size}
