"""The training loop: keeps the devices busy and reads the past.

The metrics of step n - 1 are fetched after step n is dispatched, so the host never waits for the step it just started.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jax

from jaxshard.config import Config
from jaxshard.config.file import load_run, saved_values
from jaxshard.config.options import Given
from jaxshard.console import Console
from jaxshard.data import Dataset, TrainLoader
from jaxshard.errors import RunError
from jaxshard.models.presets import Architecture
from jaxshard.parallel.axes import MeshShape
from jaxshard.parallel.mesh import parse_mesh
from jaxshard.training.checkpoint import Checkpoints
from jaxshard.training.describe import memory_line, show_program, size_text
from jaxshard.training.evaluate import Evaluator
from jaxshard.training.foresight import AUTO, Forecast, Foresight, explained
from jaxshard.training.leftovers import dropped, own_devices, source_named, without_leftovers
from jaxshard.training.metrics import Metrics, Throughput, evaluated, mfu, open_metrics
from jaxshard.training.place import go_back, place_to_go_on, said_of
from jaxshard.training.program import Program
from jaxshard.training.same_data import check_same_data, data_facts, rows_before
from jaxshard.training.signals import StopRequest, stop_on_signal
from jaxshard.training.skips import Skips
from jaxshard.training.start import (
    CONFIG_FILE,
    changes_since,
    check_same_model,
    checkpoints,
    first_or_restored,
    open_run,
    output_folder,
    resolved,
    run_facts,
    unpadded,
    write_config,
)
from jaxshard.training.state import TrainState

STOPPED_BY_SIGNAL = 3


@dataclass(frozen=True)
class Run:
    """The parts of a run."""

    config: Config
    program: Program
    dataset: Dataset
    folder: Path
    saved: Checkpoints
    metrics: Metrics
    evaluator: Evaluator
    console: Console
    foresight: Foresight
    flops_per_token: float
    peak_flops: float | None
    throughput: Throughput = field(default_factory=Throughput)
    row_of_step_0: int = 0
    """Row of the data's order at which step 0 would lie with this run's batch; not 0 where earlier ones differed."""

    @cached_property
    def skips(self) -> Skips:
        return Skips(self.config.train.max_skips)

    def rows(self, step: int) -> int:
        """Rows of the data's order that are taken when so many updates are made."""
        return self.row_of_step_0 + step * self.config.train.global_batch

    @property
    def end(self) -> int:
        """Step at which this run ends."""
        return end_of(self.config)


def end_of(config: Config) -> int:
    """Step at which a run of this configuration ends."""
    train = config.train
    return train.steps if train.stop_after is None else min(train.steps, train.stop_after)


def run(
    config: Config,
    *,
    console: Console,
    given: Given,
    resume: str | int | None,
    allow_changed_data: bool,
    foresight: Foresight,
) -> dict[str, Any]:
    """Trains, evaluates, and says where everything is.

    Args:
        config: of the run.
        console: where to say it.
        given: what stands on the command line.
        resume: "required", "auto", the step of a checkpoint to go back to, or None.
        allow_changed_data: whether a run may go on with other data.
        foresight: what is known of memory, speed and better layouts.

    Returns a summary with the exit code: 0 done, 3 stopped by a signal after saving.

    Raises:
        InputError: anything that can be known before compiling is checked before compiling.
        RunError: the devices' memory does not suffice.
    """
    began = time.monotonic()
    if config.mesh != AUTO:
        parse_mesh(config.mesh)  # before the folder is touched
    with ExitStack() as stack:
        request = stack.enter_context(stop_on_signal())
        folder = stack.enter_context(output_folder(config, resume))
        dataset, program = _opened(config, folder, foresight, given, resume, console)
        config = resolved(program.config, program)
        forecast = _show_start(dataset, program, foresight, console)
        saved = stack.enter_context(checkpoints(config))
        place = None
        if resume is not None:
            place = place_to_go_on(folder, saved, resume, end_of(config))
            _check_resume(program, dataset, saved, place, allow_changed_data, console)
            _show_resume(config, folder, saved, place, console)
        stack.enter_context(explained(program, foresight))
        state, start = first_or_restored(program, saved, place)
        for said in go_back(saved, start) if isinstance(resume, int) else ():
            console.warn(said)
        saved.note(place)
        metrics = stack.enter_context(open_metrics(folder, config.log, start, asdict(config)))
        rows = rows_before(saved.folder, start, folder / CONFIG_FILE) if start else 0
        opened = (config, program, dataset, folder, saved, metrics, Evaluator(program, dataset), console, foresight)
        parts = Run(*opened, *foresight.arithmetic(program), row_of_step_0=rows - start * config.train.global_batch)
        finished = start > 0 and parts.end <= start
        if not finished or isinstance(resume, int):  # options of a run that has ended are not used
            write_config(config, folder, start)
        if finished and not _lacks_evaluation(parts, start):
            console.line(_finished(parts, start))
            return {"step": start, "output": str(folder)}
        if finished or request:
            return _finish(parts, state, start, start, request, began)
        compiled = _compile(program, forecast, console)
        state, step = run_steps(parts, compiled, state, start, request)
        return _finish(parts, state, step, start, request, began)


def _opened(
    config: Config, folder: Path, foresight: Foresight, given: Given, resume: str | int | None, console: Console
) -> tuple[Dataset, Program]:
    """Opens a run; one that goes on leaves out, and says so, what it had for another mesh.

    A file that the user names beside --resume states the run in full, like a new one.
    """
    file = folder / CONFIG_FILE
    if resume is None or "config" in given.options or not file.exists():
        return open_run(config, foresight.layout)
    before = load_run(file).mesh

    def adapt(config: Config, arch: Architecture, shape: MeshShape) -> Config:
        fitting = without_leftovers(given, before, config, arch, shape)
        if said := dropped(config, fitting):
            console.line(said)
        return fitting

    with source_named(config, given, file):
        return open_run(own_devices(config, given), foresight.layout, adapt)


def _finished(parts: Run, step: int) -> str:
    """Why nothing is left to do, and what to give instead. The options of such a run are not used, and not saved."""
    train = parts.config.train
    what = "train.steps" if train.stop_after is None or train.steps <= step else "train.stop_after"
    now = train.steps if what == "train.steps" else train.stop_after
    return (
        f"{parts.folder} is finished at step {step}: nothing is trained; to go on, raise --{what} (now {now}) above "
        f"{step}"
    )


def _check_resume(
    program: Program, dataset: Dataset, saved: Checkpoints, place: int | None, allowed: bool, console: Console
) -> None:
    """Says where the run goes on; refuses another model, and other data unasked."""
    if place is None:
        there = "begins again" if saved.steps() else "has no complete checkpoint to go on from: it begins"
        console.line(f"the run {there} at step 0")
        return
    check_same_model(program, saved, place)
    if said := check_same_data(dataset, program.config.train.seed, saved.folder, place, allowed):
        console.warn(said)
    console.line(f"goes on from the checkpoint of step {place}")


def _show_resume(config: Config, folder: Path, saved: Checkpoints, place: int | None, console: Console) -> None:
    """Says what is passed over in the folder, and what is no longer as it was."""
    for said in said_of(folder, saved, place):
        console.warn(said)
    for change in changes_since(config, folder, place):
        console.line(f"changed since: {change}")


def _lacks_evaluation(parts: Run, step: int) -> bool:
    """Whether a run was killed between the save of its last step and the evaluation that belongs to it."""
    return step == parts.end and parts.evaluator.possible and not evaluated(parts.folder, step)


def _show_start(dataset: Dataset, program: Program, foresight: Foresight, console: Console) -> Forecast:
    """Says what is trained on what; what a device will hold at the peak of a step, and where it has less."""
    console.line(dataset.describe())
    show_program(program, console)
    forecast = foresight.memory(program)
    console.line(forecast.line)
    if forecast.warning:
        console.warn(forecast.warning)
    return forecast


def _compile(program: Program, forecast: Forecast, console: Console) -> jax.stages.Compiled:
    """Compiles the step once; the loop calls the result, so nothing can compile it again."""
    began = time.monotonic()
    console.line("compiling the step ...")
    compiled = program.step.lower(program.abstract, program.abstract_batch()).compile()
    said = f"{memory_line(compiled)}; predicted {size_text(forecast.total)}"
    console.line(f"{said}; in {time.monotonic() - began:.1f} s")
    return compiled


def run_steps(parts: Run, compiled, state: TrainState, start: int, request: StopRequest) -> tuple[TrainState, int]:
    """Runs updates until the end or a stop request; returns the state and the step reached."""
    config, program, end = parts.config, parts.program, parts.end
    batches = iter(TrainLoader(parts.dataset, config.train.global_batch, config.train.seed, parts.rows(start)))
    pending: tuple[int, dict[str, jax.Array], float | None] | None = None
    step = start
    with ExitStack() as stack:
        stack.callback(batches.close)  # type: ignore[attr-defined]
        profile = stack.enter_context(_profiler(parts))
        progress = stack.enter_context(parts.console.progress(end, start=start, every=config.log.every))
        while step < end and not request and not parts.skips.ended:
            profile(step + 1)
            state, metrics = compiled(state, program.place(next(batches), config.parallel.accumulation))
            step += 1
            # Where calling the step runs it to its end, as CPUs may, this is when it was finished, and not the fetch.
            done = parts.throughput.now() if all(x.is_ready() for x in metrics.values()) else None
            parts.saved.poll()
            if pending is not None:
                _record(parts, progress, *pending)
            pending = (step, metrics, done)
            saves = _due(step, config.checkpoint.every) and step < end
            evaluates = _due(step, config.eval.every) and step < end and parts.evaluator.possible
            if saves or evaluates:
                # What is logged must reach as far as the checkpoint that a resumed run starts from.
                skipping = _record(parts, progress, *pending)["skipped_in_row"] > 0
                pending = None
                # While updates are skipped a checkpoint would push out one from before; `_give_up` saves at their end.
                saves = saves and not skipping
            if evaluates:
                _evaluate(parts, step, state)
            if saves:
                _save(parts, step, state)
        if pending is not None:
            _record(parts, progress, *pending)
    if parts.skips.ended:
        _give_up(parts, step, state, start)
    return state, step


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


@contextmanager
def _profiler(parts: Run) -> Iterator[Callable[[int], None]]:
    """Yields a function to be called with the number of each step before it starts."""
    first, last = parts.config.log.profile_steps or (0, 0)
    running = False

    def before(step: int) -> None:
        """Starts or ends the trace where it is due."""
        nonlocal running
        if step == first:
            jax.profiler.start_trace(str(parts.folder / "profile"))
            parts.throughput.restart()
            running = True
        if running and step == last + 1:
            jax.profiler.stop_trace()
            parts.throughput.restart()
            running = False

    try:
        yield before
    finally:
        if running:
            jax.profiler.stop_trace()


def _save(parts: Run, step: int, state: TrainState, instead_of: Sequence[int] | None = None) -> None:
    program = parts.program
    facts = run_facts(program) | data_facts(parts.dataset, parts.config.train.seed, parts.rows(step))
    facts |= {"config": saved_values(parts.config)}
    with parts.throughput.paused():
        parts.metrics.flush()
        new = parts.saved.save(step, state, facts, instead_of, program.logical_axes, unpadded(program))
    if not new:
        raise RunError(f"{parts.saved.folder} holds a checkpoint of step {step} already, which is left as it is")


def _evaluate(parts: Run, step: int, state: TrainState) -> dict[str, float | int]:
    with parts.throughput.paused():
        result = parts.evaluator(state.params)
        parts.metrics.log(step, result)
    return result


def _record(
    parts: Run, progress, step: int, metrics: dict[str, jax.Array], done: float | None = None
) -> dict[str, Any]:
    """Fetches the metrics of a step, finished at `done` or with the fetch; shows, logs when due, and returns them."""
    values = {name: value.item() for name, value in jax.device_get(metrics).items()}
    if not parts.program.layout.policy.scaled:
        del values["loss_scale"]
    if said := parts.skips.add(values):
        parts.console.warn(f"step {step}: {said}")
    parts.throughput.add(values["tokens"], done)
    speed = parts.throughput.tokens_per_second
    used = mfu(speed, parts.flops_per_token, parts.peak_flops)
    progress.update(step, loss=values["loss"], tokens_per_second=speed, mfu=used)
    if step % parts.config.log.every == 0 or step == parts.end:
        parts.metrics.log(step, values | {"tokens_per_second": speed, "mfu": used})
    return values


def _give_up(parts: Run, step: int, state: TrainState, start: int) -> None:
    """Saves after too many skips, and ends the run.

    The parameters are those from before the skips, bit for bit, so that they could be had from there. But the loss
    scale, the counters and the place in the data are not: without them a run that goes on would end here again and
    again. It pushes out no checkpoint, since the cause may be older than the skips; only where they began before this
    run did, the one that it started from, which holds the same parameters.
    """
    skips, saved = parts.skips, parts.saved
    saved.wait()
    same = [start] if skips.row > step - start else []
    before = [each for each in saved.steps() if each not in same and each <= step - skips.row]
    if saved.latest() != step:
        _save(parts, step, state, instead_of=same)
        saved.wait()
    scale = None if state.loss_scale is None else float(state.loss_scale.scale)
    older = f"the newest from before the skips is of step {before[-1]}" if before else "there is none from before"
    raise RunError(
        f"step {step}: {skips.why(scale, parts.config.optim.lr)}. Saved, with the parameters as they were: go on with "
        f"--resume --output {parts.folder}; {older}"
    )


def _finish(parts: Run, state: TrainState, step: int, start: int, request: StopRequest, began: float) -> dict[str, Any]:
    """Saves, evaluates, shows a sample, and says where everything is."""
    console, folder = parts.console, parts.folder
    # A signal that comes during the save of the last step leaves the loop with that step saved already.
    if parts.saved.newest != step and (step > start or parts.saved.latest() is None):
        _save(parts, step, state)
    if request:
        parts.saved.wait()
        rest = (
            "It was the last step"
            if step >= parts.end
            else f"Go on with: python run.py train --resume --output {folder}"
        )
        console.command(f"stopped by {request.name} after step {step}; saved. {rest}")
        return {"exit_code": STOPPED_BY_SIGNAL, "step": step, "output": str(folder)}
    summary: dict[str, Any] = {"step": step, "output": str(folder)}
    if parts.evaluator.possible:
        summary |= (result := _evaluate(parts, step, state))
        console.line(f"eval_loss {result['eval_loss']:.4f} over {result['eval_tokens']:,} tokens")
    parts.saved.wait()
    summary["sample"] = sample = parts.foresight.sample(parts.program, state.params, parts.dataset.tokenizer)
    console.heading("Sample")
    console.line(sample)
    console.heading(f"Done: step {step} in {time.monotonic() - began:.0f} s")
    for what, name in (("configuration", "config.yaml"), ("metrics", "metrics.jsonl"), ("checkpoints", "checkpoints")):
        console.line(f"{what:13}  {folder / name}")
    return summary
