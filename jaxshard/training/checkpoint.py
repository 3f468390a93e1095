"""Checkpoints on Orbax: written in the background, complete or not there, restored onto any mesh.

`saved` says what is on the disk. Orbax writes into <step>.orbax-checkpoint-tmp and renames it at the end. Its
CheckpointManager is not used: it takes an empty folder for the newest checkpoint, forgets the good ones after a failed
save, and skips saves silently.
"""

import contextlib
import json
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxshard.errors import InputError
from jaxshard.training.checksum import checksums
from jaxshard.training.quiet import quieten
from jaxshard.training.saved import (
    Description,
    SavedArray,
    check_fit,
    complete_steps,
    content,
    damaged,
    describe,
    reason,
)

__all__ = ["Checkpoints", "Description", "SavedArray", "complete_steps", "describe"]

_UNFINISHED, _DELETED, _ASIDE = ".orbax-checkpoint-tmp", ".deleted", ".incomplete"


class Checkpoints:
    """The checkpoints of one run. A context manager; on leaving, it waits for the save that is under way.

    Args:
        folder: created on the first save.
        keep: newest checkpoints that are kept; older ones are deleted once a newer one is complete.
        record: a file that holds the step of the newest one that was completed, or "none": what a run had is known
            though the folder is lost.

    Attributes:
        newest: step of the last save that this object began.
    """

    def __init__(self, folder: Path, keep: int = 3, record: Path | None = None):
        assert keep > 0
        self.folder = Path(folder).absolute()
        self._keep, self._record = keep, record
        self._writer: ocp.AsyncCheckpointer | None = None
        self._pending: tuple[int, int] | None = None  # Step and bytes of the save under way.
        self._watcher: _Watcher | None = None  # Waits for that save.
        self._instead_of: Sequence[int] | None = None  # What it replaces.
        self.newest: int | None = None
        self._sweeper: threading.Thread | None = None
        quieten()

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        return complete_steps(self.folder)

    def latest(self) -> int | None:
        """Step of the newest complete checkpoint."""
        return max(self.steps(), default=None)

    def save(
        self,
        step: int,
        state: Any,
        meta: Mapping[str, Any],
        instead_of: Sequence[int] | None = None,
        axes: Any = None,
        sizes: Mapping[str, int] | None = None,
    ) -> bool:
        """Sums up the state, copies it to the host and writes it in the background.

        When it returns, the arrays may be donated. An earlier save that is still under way is waited for.

        Args:
            step: finished updates.
            state: pytree of jax arrays.
            meta: JSON values: data position, configuration, ...
            instead_of: steps of the checkpoints that are deleted once this one is complete; by default those that are
                too old.
            axes, sizes: of the dims whose padding may differ when it is restored, as for `restore`.

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
        json.dumps(dict(meta))  # What is no JSON is told here and not by a thread.
        beside = content(step, _summed(flat, _padded_paths(state, axes, sizes or {})), meta)
        self._instead_of = instead_of
        self._pending = step, sum(x.nbytes for x in flat.values())
        with self._clear_errors():
            if jax.process_index() == 0:
                self._make_room(step)
            self._writer = self._writer or ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())
            args = ocp.args.Composite(state=ocp.args.PyTreeSave(flat), meta=ocp.args.JsonSave(beside))
            self._writer.save(self.folder / str(step), args=args)
            self._watcher = _Watcher(self._writer)
        self.newest = step
        return True

    def poll(self) -> None:
        """Finds out, without waiting, whether the last save is complete; to be called often.

        Raises:
            InputError: that save failed; told once.
        """
        if self._watcher is not None and not self._watcher.is_alive():
            self._end_save()

    def wait(self) -> None:
        """Waits until the last save is complete, then deletes checkpoints that are too old.

        Raises:
            InputError: that save failed; told once.
        """
        self._end_save()
        if self._sweeper is not None:
            self._sweeper.join()

    def note(self, step: int | None) -> None:
        """Records the newest checkpoint that the run goes on from, None where it has none yet."""
        if self._record is not None and jax.process_index() == 0:
            # The record only helps to tell what was lost: a full disk must not end a run for it.
            with contextlib.suppress(OSError):
                draft = self._record.with_name(self._record.name + ".tmp")
                draft.write_text("none" if step is None else str(step))
                draft.replace(self._record)

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
            InputError: no such checkpoint; it is damaged, which the checksum of every array that is read tells; an
                array is missing, left over, or of another shape or type.
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
            if not isinstance(met, (OSError, ValueError, KeyError, TypeError, AttributeError)):
                raise
            raise damaged(self.folder, step, met) from error
        finally:
            reader.close()
        if unread := [path for path in wanted if not isinstance(flat.get(path), jax.Array)]:
            raise damaged(self.folder, step, ValueError(f"{', '.join(unread[:3])}: not in its arrays, but in its list"))
        self._verify(found, flat, resized)
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

    def _verify(self, found: Description, flat: Mapping[str, jax.Array], padded: Mapping[str, dict[int, int]]) -> None:
        """Compares what was read with the checksums; where the padding is another one, what lies before it."""
        saved = {array.path: array for array in found.arrays if array.checksum and array.path in flat}
        other = {path: padded[path] for path, array in saved.items() if flat[path].shape != array.shape}
        expected = {path: array.unpadded if path in other else array.checksum for path, array in saved.items()}
        here = checksums({path: flat[path] for path in saved}, _extents(flat, other))
        wrong = [path for path in saved if here[path] != expected[path]]
        if wrong:
            named = ", ".join(f"{path} ({saved[path]})" for path in wrong[:3])
            more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            text = f"{named}{more}: not the bits that were saved (checksum {here[wrong[0]]}, not {expected[wrong[0]]})"
            raise damaged(self.folder, found.step, ValueError(text))

    def _end_save(self) -> None:
        """Waits for the save that is under way, deletes what it replaces, and records it."""
        if self._watcher is None or self._pending is None:
            return
        watcher, self._watcher = self._watcher, None
        with self._clear_errors():
            watcher.result()
            if jax.process_index() == 0:
                self._prune()
            self.note(self._pending[0])
            self._pending = None

    def _make_room(self, step: int) -> None:
        """Removes what killed runs left, and moves an incomplete checkpoint of this step aside."""
        self.folder.mkdir(parents=True, exist_ok=True)
        remove_unfinished(self.folder)
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
            if self._sweeper is not None:
                self._sweeper.join()
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
            if jax.process_index() == 0:
                remove_unfinished(self.folder)  # Its space is what the log needs now, and the next start.
            free, good = "", self.latest()
            with contextlib.suppress(OSError):
                free = f" (the state has {size:,} bytes, {shutil.disk_usage(_existing(self.folder)).free:,} are free)"
            raise InputError(
                f"checkpoint {step} cannot be written to {self.folder}: {reason(error)}{free}; free some space, make "
                "the folder writable, or choose another --output. Newest complete checkpoint: "
                f"{'none' if good is None else good}"
            ) from error


class _Watcher(threading.Thread):
    """Waits for a save, so that it can be asked whether it has ended."""

    def __init__(self, writer: ocp.AsyncCheckpointer):
        super().__init__(name="wait_for_checkpoint", daemon=True)
        self._writer, self._error = writer, None
        self.start()

    def run(self) -> None:
        try:
            self._writer.wait_until_finished()
        except BaseException as error:  # It is raised in the thread that asks.
            self._error = error

    def result(self) -> None:
        """Waits, and raises what the save met."""
        self.join()
        if self._error is not None:
            raise self._error


def remove_unfinished(folder: Path) -> None:
    """Removes saves that were never finished and deletions that were not, of a run that has no save under way."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if _UNFINISHED in path.name or path.name.endswith(_DELETED):
            _remove_restless(path)


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


def _flatten(tree: Any) -> dict[str, Any]:
    """Turns a pytree into {"params.blocks.attention.query": leaf}, in the order of its leaves."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    flat = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    assert len(flat) == len(leaves), "two leaves with one name"
    return flat


def _summed(flat: Mapping[str, Any], padded: Mapping[str, dict[int, int]]) -> dict[str, SavedArray]:
    """Describes arrays with their checksums."""
    whole, without = checksums(flat), checksums({path: flat[path] for path in padded}, _extents(flat, padded))
    return {
        path: SavedArray(path, tuple(x.shape), x.dtype.name, whole[path], without.get(path)) for path, x in flat.items()
    }


def _extents(flat: Mapping[str, Any], padded: Mapping[str, dict[int, int]]) -> dict[str, tuple[int, ...]]:
    """How far each padded array counts along each dim."""
    return {path: tuple({**dict(enumerate(flat[path].shape)), **dims}.values()) for path, dims in padded.items()}


def _padded_paths(abstract: Any, axes: Any, sizes: Mapping[str, int]) -> dict[str, dict[int, int]]:
    """Padded dims of every array that has some: {path: {dim: size without padding}}."""
    if axes is None:
        return {}
    names = jax.tree.structure(abstract).flatten_up_to(axes)
    dims = lambda some: {i: sizes[name] for i, name in enumerate(some) if name in sizes}
    return {path: dims(some) for path, some in zip(_flatten(abstract), names, strict=True) if dims(some)}
