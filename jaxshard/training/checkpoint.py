"""Checkpoints on Orbax: written in the background, complete or not there, restored onto any mesh.

`saved` says what is on the disk. Orbax writes into <step>.orbax-checkpoint-tmp and renames it at the end. Its
CheckpointManager is not used: it takes an empty folder for the newest checkpoint, forgets the good ones after a failed
save, and skips saves silently.
"""

import contextlib
import json
import logging
import shutil
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxshard.errors import InputError
from jaxshard.training.saved import Description, SavedArray, check_fit, complete_steps, damaged, describe, reason

__all__ = ["Checkpoints", "Description", "SavedArray", "complete_steps", "describe"]

_UNFINISHED, _DELETED, _ASIDE = ".orbax-checkpoint-tmp", ".deleted", ".incomplete"


class Checkpoints:
    """The checkpoints of one run. A context manager; on leaving, it waits for the save that is under way.

    Args:
        folder: created on the first save.
        keep: newest checkpoints that are kept; older ones are deleted once a newer one is complete.

    Attributes:
        newest: step of the last save that this object began.
    """

    def __init__(self, folder: Path, keep: int = 3):
        assert keep > 0
        self.folder = Path(folder).absolute()
        self._keep = keep
        self._writer: ocp.AsyncCheckpointer | None = None
        self._pending: tuple[int, int] | None = None  # Step and bytes of the save under way.
        self._instead_of: Sequence[int] | None = None  # What it replaces.
        self.newest: int | None = None
        self._sweeper: threading.Thread | None = None
        _quiet()

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        return complete_steps(self.folder)

    def latest(self) -> int | None:
        """Step of the newest complete checkpoint."""
        return max(self.steps(), default=None)

    def save(self, step: int, state: Any, meta: Mapping[str, Any], instead_of: Sequence[int] | None = None) -> bool:
        """Copies the state to the host and writes it in the background.

        When it returns, the arrays may be donated. An earlier save that is still under way is waited for.

        Args:
            step: finished updates.
            state: pytree of jax arrays.
            meta: JSON values: data position, configuration, ...
            instead_of: steps of the checkpoints that are deleted once this one is complete; by default those that are
                too old.

        Returns:
            False if a complete checkpoint of this step is there already, which is left as it is.

        Raises:
            InputError: the folder cannot be written, the disk is full (also for the save before this one), or the
                folder holds a newer checkpoint.
        """
        self.wait()
        steps = self.steps()
        if step in steps:
            return False
        if steps and steps[-1] > step:
            raise InputError(
                f"{self.folder} holds a checkpoint of step {steps[-1]}, newer than the step {step} to be saved; "
                "move it away, or choose another --output"
            )
        flat = _flatten(state)
        arrays = {path: [x.dtype.name, list(x.shape)] for path, x in flat.items()}
        content = {"arrays": arrays, "meta": dict(meta)}
        json.dumps(content)  # What is no JSON is told here and not by a thread.
        self._instead_of = instead_of
        self._pending = step, sum(x.nbytes for x in flat.values())
        with self._clear_errors():
            if jax.process_index() == 0:
                self._make_room(step)
            self._writer = self._writer or ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())
            args = ocp.args.Composite(state=ocp.args.PyTreeSave(flat), meta=ocp.args.JsonSave(content))
            self._writer.save(self.folder / str(step), args=args)
        self.newest = step
        return True

    def wait(self) -> None:
        """Waits until the last save is complete, then deletes checkpoints that are too old.

        Raises:
            InputError: that save failed; told once.
        """
        if self._writer is not None and self._pending is not None:
            with self._clear_errors():
                self._writer.wait_until_finished()
                if jax.process_index() == 0:
                    self._prune()
                self._pending = None
        if self._sweeper is not None:
            self._sweeper.join()

    def restore(
        self,
        step: int,
        abstract: Any,
        partial: bool = False,
        axes: Any = None,
        sizes: Mapping[str, int] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Reads a checkpoint onto the devices, each array sharded as asked whatever mesh it was saved from.

        Args:
            step: which checkpoint.
            abstract: pytree of `jax.ShapeDtypeStruct` with shardings (without one: the first device).
            partial: whether the checkpoint may hold more than `abstract` (for the parameters alone, say).
            axes: pytree like `abstract` of tuples of logical axes, if padding may differ.
            sizes: size without padding of the logical axes that are padded; such a dim is cut or filled with zeros.

        Returns:
            The state, bit for bit, and the meta values.

        Raises:
            InputError: no such checkpoint; it is damaged; an array is missing, left over, or of another shape or type.
        """
        self.wait()
        found = describe(self.folder, step)
        wanted = _flatten(abstract)
        resized = _padded_paths(abstract, axes, sizes or {})
        check_fit(self.folder, found, wanted, partial, resized)
        place = lambda x: x.sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
        targets = {
            path: ocp.ArrayRestoreArgs(
                sharding=place(x), global_shape=x.shape, dtype=x.dtype, strict=path not in resized
            )
            for path, x in wanted.items()
        }
        args = ocp.args.PyTreeRestore(item=wanted, restore_args=targets, partial_restore=True)
        reader = ocp.Checkpointer(ocp.CompositeCheckpointHandler())
        try:
            flat = reader.restore(self.folder / str(step), args=ocp.args.Composite(state=args))["state"]
        except Exception as error:
            # Orbax wraps what it meets while it reads an array's numbers, and nothing else, in a bare Exception.
            met = error.__cause__ if type(error) is Exception else error
            if not isinstance(met, (OSError, ValueError, KeyError)):
                raise
            raise damaged(self.folder, step, met) from error
        finally:
            reader.close()
        return jax.tree.unflatten(jax.tree.structure(abstract), [flat[path] for path in wanted]), found.meta

    def close(self) -> None:
        """Waits for the last save and ends the background threads."""
        try:
            self.wait()
        finally:
            self._drop_writer()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make_room(self, step: int) -> None:
        """Removes what killed runs left, and moves an incomplete checkpoint of this step aside."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.iterdir():
            if _UNFINISHED in path.name or path.name.endswith(_DELETED):
                _remove_restless(path)
        target = self.folder / str(step)
        if target.exists():
            aside = target.with_name(target.name + _ASIDE)
            shutil.rmtree(aside, ignore_errors=True)
            target.rename(aside)

    def _prune(self) -> None:
        """Deletes old checkpoints: renamed first, so that none is ever there in part; then removed in a thread."""
        steps = self.steps()
        old = steps[: -self._keep] if self._instead_of is None else [step for step in self._instead_of if step in steps]
        gone = [self.folder / f"{step}{_DELETED}" for step in old]
        for path in gone:
            path.with_name(path.name.removesuffix(_DELETED)).rename(path)
        if gone:
            self._sweeper = threading.Thread(target=_remove, args=(gone,), name="delete_checkpoints")
            self._sweeper.start()

    def _drop_writer(self) -> None:
        # A failed save may have left a second error in it, which would fail the next save.
        if self._writer is not None:
            with contextlib.suppress(OSError, ValueError):
                self._writer.close()
            self._writer = None

    @contextlib.contextmanager
    def _clear_errors(self) -> Iterator[None]:
        """Turns what Orbax and the file system raise into one message; the failed save is then forgotten."""
        try:
            yield
        except (OSError, ValueError) as error:
            step, size = self._pending or (0, 0)
            self._pending = None
            self._drop_writer()
            free, good = "", self.latest()
            with contextlib.suppress(OSError):
                free = f" (the state has {size:,} bytes, {shutil.disk_usage(_existing(self.folder)).free:,} are free)"
            raise InputError(
                f"checkpoint {step} cannot be written to {self.folder}: {reason(error)}{free}; free some space, make "
                "the folder writable, or choose another --output. Newest complete checkpoint: "
                f"{'none' if good is None else good}"
            ) from error


def _remove(paths: list[Path]) -> None:
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)


def _remove_restless(path: Path, patience: int = 40) -> None:
    """Removes a folder into which threads of a save that failed a moment ago may still write."""
    for _ in range(patience):
        shutil.rmtree(path, ignore_errors=True)
        if not path.exists():
            return
        time.sleep(0.05)  # What is still there after all goes with the next save.


def _existing(path: Path) -> Path:
    return path if path.exists() or path == path.parent else _existing(path.parent)


def _quiet() -> None:
    """Keeps Orbax's noise off the terminal: whatever matters in it is raised too, and told once."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_not_from_orbax)
    # After an error the writes that had not begun are given up.
    warnings.filterwarnings("ignore", r"coroutine '.*' was never awaited", RuntimeWarning)
    previous = sys.unraisablehook
    if getattr(previous, "quiet", False):
        return

    def hook(unraisable: Any) -> None:
        # Of several reads or writes that fail together, the later ones find nobody waiting for them any more.
        error = unraisable.exc_value
        if str(error) != "Event loop is closed" and not _from_orbax(unraisable.exc_traceback, str(error)):
            previous(unraisable)

    hook.quiet = True
    sys.unraisablehook = hook


def _not_from_orbax(record: logging.LogRecord) -> bool:
    # asyncio reports in its own name the later of several errors, or a task that ends with its event loop.
    stack = record.exc_info[2] if record.exc_info else None
    return not _from_orbax(stack, record.pathname, record.getMessage())


def _from_orbax(stack: TracebackType | None, *texts: str) -> bool:
    """Whether Orbax, or tensorstore below it, is named in the texts or by a frame of the stack."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(stack)]
    return any(name in text for text in (*texts, *files) for name in ("orbax", "tensorstore"))


def _flatten(tree: Any) -> dict[str, Any]:
    """Turns a pytree into {"params.blocks.attention.query": leaf}, in the order of its leaves."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    flat = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    assert len(flat) == len(leaves), "two leaves with one name"
    return flat


def _padded_paths(abstract: Any, axes: Any, sizes: Mapping[str, int]) -> dict[str, dict[int, int]]:
    """Padded dims of every array that has some: {path: {dim: size without padding}}."""
    if axes is None:
        return {}
    names = jax.tree.structure(abstract).flatten_up_to(axes)
    dims = lambda some: {i: sizes[name] for i, name in enumerate(some) if name in sizes}
    return {path: dims(some) for path, some in zip(_flatten(abstract), names, strict=True) if dims(some)}
