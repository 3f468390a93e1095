"""metrics.jsonl, TensorBoard, Weights & Biases and the throughput helper."""

import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from jaxshard.config import Config, DataConfig, LogConfig
from jaxshard.errors import InputError
from jaxshard.training import loop
from jaxshard.training.metrics import JsonLines, Metrics, TensorBoardWriter, Throughput, mfu, open_metrics

JSON_ONLY = LogConfig(tensorboard=False)


def lines(folder):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def events(folder):
    """Reads event files: 8 bytes length, 4 checksum, message, 4 checksum (TFRecord)."""
    found = []
    for file in (folder / "tensorboard").iterdir():
        data = file.read_bytes()
        while data:
            size = int.from_bytes(data[:8], "little")
            found.append(Event.FromString(data[12 : 12 + size]))
            data = data[16 + size :]
    return found


def test_lines_are_strict_json_and_on_disk_at_once(tmp_path):
    metrics = open_metrics(tmp_path, JSON_ONLY)
    metrics.log(1, {"loss": jnp.float32(2.5), "tokens": np.int64(64), "mfu": None})
    metrics.log(2, {"loss": float("nan"), "grad_norm": jnp.float32(np.inf), "skipped": jnp.int32(1)})
    metrics.log(2, {"eval_loss": 2.25, "eval_tokens": 640})
    assert lines(tmp_path) == [  # Not closed, as in a killed run.
        {"step": 1, "loss": 2.5, "tokens": 64},
        {"step": 2, "loss": None, "grad_norm": None, "skipped": 1, "nonfinite": {"loss": "nan", "grad_norm": "inf"}},
        {"step": 2, "eval_loss": 2.25, "eval_tokens": 640},
    ]


def test_resume_moves_later_and_broken_lines_aside(tmp_path):
    with open_metrics(tmp_path, JSON_ONLY) as metrics:
        for step in (10, 20, 30):
            metrics.log(step, {"loss": 1.0})
            metrics.log(step, {"eval_loss": 1.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4')
    with open_metrics(tmp_path, JSON_ONLY, step=20) as metrics:
        metrics.log(30, {"loss": 2.0})
    assert [line["step"] for line in lines(tmp_path)] == [10, 10, 20, 20, 30]
    assert lines(tmp_path)[-1]["loss"] == 2.0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.dropped.jsonl", "metrics.jsonl"]
    *moved, broken = (tmp_path / "metrics.dropped.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in moved] == [30, 30] and broken == '{"step": 4'


def test_tensorboard_holds_every_number_and_purges_on_resume(tmp_path):
    with open_metrics(tmp_path, LogConfig()) as metrics:
        metrics.log(10, {"loss": 1.5, "eval_loss": 2.5})
        metrics.flush()
        assert events(tmp_path)[-1].step == 10
    with open_metrics(tmp_path, LogConfig(), step=5) as metrics:
        metrics.log(6, {"loss": float("nan")})
    found = events(tmp_path)
    scalars = {(e.step, v.tag): v.simple_value for e in found for v in e.summary.value}
    assert scalars[10, "train/loss"] == 1.5 and scalars[10, "eval/loss"] == 2.5
    assert np.isnan(scalars[6, "train/loss"])
    assert {e.step for e in found if e.HasField("session_log")} == {1, 6}


def full(path):
    """A JSON file on a full disk."""
    writer = JsonLines(path)
    os.dup2(os.open("/dev/full", os.O_WRONLY), writer._file.fileno())
    return writer


def test_a_full_disk_is_one_clear_message(tmp_path):
    metrics = Metrics([full(tmp_path / "metrics.jsonl")])
    with pytest.raises(InputError, match=r"metrics\.jsonl: No space left on device .* bytes are free"):
        metrics.log(1, {"loss": 1.0})
    metrics.close()


def test_a_full_disk_under_tensorboard_is_told_too(tmp_path, monkeypatch):
    name = types.SimpleNamespace
    monkeypatch.setattr("tensorboardX.event_file_writer.socket", name(gethostname=lambda: "host"))
    monkeypatch.setattr("tensorboardX.event_file_writer.time", name(time=lambda: 1.0))
    monkeypatch.setattr("jaxshard.training.metrics.uuid", name(uuid4=lambda: name(hex="x")))
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "tensorboard" / "events.out.tfevents.1.0.host.x").symlink_to("/dev/full")
    with pytest.raises(InputError, match="No space left"):
        TensorBoardWriter(tmp_path / "tensorboard")


def test_an_unwritable_place_is_one_clear_message(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"Not a directory.*--output"):
        open_metrics(tmp_path / "file", JSON_ONLY)


def test_one_broken_destination_does_not_silence_the_others(tmp_path):
    metrics = Metrics([full(tmp_path / "full.jsonl"), JsonLines(tmp_path / "metrics.jsonl")])
    with pytest.raises(InputError, match=r"full\.jsonl"):
        metrics.log(1, {"loss": 1.0})
    assert lines(tmp_path) == [{"step": 1, "loss": 1.0}]


def test_wandb_missing_names_the_fix(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(InputError, match="`pip install wandb`"):
        open_metrics(tmp_path, LogConfig(wandb="project"))
    assert not list(tmp_path.iterdir())


def test_wandb_gets_every_line_and_resumes_the_same_run(tmp_path, monkeypatch):
    started, logged = [], []
    run = types.SimpleNamespace(log=lambda values, step: logged.append((step, values)), finish=lambda: None)
    fake = types.SimpleNamespace(init=lambda **options: started.append(options) or run)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for step in (0, 1):
        with open_metrics(tmp_path, LogConfig(wandb="project", tensorboard=False), step, {"seed": 7}) as metrics:
            metrics.log(step + 1, {"loss": 1.0})
    assert started[0]["id"] == started[1]["id"] and started[0]["config"] == {"seed": 7}
    assert logged == [(1, {"train/loss": 1.0}), (2, {"train/loss": 1.0})]

    def refuse(**_):
        raise RuntimeError("no API key")

    fake.init = refuse
    with pytest.raises(InputError, match="no API key; run `wandb login`"):
        open_metrics(tmp_path, LogConfig(wandb="project"))


class Clock:
    """A clock that moves when it is told to."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def takes(self, seconds: float, result=None):
        """A function of any arguments that takes so long."""

        def act(*_, **__):
            self.now += seconds
            return result

        return act


def test_throughput_leaves_out_the_first_update_and_pauses():
    clock = Clock()
    speed = Throughput(window=3, clock=clock)

    def after(seconds, tokens):
        clock.now += seconds
        speed.add(tokens)

    with speed.paused():
        clock.now += 10
    after(100.0, 50)
    assert speed.tokens_per_second is None
    after(1.0, 50)
    assert speed.tokens_per_second == 50
    after(1.0, 150)
    assert speed.tokens_per_second == 100
    with speed.paused():
        clock.now += 1000
    after(1.0, 400)
    assert speed.tokens_per_second == 200, "the update after a pause counts, with its own time"
    speed.restart()
    after(1000.0, 50)
    assert speed.tokens_per_second == 200
    for _ in range(3):
        after(2.0, 50)
    assert speed.tokens_per_second == 25


def test_speed_is_of_targets_and_of_training_alone(monkeypatch):
    """Updates of 4 seconds with 20 targets each; beside them saves, evaluations and a profile, all slow."""
    clock, logged, shown = Clock(), [], []
    for name in ("run_facts", "data_facts", "saved_values", "unpadded"):
        monkeypatch.setattr(loop, name, lambda *_: {})
    monkeypatch.setattr(loop.jax.profiler, "start_trace", clock.takes(50))
    monkeypatch.setattr(loop.jax.profiler, "stop_trace", clock.takes(70))
    name = types.SimpleNamespace
    parts: Any = name(
        config=Config(data=DataConfig(pack=False, seq_len=16), log=LogConfig(every=1, profile_steps=(6, 7))),
        throughput=Throughput(clock=clock),
        metrics=name(log=lambda step, values: logged.append(values), flush=clock.takes(9)),
        saved=name(save=clock.takes(500, True), newest=None, folder="x"),
        evaluator=clock.takes(300, {}),
        program=name(layout=name(policy=name(scaled=False)), logical_axes=None),
        dataset=None,
        rows=lambda step: 0,
        skips=name(add=lambda values: None),
        flops_per_token=6.0,
        peak_flops=300.0,
        folder=Path("x"),
        end=10,
    )
    state: Any = name(params=None)
    bar: Any = name(update=lambda step, **figures: shown.append(figures))
    metrics: Any = {"loss": np.float32(1), "tokens": np.int32(20), "loss_scale": np.float32(1)}
    with loop._profiler(parts) as profile:
        for step in range(1, 11):
            profile(step)
            clock.now += 4
            loop._record(parts, bar, step, metrics)
            if step in (3, 4):
                loop._save(parts, step, state)
            if step in (4, 5):
                loop._evaluate(parts, step, state)
    trained = [values for values in logged if values]
    assert [values["tokens"] for values in trained] == [20] * 10
    assert [values["tokens_per_second"] for values in trained] == [None] + [5.0] * 9
    assert [values["mfu"] for values in trained] == [None] + [0.1] * 9
    assert [figures["tokens_per_second"] for figures in shown] == [None] + [5.0] * 9


def test_a_step_that_ends_within_its_call_is_timed_by_that():
    """On a CPU: fetched one after the other at the end, two updates of 4 seconds would look like one of no time."""
    clock = Clock()
    speed = Throughput(clock=clock)
    done = []
    for _ in range(3):
        clock.now += 4
        done.append(speed.now())
    for time in done:
        clock.now += 0.001
        speed.add(20, time)
    assert speed.tokens_per_second == 5.0


def test_mfu():
    assert mfu(1000.0, 6e9, 12e12) == 0.5
    assert mfu(None, 6e9, 12e12) is None and mfu(1000.0, 6e9, None) is None
