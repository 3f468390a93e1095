"""Runs that go wrong: nothing is lost, and what happened is said in a line."""

import json
import math
import shutil
import signal
from pathlib import Path

import jax
import pytest

from jaxshard.commands.cli import run
from jaxshard.training import loop
from jaxshard.training.checkpoint import Checkpoints
from jaxshard.training.skips import Skips

ROOT = Path(__file__).parent.parent
TINY = [
    "--config", str(ROOT / "configs" / "tiny.yaml"), "--data.seq_len", "16", "--train.global_batch", "4",
    "--eval.batches", "1", "--log.every", "1", "--log.tensorboard", "false", "--mesh", "dp=2",
]  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("guards") / "run"
    assert run([*TINY, "--train.steps", "2", "--output", str(folder)]) == 0
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def copied(finished, tmp_path) -> Path:
    """A copy of the run, to be changed."""
    return shutil.copytree(finished, tmp_path / "copy")


def test_checkpoints_without_their_configuration_are_not_written_over(copied, capsys):
    (copied / "config.yaml").unlink()
    before = contents(copied)
    assert run([*TINY, "--train.steps", "2", "--train.seed", "7", "--output", str(copied)]) == 2
    assert "already holds a run" in capsys.readouterr().err and contents(copied) == before


def test_a_finished_run_says_so(finished, capsys):
    assert run(["--resume", "--output", str(finished)]) == 0
    assert "finished at step 2" in capsys.readouterr().out


@pytest.mark.parametrize("option, value", [("rope_theta", "3"), ("vocab_size", "300"), ("norm_eps", "1")])
def test_another_model_is_not_gone_on_with(finished, option, value, capsys):
    """Their shapes fit, and their parameters would mean something else."""
    before = contents(finished)
    assert run(["--resume", "--output", str(finished), f"--model.{option}", value, "--train.steps", "4"]) == 2
    assert f"model.{option} is" in capsys.readouterr().err and contents(finished) == before


def test_what_changed_is_said_and_the_old_configuration_kept(copied, capsys):
    options = ["--train.steps", "3", "--mesh", "dp=1", "--train.seed", "5", "--allow_changed_data"]
    assert run(["--resume", "--output", str(copied), *options]) == 0
    said = capsys.readouterr().out
    for part in (
        "goes on from the checkpoint of step 2",
        "mesh dp=2 -> dp=1",
        "train.seed 0 -> 5",
        "train.steps 2 -> 3",
    ):
        assert part in said
    assert "seed: 0" in (copied / "config.before-2.yaml").read_text()


def test_a_stop_while_compiling_saves_and_the_run_begins(tmp_path, monkeypatch, capsys):
    compile_ = loop._compile

    def stopped(*args):
        signal.raise_signal(signal.SIGTERM)
        return compile_(*args)

    folder = tmp_path / "run"
    monkeypatch.setattr(loop, "_compile", stopped)
    assert run([*TINY, "--train.steps", "2", "--output", str(folder)]) == 3
    monkeypatch.undo()
    assert Checkpoints(folder / "checkpoints").steps() == [0]
    assert run(["--resume", "--output", str(folder)]) == 0
    assert "step 0" in capsys.readouterr().out


def test_a_run_without_a_checkpoint_begins_again(finished, tmp_path, capsys):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text((finished / "config.yaml").read_text())
    assert run(["--resume", "--output", str(folder), "--train.steps", "1"]) == 0
    assert "begins at step 0" in capsys.readouterr().out


def test_a_run_that_diverges_stops_with_one_line_and_keeps_what_was_good(tmp_path, capsys):
    folder = tmp_path / "run"
    options = ["--optim.lr", "1e30", "--optim.warmup_steps", "0", "--checkpoint.every", "1", "--train.max_skips", "4"]
    assert run([*TINY, *options, "--train.steps", "40", "--output", str(folder)]) == 1
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err and "lower optim.lr (1e+30)" in captured.err
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    first_bad = min(line["step"] for line in lines if line["skipped_in_row"])
    *before, last = Checkpoints(folder / "checkpoints").steps()
    assert len(before) == min(3, first_bad - 1) and before[-1] < first_bad < last
    assert f"the newest from before the skips is of step {before[-1]}" in captured.err
    # Going on ends as clearly, and pushes out nothing but what holds the same parameters.
    assert run(["--resume", "--output", str(folder)]) == 1
    assert "8 updates in a row were skipped because the gradient was not finite" in capsys.readouterr().err
    again = Checkpoints(folder / "checkpoints").steps()
    assert again[:-1] == before and again[-1] > last


@pytest.mark.slow
def test_a_loss_scale_that_is_too_high_is_saved_lower(tmp_path, capsys):
    folder = tmp_path / "run"
    options = [
        "--train.precision",
        "fp16",
        "--train.loss_scale",
        "1e30",
        "--train.max_skips",
        "3",
        "--train.steps",
        "9",
    ]
    assert run([*TINY, *options, "--output", str(folder)]) == 1
    error = capsys.readouterr().err
    assert "3 updates in a row were skipped because the gradient was not finite" in error and "optim.lr" not in error
    assert "there is none from before" in error and "halves it further" in error and "None" not in error
    (step,) = Checkpoints(folder / "checkpoints").steps()
    scalars = {"scale": jax.ShapeDtypeStruct((), "float32"), "good": jax.ShapeDtypeStruct((), "int32")}
    wanted = {"loss_scale": scalars, "skipped_in_row": jax.ShapeDtypeStruct((), "int32")}
    found, _ = Checkpoints(folder / "checkpoints").restore(step, wanted, partial=True)
    assert step in (3, 4) and found["skipped_in_row"] == step
    assert found["loss_scale"]["scale"] == pytest.approx(1e30 / 2**step)


def step_of(row: int, tokens: int = 1) -> dict:
    return {"skipped_in_row": row, "tokens": tokens, "grad_norm": math.nan}


def test_skips_end_a_run_at_every_multiple_of_the_limit():
    """A run that goes on after 3 skips has 3 more."""
    first, second = Skips(3), Skips(3)
    for row in (1, 2, 0, 1, 2):
        first.add(step_of(row))
    assert not first.ended
    first.add(step_of(3))
    assert first.ended == 3
    for row in (4, 5):
        second.add(step_of(row))
    assert not second.ended
    second.add(step_of(6))
    assert second.ended == 6


@pytest.mark.parametrize(
    "tokens, scale, words, no_words",
    [
        (0, None, "no token of their batches had a target: look for broken data", "optim.lr"),
        (1, None, "not finite: lower optim.lr (0.5), or look for broken data", "loss scale"),
        (1, 4096.0, "The loss scale is now 4096, and a run that goes on halves it further", "optim.lr"),
        (1, 1.0, "with the loss scale at its floor of 1: lower optim.lr (0.5)", "halves"),
    ],
)
def test_what_helps_against_skips_depends_on_their_cause(tokens, scale, words, no_words):
    skips = Skips(2)
    said = [skips.add(step_of(row, tokens)) for row in (1, 2)]
    assert words in skips.why(scale, 0.5) and no_words not in skips.why(scale, 0.5)
    assert [bool(text) for text in said] == ([True, False] if tokens else [True, True])


@pytest.mark.parametrize(
    "option, value, part",
    [
        ("train.seed", "9223372036854775808", "below 2^31"),
        ("train.seed", "-1", "0 or more"),
        ("optim.lr", "1e39", "between 1e-37 and 1e37"),
        ("mesh", "dp=100000", "1,024"),
        ("log.wandb", "", "log.wandb"),
        ("log.profile_steps", "[5,9]", "within train.steps"),
        ("data.path", "/dev/null", "neither a file nor a folder"),
    ],
)
def test_values_beyond_what_works_are_refused(option, value, part, tmp_path, capsys):
    arguments = [*TINY, "--train.steps", "2", "--output", str(tmp_path / "run")]
    arguments = arguments[:-6] + arguments[-4:] if option == "mesh" else arguments
    assert run([*arguments, f"--{option}", value]) == 2
    error = capsys.readouterr().err
    assert part in error and error.count("\n") == 1


def test_an_output_path_that_cannot_be_is_refused(tmp_path, capsys):
    assert run([*TINY, "--train.steps", "1", "--output", str(tmp_path / ("x" * 300))]) == 2
    assert "cannot be written" in capsys.readouterr().err
