"""Where the numbers of a run go: metrics.jsonl, TensorBoard, Weights & Biases; and how fast it runs.

A training line has `loss`, `grad_norm`, `lr`, `tokens`, `tokens_per_second`, `mfu`, ...; an evaluation line has
`eval_loss` and `eval_tokens`. Both have `step`, counted from 1.

A token is a target that counts in the loss: `tokens` are those of the line's update, `tokens_per_second` those of the
last updates by the time between them, `mfu` is made of that. Padding is no token: rows that are half empty (data.pack
false) halve all three rates, since the devices compute the padding too. The time between updates holds whatever the
loop waits for, such as data and log files, but not what it does beside training: compiling, saving, evaluating,
starting and writing a profile.
"""

import contextlib
import importlib
import json
import math
import os
import shutil
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from jaxshard.config import LogConfig
from jaxshard.errors import InputError

Values = Mapping[str, Any]
FLUSH_SECONDS = 5.0
"""TensorBoard files are flushed this often: each time it waits for the disk (fsync)."""


METRICS_FILE, DROPPED_FILE = "metrics.jsonl", "metrics.dropped.jsonl"
"""The log, and what a run that went back has logged beyond: every line is in one of them."""


class Writer(Protocol):
    """One destination of the metrics."""

    def write(self, step: int, values: Mapping[str, int | float]) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


class Metrics:
    """Sends every line to all destinations. A context manager."""

    def __init__(self, writers: Sequence[Writer] = ()):
        self._writers = writers
        self._failed = False

    def log(self, step: int, values: Values) -> None:
        """Logs one line.

        Args:
            step: finished updates, from 1.
            values: numbers by name (Python, NumPy or JAX scalars); those that are None are left out.

        Raises:
            InputError: a file could not be written.
        """
        plain = {name: x.item() if hasattr(x, "item") else x for name, x in values.items() if x is not None}
        self._each(lambda writer: writer.write(step, plain))

    def flush(self) -> None:
        """Brings all lines to the disk; to be called before the checkpoint that a resumed run would start from."""
        self._each(lambda writer: writer.flush())

    def close(self) -> None:
        """Closes all destinations; after an error it adds no second one."""
        with contextlib.suppress(*((InputError,) if self._failed else ())):
            self._each(lambda writer: writer.close())

    def _each(self, action: Callable[[Writer], None]) -> None:
        # Every destination has its turn, also when one before it fails; the first error is the one that is told.
        errors = []
        for writer in self._writers:
            try:
                action(writer)
            except InputError as error:
                errors.append(error)
        if errors:
            self._failed = True
            raise errors[0]

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_metrics(folder: Path, log: LogConfig, step: int = 0, config: Mapping[str, Any] | None = None) -> Metrics:
    """Opens the destinations of a run; call it in one process only, and use `Metrics()` in the others.

    Args:
        folder: the run's output folder, which exists.
        log: which destinations.
        step: finished updates of the checkpoint that is resumed; what was logged beyond it is moved to
            `DROPPED_FILE`. 0 for a new run.
        config: the run's configuration as plain values, shown by Weights & Biases.

    Raises:
        InputError: a file cannot be written, or wandb is asked for and not installed or does not start.
    """
    # The one that is most likely to fail comes first: then nothing has been touched.
    writers: list[Writer] = [WandbWriter(folder, log.wandb, config or {})] if log.wandb else []
    writers.append(JsonLines(folder / METRICS_FILE, step))
    if log.tensorboard:
        writers.append(TensorBoardWriter(folder / "tensorboard", step))
    return Metrics(writers)


@contextlib.contextmanager
def _clear_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        free = ""
        with contextlib.suppress(OSError):
            free = f" ({shutil.disk_usage(path.parent).free:,} bytes are free there)"
        raise InputError(
            f"metrics cannot be written to {path}: {error.strerror or error}{free}; "
            "free some space, make the folder writable, or choose another --output"
        ) from error


class JsonLines:
    """metrics.jsonl: one strict JSON object a line.

    A number that is not finite is null, and `nonfinite` says which and what: {"loss": null, "nonfinite": {"loss":
    "nan"}}. Each line is written with one unbuffered call, so a killed run keeps all of them.
    """

    def __init__(self, path: Path, step: int = 0):
        self._path = path
        with _clear_errors(path):
            _move_beyond(path, step)
            self._file = path.open("ab", buffering=0)

    def write(self, step: int, values: Mapping[str, int | float]) -> None:
        odd = {name: str(x) for name, x in values.items() if isinstance(x, float) and not math.isfinite(x)}
        line = {"step": step, **values, **dict.fromkeys(odd), **({"nonfinite": odd} if odd else {})}
        data = (json.dumps(line, allow_nan=False) + "\n").encode()
        with _clear_errors(self._path):
            while data:
                data = data[self._file.write(data) :]

    def flush(self) -> None:
        pass

    def close(self) -> None:
        with _clear_errors(self._path):
            self._file.close()


def logged_steps(folder: Path) -> list[float]:
    """The steps of the logged lines of a run, in the order of the lines; infinity for one that is no such line."""
    path = folder / METRICS_FILE
    return [_step_of(line) for line in path.read_bytes().splitlines()] if path.is_file() else []


def evaluated(folder: Path, step: int) -> bool:
    """Whether the log of a run holds the evaluation at a step."""
    path = folder / METRICS_FILE
    lines = path.read_bytes().splitlines() if path.is_file() else []
    return any(b'"eval_loss"' in line and _step_of(line) == step for line in lines)


def _move_beyond(path: Path, step: int) -> None:
    """Keeps the lines of steps up to `step` and moves the others to the file beside it, a half-written one too."""
    if not path.exists():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    stays = lambda line: line.endswith(b"\n") and _step_of(line) <= step
    kept, beyond = [line for line in lines if stays(line)], [line for line in lines if not stays(line)]
    if beyond:
        with path.with_name(DROPPED_FILE).open("ab") as file:
            file.write(b"".join(line.rstrip(b"\n") + b"\n" for line in beyond))
        new = path.with_name(path.name + ".new")
        new.write_bytes(b"".join(kept))
        os.replace(new, path)


def _step_of(line: bytes) -> float:
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf
    return step if isinstance(step, (int, float)) else math.inf


class TensorBoardWriter:
    """TensorBoard event files, written by the calling thread: tensorboardX's SummaryWriter loses errors in its own."""

    def __init__(self, folder: Path, step: int = 0):
        from tensorboardX.event_file_writer import EventsWriter

        # Protocol buffers are made at run time, unseen by type checkers.
        from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

        self._folder, self._event, self._summary = folder, Event, Summary
        self._flushed = time.monotonic()
        with _clear_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            # The name holds a time in seconds only, and an existing file would be overwritten.
            self._file = EventsWriter(str(folder / "events"), f".{uuid.uuid4().hex[:8]}")
            start = SessionLog(status=SessionLog.START)
            # TensorBoard hides what earlier files have at this step and later.
            self._file.write_event(self._event(wall_time=time.time(), step=step + 1, session_log=start))
            self._file.flush()

    def write(self, step: int, values: Mapping[str, int | float]) -> None:
        value = [self._summary.Value(tag=_tag(name), simple_value=float(x)) for name, x in values.items()]
        with _clear_errors(self._folder):
            self._file.write_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=value)))
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        self._flushed = time.monotonic()
        with _clear_errors(self._folder):
            self._file.flush()

    def close(self) -> None:
        with _clear_errors(self._folder):
            self._file.close()


def _tag(name: str) -> str:
    return f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}"


class WandbWriter:
    """Weights & Biases; a resumed run goes on in the same one, whose id is kept in the output folder."""

    def __init__(self, folder: Path, project: str, config: Mapping[str, Any]):
        try:
            wandb = importlib.import_module("wandb")
        except ImportError as error:
            raise InputError(
                f"log.wandb is {project!r}, but the package wandb is not installed: `pip install wandb`, "
                "or leave log.wandb out"
            ) from error
        id_file = folder / "wandb_id"
        with _clear_errors(id_file):
            if not id_file.exists():
                id_file.write_text(uuid.uuid4().hex[:8])
            run_id = id_file.read_text().strip()
        try:
            self._run = wandb.init(
                project=project, dir=str(folder), id=run_id, resume="allow", config=dict(config), name=folder.name
            )
        except Exception as error:  # Any of the package's own errors: no login, no network, bad project name.
            raise InputError(
                f"Weights & Biases did not start for project {project!r}: {error}; run `wandb login`, set "
                "WANDB_MODE=offline, or leave log.wandb out"
            ) from error

    def write(self, step: int, values: Mapping[str, int | float]) -> None:
        self._run.log({_tag(name): x for name, x in values.items()}, step=step)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self._run.finish()


class Throughput:
    """Tokens a second over the last updates.

    Call `add` each time an update is known to be finished on the device. The first call starts the clock, so the first
    update, which warms up, does not count.
    """

    def __init__(self, window: int = 20, clock: Callable[[], float] = time.perf_counter):
        self._spans: deque[tuple[float, int]] = deque(maxlen=window)
        self._clock = clock
        self._last: float | None = None

    def now(self) -> float:
        """The time on this clock, to be handed to `add`."""
        return self._clock()

    def add(self, tokens: int, finished: float | None = None) -> None:
        """Notes that `tokens` more tokens have been trained on, by now or at the time when that was known first."""
        now = self._clock() if finished is None else finished
        if self._last is not None:
            self._spans.append((now - self._last, tokens))
        self._last = now

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves out the time within. Only where every update that was started has been added: no other is timed."""
        yield
        if self._last is not None:
            self._last = self._clock()

    def restart(self) -> None:
        """Leaves out the next update, which something else delays while it is under way."""
        self._last = None

    @property
    def tokens_per_second(self) -> float | None:
        """None before there is anything to tell."""
        seconds = sum(span for span, _ in self._spans)
        return sum(tokens for _, tokens in self._spans) / seconds if seconds > 0 else None


def mfu(tokens_per_second: float | None, flops_per_token: float, peak_flops: float | None) -> float | None:
    """Model FLOPs utilisation: the share of the chips' peak that the model's own arithmetic uses.

    Defined in Chowdhery et al. 2022 (PaLM), appendix B: recomputation does not count.

    Args:
        tokens_per_second: over all devices, padding not counted; None when not known yet.
        flops_per_token: of forward and backward pass.
        peak_flops: FLOP/s of all devices together; None when the chip is not known.
    """
    if tokens_per_second is None or peak_flops is None:
        return None
    return tokens_per_second * flops_per_token / peak_flops
