"""Signals at every moment of a run, and two runs that want one folder. The steps here compute nothing."""

import io
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import pytest

from jaxshard.commands.cli import run
from jaxshard.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
    LogConfig,
    ModelConfig,
    grouped,
)
from jaxshard.config.file import run_to_yaml, saved_values
from jaxshard.console import Console
from jaxshard.errors import InputError
from jaxshard.training import loop, start
from jaxshard.training.checkpoint import Checkpoints
from jaxshard.training.evaluate import Evaluator
from jaxshard.training.foresight import Foresight
from jaxshard.training.metrics import open_metrics
from jaxshard.training.signals import stop_on_signal
from jaxshard.training.state import TrainState

ROOT = Path(__file__).parent.parent
END = 6
CONFIG = Config(
    model=ModelConfig(family="llama", d_model=8, n_layers=1, n_heads=2, n_kv_heads=1, d_ff=8),
    data=DataConfig(path=__file__, seq_len=8),
    eval=EvalConfig(every=3),
    checkpoint=CheckpointConfig(every=2, keep=9),
    log=LogConfig(every=1, tensorboard=False),
    **grouped(mesh="dp=1", steps=END, global_batch=1),
)


@pytest.fixture(scope="module")
def opened():
    return start.open_run(CONFIG)


def signalled(function: Callable, call: int) -> Callable:
    """The function, with a SIGTERM at the beginning of its call of that number."""
    calls = itertools.count(1)

    def run(*args, **kwargs):
        if next(calls) == call:
            signal.raise_signal(signal.SIGTERM)
        return function(*args, **kwargs)

    return run


@pytest.fixture
def train(opened, tmp_path, monkeypatch):
    """Runs the loop and what comes after it, with a signal; returns the result, what was said, and saved steps."""

    def trained(moment: str, call: int, skipping: bool = False) -> tuple[dict, str, list[int]]:
        figures = {"loss": 1.0, "tokens": 1, "grad_norm": 1.0, "skipped_in_row": int(skipping), "loss_scale": 1.0}
        metrics = {name: jnp.asarray(value) for name, value in figures.items()}
        state = TrainState(None, {"w": jnp.ones(3)}, None, None, None, None, None)  # type: ignore[arg-type]
        above = Foresight(*4 * [None], sample=lambda *_: "a text")  # type: ignore[arg-type]
        save = Checkpoints.save  # The padding of a model is not that of this state.
        does = {
            "step": lambda state, batch: (state, metrics),
            "save": lambda *args: save(*args[:-2]),
            "evaluate": lambda *_: {"eval_loss": 1.0, "eval_tokens": 1},
        }
        does[moment] = signalled(does[moment], call)
        monkeypatch.setattr(Checkpoints, "save", does["save"])
        monkeypatch.setattr(Evaluator, "__call__", does["evaluate"])
        said, (dataset, program) = io.StringIO(), opened
        with (
            stop_on_signal() as request,
            Checkpoints(tmp_path / "checkpoints", keep=9) as saved,
            open_metrics(tmp_path, CONFIG.log) as log,
        ):
            evaluator = Evaluator(program, dataset)
            parts = loop.Run(CONFIG, program, dataset, tmp_path, saved, log, evaluator, Console(said), above, 0.0, None)
            state, step = loop.run_steps(parts, does["step"], state, 0, request)
            result = loop._finish(parts, state, step, 0, request, 0.0)
        return result, said.getvalue(), saved.steps()

    return trained


@pytest.mark.parametrize(
    "moment, call, steps",
    [
        ("step", 1, [1]),
        ("step", 2, [2]),
        ("save", 1, [2]),
        ("evaluate", 1, [2, 3]),
        ("step", END, [2, 4, END]),
        ("save", 3, [2, 4, END]),
    ],
)
def test_a_stop_saves_the_step_that_it_ends(train, tmp_path, moment, call, steps):
    result, said, saved = train(moment, call)
    assert saved == steps and result == {"exit_code": 3, "step": steps[-1], "output": str(tmp_path)}
    assert f"stopped by SIGTERM after step {steps[-1]}; saved" in said
    assert ("--resume" in said) == (steps[-1] < END) and ("It was the last step" in said) == (steps[-1] == END)
    logged = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in logged if "loss" in line] == list(range(1, steps[-1] + 1))


def test_a_stop_while_updates_are_skipped_saves_too(train):
    result, _, saved = train("step", 5, skipping=True)
    assert saved == [5] and result["exit_code"] == 3


def test_a_stop_when_all_is_saved_changes_nothing(train):
    """A signal during the last evaluation: what is left is shown."""
    result, said, saved = train("evaluate", 2)
    assert saved == [2, 4, END] and "exit_code" not in result and result["sample"] == "a text"
    assert "stopped" not in said and f"Done: step {END}" in said


def test_a_stop_before_compiling_does_not_compile(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(loop, "first_or_restored", signalled(loop.first_or_restored, 1))
    monkeypatch.setattr(loop, "_compile", lambda *_: pytest.fail("compiled"))
    (tmp_path / "config.yaml").write_text(run_to_yaml(saved_values(CONFIG)))
    options = ["--config", str(tmp_path / "config.yaml"), "--output", str(tmp_path / "run")]
    assert run(options) == 3
    assert Checkpoints(tmp_path / "run" / "checkpoints").steps() == [0]
    assert "stopped by SIGTERM after step 0; saved. Go on with:" in capsys.readouterr().out


# Handlers.


def test_the_first_signal_asks_and_handlers_come_back():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with stop_on_signal() as request:
        assert not request
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        assert request and request.name == "SIGINT"
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert signal.set_wakeup_fd(-1) == -1


def test_a_second_interrupt_ends_the_process_though_native_code_holds_the_main_thread():
    """Handlers of Python wait for that, as they would for a compiler."""
    code = """
import hashlib, signal, threading, time
from jaxshard.training.signals import stop_on_signal

def interrupt(main):
    while True:
        signal.pthread_kill(main, signal.SIGINT)
        time.sleep(0.02)

with stop_on_signal():
    threading.Thread(target=interrupt, args=(threading.get_ident(),), daemon=True).start()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # A quarter of an hour, without the lock of the interpreter.
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    said = "interrupted: nothing was saved after the last complete checkpoint\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", said)


@pytest.mark.parametrize("moment", ["jaxshard.commands.cli", "rich.console", "jax", "optax"])
@pytest.mark.parametrize("start", ["run.py", "jaxshard"])
def test_an_interrupt_while_the_program_is_imported_ends_with_one_word(start, moment):
    code = f"""
import runpy, signal, sys

class Interrupts:
    def find_spec(self, name, *_):
        if name == {moment!r}:
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
sys.argv = [{start!r}, "plan", "--target", "none"]
{"runpy.run_path" if start.endswith("py") else "runpy.run_module"}({start!r}, run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert done.stderr.endswith("interrupted\n") and "Traceback" not in done.stderr  # libraries may say something too


# The folder.


def hold(folder, resume=None):
    return start.output_folder(Config(output=str(folder)), resume)


def test_one_run_at_a_time_writes_into_a_folder(tmp_path):
    folder = tmp_path / "run"
    with hold(folder), pytest.raises(InputError, match="another run is writing into"), hold(folder):
        pass
    (folder / "config.yaml").write_text("")
    for resume in ("required", "auto"):  # The first one has ended, or was killed: nothing of its lock is left.
        with hold(folder, resume), pytest.raises(InputError, match="another run is writing"), hold(folder, resume):
            pass
    with pytest.raises(InputError, match="already holds a run"), hold(folder):
        pass


def test_metrics_without_a_line_are_no_run(tmp_path):
    """What a run leaves that is killed between its first two files."""
    (tmp_path / "metrics.jsonl").touch()
    with hold(tmp_path):
        pass
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(InputError, match="already holds a run"), hold(tmp_path):
        pass


def test_a_full_disk_leaves_the_configuration_that_is_there(tmp_path):
    start.write_config(CONFIG, tmp_path)
    before = (tmp_path / "config.yaml").read_text()
    (tmp_path / ".config.yaml.tmp").symlink_to("/dev/full")
    with pytest.raises(InputError, match="No space left"):
        start.write_config(Config(**grouped(mesh="dp=2")), tmp_path, 5)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"config.yaml": before}
    start.write_config(Config(**grouped(mesh="dp=2")), tmp_path, 5)
    assert (tmp_path / "config.before-5.yaml").read_text() == before != (tmp_path / "config.yaml").read_text()
