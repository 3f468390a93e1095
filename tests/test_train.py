"""Whole runs through the command line: training, resuming, stopping, and what is refused before anything starts."""

import itertools
import json
import logging
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxshard.commands.cli import run
from jaxshard.training.checkpoint import Checkpoints
from jaxshard.training.checkpoint import describe as describe_checkpoint

ROOT = Path(__file__).parent.parent
TINY = [
    "--config", str(ROOT / "configs" / "tiny.yaml"), "--data.seq_len", "32", "--train.global_batch", "8",
    "--eval.batches", "2", "--log.every", "1", "--log.tensorboard", "false",
]  # fmt: skip


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in lines(folder) if "loss" in line}


def saved_arrays(folder: Path, step: int) -> dict[str, np.ndarray]:
    """Every array of a checkpoint, read without the program."""
    import orbax.checkpoint as ocp

    assert step in Checkpoints(folder / "checkpoints").steps()
    reader = ocp.Checkpointer(ocp.CompositeCheckpointHandler())
    restored = reader.restore(
        folder / "checkpoints" / str(step), args=ocp.args.Composite(state=ocp.args.PyTreeRestore())
    )
    return {name: np.asarray(value) for name, value in restored["state"].items()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run of 10 steps with dropout and ZeRO-3 on four devices, and the compilations that it made."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    assert run([*RESUMABLE, "--output", str(folder)]) == 0
    return folder


RESUMABLE = [*TINY, "--mesh", "dp=2,tp=2", "--zero", "3", "--train.steps", "10", "--model.dropout", "0.1"]


def test_a_run_leaves_what_it_promises(whole):
    assert {"config.yaml", "metrics.jsonl", "checkpoints"} <= {path.name for path in whole.iterdir()}
    assert [line["step"] for line in lines(whole) if "loss" in line] == list(range(1, 11))
    assert {"loss", "grad_norm", "lr", "tokens", "tokens_per_second", "skipped", "step"} <= set(lines(whole)[4])
    assert "loss_scale" not in lines(whole)[4]
    (evaluation,) = [line for line in lines(whole) if "eval_loss" in line]
    assert evaluation["step"] == 10 and evaluation["eval_tokens"] > 0
    found = describe_checkpoint(whole / "checkpoints", 10)
    assert found.meta["prng"].startswith("threefry2x32") and found.meta["seed"] == 0


def test_ten_steps_equal_five_and_five_more(whole, tmp_path, caplog):
    half = tmp_path / "half"
    assert run([*RESUMABLE, "--output", str(half), "--train.stop_after", "5"]) == 0
    import jax

    with caplog.at_level(logging.WARNING), jax.log_compiles():
        assert run(["--resume", "--output", str(half), "--train.stop_after", "10"]) == 0
    compiled = re.findall(r"Finished XLA compilation of jit\((\w+)\)", caplog.text)
    assert compiled.count("train_step") == 1 and compiled.count("evaluate") == 1
    assert losses(half) == losses(whole)
    a, b = saved_arrays(whole, 10), saved_arrays(half, 10)
    assert a.keys() == b.keys() and len(a) > 30
    assert all(np.array_equal(a[name], b[name]) for name in a)


def test_the_loss_falls(tmp_path, capsys):
    folder = tmp_path / "run"
    assert run([*TINY, "--mesh", "dp=4,tp=2", "--train.steps", "40", "--output", str(folder), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    history = losses(folder)
    # From about 5.5 to 3.2 in the mean; single batches of 256 tokens of whatever library this Python has lie around it.
    assert history[1] > 5.0 and np.mean([history[step] for step in range(31, 41)]) < 4.0
    assert result["step"] == 40 and result["eval_loss"] < 4.0 and result["sample"]


def test_sigterm_saves_and_the_run_goes_on(tmp_path):
    folder = tmp_path / "run"
    # A checkpoint after every step, so that whenever the signal comes, the step it ends is saved already.
    command = [sys.executable, str(ROOT / "run.py"), *TINY, "--mesh", "dp=2", "--train.steps", "100000"]
    command += ["--checkpoint.every", "1"]
    with subprocess.Popen([*command, "--output", str(folder)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = list(itertools.takewhile(lambda line: not line.startswith("step 2/"), process.stdout))
        process.send_signal(signal.SIGTERM)
        output = "".join(said) + process.stdout.read()
    assert process.returncode == 3, output
    reached = Checkpoints(folder / "checkpoints").latest()
    assert reached == max(losses(folder)) and f"after step {reached}" in output
    assert run(["--resume", "--output", str(folder), "--train.stop_after", str(reached + 2)]) == 0
    assert max(losses(folder)) == reached + 2


BAD = {
    "mesh product": (["--mesh", "dp=3,tp=2", "--fake-devices", "8"], "3 x 2 = 6"),
    "unknown axis": (["--mesh", "dp=2,tpp=2"], "'tp'"),
    "axis twice": (["--mesh", "dp=2,data=2"], "twice"),
    "two -1": (["--mesh", "dp=-1,tp=-1"], "only one axis"),
    "zero": (["--mesh", "dp=0"], "1 or more"),
    "no number": (["--mesh", "dp=two"], "'two'"),
    "misspelt flag": (["--train.step", "3"], "train.steps"),
    "lr": (["--optim.lr", "0"], "optim.lr"),
    "heads": (["--mesh", "tp=8"], "n_heads = 4"),
    "batch": (["--mesh", "dp=3"], "global_batch = 8"),
    "accumulation": (["--mesh", "dp=2", "--parallel.accumulation", "3"], "accumulation"),
    "remat": (["--parallel.remat", "dot"], "'dots'"),
    "named activation": (["--parallel.remat", "names:querry"], "query"),
    "no data": (["--data.path", "/nowhere/at/all.txt"], "/nowhere/at/all.txt"),
    "sequence too long": (["--data.seq_len", "100000000"], "seq_len"),
    "vocabulary": (["--model.vocab_size", "100"], "257"),
    "tokenizer": (["--data.tokenizer", "/nowhere/tokenizer.json"], "tokenizer"),
    "cudnn": (["--model.attention", "cudnn"], "cudnn"),
    "preset": (["--model.preset", "lama3-8b"], "llama3-8b"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_leaves_nothing(name, tmp_path, capsys):
    arguments, part = BAD[name]
    folder = tmp_path / "run"
    pairs = dict(zip(TINY[::2], TINY[1::2], strict=True)) | {"--mesh": "dp=1", "--output": str(folder)}
    pairs |= dict(zip(arguments[::2], arguments[1::2], strict=True))
    assert run([word for pair in pairs.items() for word in pair]) == 2
    captured = capsys.readouterr()
    assert part in captured.err and captured.err.count("\n") == 1, captured.err
    assert not (folder / "config.yaml").exists() and not (folder / "checkpoints").exists()


def test_a_folder_that_holds_a_run_is_left_alone(whole, capsys):
    before = (whole / "metrics.jsonl").read_bytes()
    assert run([*RESUMABLE, "--output", str(whole)]) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert (whole / "metrics.jsonl").read_bytes() == before


def test_an_unwritable_folder_is_named(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert run([*TINY, "--output", str(tmp_path / "file" / "run")]) == 2
    assert "cannot be written" in capsys.readouterr().err
