"""Checkpoints that are damaged, lost, incomplete or not wanted: nothing is falsified or erased in silence."""

import json
import random
import resource
import shutil
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxshard.commands.cli import run
from jaxshard.config import Config
from jaxshard.config.file import record_checksum
from jaxshard.errors import InputError
from jaxshard.training import loop, start
from jaxshard.training.checkpoint import Checkpoints, describe
from jaxshard.training.place import go_back, place_to_go_on, said_of
from jaxshard.training.saved import doubts

ROOT = Path(__file__).parent.parent
STATE = {f"w{i}": jnp.asarray(np.random.default_rng(i).normal(size=(64, 32)), jnp.float32) for i in range(3)}
ABSTRACT = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), STATE)


@pytest.fixture
def saved(tmp_path):
    """Two checkpoints, of the steps 5 and 10."""
    with Checkpoints(tmp_path / "checkpoints", record=tmp_path / ".newest_checkpoint") as checkpoints:
        for step in (5, 10):
            checkpoints.save(step, STATE, {"mesh": "dp=1"})
        checkpoints.wait()
        yield checkpoints


def flip(path: Path, at: int, bit: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1 << bit
    path.write_bytes(raw)


def largest(folder: Path) -> Path:
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


# Flipped bits.


@pytest.mark.parametrize("file", ["arrays", "meta/metadata", "any"])
def test_no_flipped_bit_falsifies_what_is_restored(saved, file):
    """Refused, or bit for bit what was saved: some bytes of a file mean nothing."""
    folder, draw = saved.folder / "10", random.Random(file)
    files = {"arrays": [largest(folder)], "any": sorted(path for path in folder.rglob("*") if path.is_file())}
    refused = 0
    for _ in range(20):
        path = draw.choice([each for each in files.get(file, [folder / file]) if each.stat().st_size])
        where = path, draw.randrange(path.stat().st_size), draw.randrange(8)
        flip(*where)
        try:
            back, meta = saved.restore(10, ABSTRACT)
            assert meta == {"mesh": "dp=1"}, where
            assert all(np.asarray(back[name]).tobytes() == np.asarray(STATE[name]).tobytes() for name in STATE), where
        except InputError as error:
            refused += 1
            assert "checkpoint 10 in" in str(error) and "--resume 5" in str(error)
        flip(*where)
    assert refused > 2


def test_an_array_that_its_list_does_not_name_is_told(saved):
    """A flipped bit there may turn one name into another; Orbax then leaves the place of the first one empty."""
    path = saved.folder / "10" / "state" / "_METADATA"
    path.write_bytes(path.read_bytes().replace(b"w1", b"wq"))
    with pytest.raises(InputError, match=r"checkpoint 10 in .* is damaged"):
        saved.restore(10, ABSTRACT)


def test_a_checkpoint_under_another_name_is_refused(saved):
    (saved.folder / "10").rename(saved.folder / "20")
    with pytest.raises(InputError, match="it was saved as step 10, and its folder has another name since"):
        saved.restore(20, ABSTRACT)


def test_the_damaged_array_is_named_and_where_to_go_on(saved):
    sums = {array.path: array.checksum for array in describe(saved.folder, 10).arrays}
    meta = saved.folder / "10" / "meta" / "metadata"
    content = json.loads(meta.read_text())
    content["arrays"]["w1"][2] = "0" * 16
    del content["checksum"]
    content["checksum"] = record_checksum(content)
    meta.write_text(json.dumps(content))
    with pytest.raises(InputError) as told:
        saved.restore(10, ABSTRACT)
    assert f"is damaged: w1 (float32 [64, 32]): not the bits that were saved (checksum {sums['w1']}" in str(told.value)
    assert "use the one of step 5 (train --resume 5; eval and generate: --checkpoint 5)" in str(told.value)
    saved.restore(10, {"w0": ABSTRACT["w0"]}, partial=True)  # What is not read is not summed.


def test_one_saved_without_checksums_is_restored_and_said(saved):
    meta = saved.folder / "10" / "meta" / "metadata"
    content = json.loads(meta.read_text())
    del content["checksum"]
    meta.write_text(json.dumps(content))
    with pytest.raises(InputError, match="meta/metadata has changed"):
        describe(saved.folder, 10)
    del content["step"]
    content["arrays"] = {path: row[:2] for path, row in content["arrays"].items()}
    meta.write_text(json.dumps(content))
    saved.restore(10, ABSTRACT)
    (said,) = doubts(saved.folder, 10)
    assert "has no checksums" in said and doubts(saved.folder, 5) == []


# A save that fails.


def test_a_save_that_failed_is_told_before_the_next_one_and_leaves_no_files(saved):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # Like a full disk: writes fail in the background.
    try:
        with pytest.raises(InputError, match="checkpoint 15 cannot be written") as told:
            saved.save(15, STATE, {})
            for _ in range(1000):
                saved.poll()
                time.sleep(0.01)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "Newest complete checkpoint: 10" in str(told.value)
    assert not list(saved.folder.glob("15*"))
    saved.poll()  # Told once.


def test_the_loop_asks_at_every_step(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(Checkpoints, "poll", lambda self: asked.append(self))
    options = ["--config", str(ROOT / "configs/tiny.yaml"), "--train.steps", "3", "--log.tensorboard", "false"]
    monkeypatch.setattr(loop, "_finish", lambda *_: {})
    monkeypatch.setattr(loop, "_compile", lambda *_: lambda state, batch: (state, FIGURES))
    assert run([*options, "--output", str(tmp_path / "run"), "--mesh", "dp=1"]) == 0
    assert len(asked) == 3


FIGURES = {
    name: jnp.float32(1) for name in ("loss", "grad_norm", "lr", "tokens", "skipped", "skipped_in_row", "loss_scale")
}


def test_an_unfinished_save_is_removed_before_the_disk_is_tried(tmp_path, monkeypatch):
    stale = tmp_path / "checkpoints" / "15.orbax-checkpoint-tmp"
    stale.mkdir(parents=True)
    (tmp_path / "config.yaml").touch()
    with start.output_folder(Config(output=str(tmp_path)), "required"):
        assert not stale.exists()

    def full(path, text):
        path.open("w").close()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    hold = start.output_folder(Config(output=str(tmp_path)), "required")
    with pytest.raises(InputError, match=r"No space left on device.*free some space"), hold:
        pass
    assert not (tmp_path / ".writable").exists()


# Where a run goes on.


def log(folder: Path, *steps: int) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in steps))


def test_lost_checkpoints_are_not_a_new_run(saved, tmp_path):
    for step in (5, 10):
        (saved.folder / str(step) / "state" / "manifest.ocdbt").unlink()
    with pytest.raises(InputError, match=r"step 10, but .*/5 lacks state/manifest.ocdbt; .*/10 lacks .*--resume 0"):
        place_to_go_on(tmp_path, saved, "required", end=10)
    shutil.rmtree(saved.folder)
    with pytest.raises(InputError, match=r"saved step 10, but .*checkpoints is missing"):
        place_to_go_on(tmp_path, saved, "auto", end=10)
    assert place_to_go_on(tmp_path, saved, 0, end=10) is None
    (tmp_path / ".newest_checkpoint").unlink()  # of a folder that was copied in part, say
    log(tmp_path, 1, 12)
    with pytest.raises(InputError, match=r"metrics.jsonl reaches step 12, but .*checkpoints is missing"):
        place_to_go_on(tmp_path, saved, "required", end=10)
    saved.note(None)  # Killed before its first checkpoint, it had none to lose.
    assert place_to_go_on(tmp_path, saved, "required", end=10) is None


def test_what_is_passed_over_is_said(saved, tmp_path):
    shutil.copytree(saved.folder / "5", saved.folder / "007")
    assert saved.steps() == [5, 10] and said_of(tmp_path, saved, 10) == []
    (saved.folder / "10" / "state" / "manifest.ocdbt").unlink()
    log(tmp_path, 4, 5, 6)
    passed, beyond = said_of(tmp_path, saved, 5)
    assert "checkpoint 10" in passed and "passed over for that of step 5: state/manifest.ocdbt is missing" in passed
    assert "a logged line from beyond step 5 will be in metrics.dropped.jsonl" in beyond
    shutil.rmtree(saved.folder / "10")
    assert "had saved step 10 too" in said_of(tmp_path, saved, 5)[0]


def test_going_back_overwrites_nothing(saved):
    (saved.folder / "10.set_aside").mkdir()
    (said,) = go_back(saved, 5)
    assert "goes back to step 5" in said and saved.steps() == [5]
    assert {path.name for path in saved.folder.iterdir()} == {"5", "10.set_aside", "10.set_aside.2"}
    with pytest.raises(InputError, match="no complete checkpoint of step 10; there are 5"):
        place_to_go_on(saved.folder.parent, saved, 10, end=10)


# Whole runs.


TINY = [
    "--config", str(ROOT / "configs" / "tiny.yaml"), "--data.seq_len", "16", "--train.global_batch", "4",
    "--eval.every", "0", "--eval.batches", "1", "--log.every", "1", "--log.tensorboard", "false",
    "--checkpoint.every", "2",
]  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A run with the checkpoints 2 and 4."""
    folder = tmp_path_factory.mktemp("faults") / "run"
    assert run([*TINY, "--mesh", "dp=2", "--train.steps", "4", "--output", str(folder)]) == 0
    return folder


@pytest.fixture
def copied(finished, tmp_path) -> Path:
    return shutil.copytree(finished, tmp_path / "copy")


def logged(folder: Path, name: str = "metrics.jsonl") -> list[tuple[int, bool]]:
    lines = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    return [(line["step"], "eval_loss" in line) for line in lines]


def test_flipped_bits_end_a_resumed_run_and_eval(copied, capsys):
    path = largest(copied / "checkpoints" / "4")
    for part in range(1, 64):  # eval reads the parameters alone: each of them is met.
        flip(path, path.stat().st_size * part // 64, 3)
    before = (copied / "metrics.jsonl").read_bytes()
    for arguments in (["--resume", "--train.steps", "6"], ["eval"]):
        assert run([*arguments, "--output", str(copied), "--mesh", "dp=1"]) == 2
        error = capsys.readouterr().err
        assert "checkpoint 4 in" in error and "step 2 (train --resume 2" in error and error.count("\n") == 1
    assert (copied / "metrics.jsonl").read_bytes() == before


def test_a_run_goes_back_to_a_step_and_ends_there_as_any_other(copied, capsys):
    """No step is left to run, but the evaluation of a run that ends there is missing."""
    assert run(["--resume", "2", "--train.steps", "2", "--output", str(copied)]) == 0
    said = "".join(capsys.readouterr())
    assert "goes back to step 2: checkpoint 4 is kept as" in said and "3 logged lines from beyond step 2" in said
    assert "eval_loss" in said and "Done: step 2" in said
    assert logged(copied) == [(1, False), (2, False), (2, True)]
    assert logged(copied, "metrics.dropped.jsonl") == [(3, False), (4, False), (4, True)]
    assert Checkpoints(copied / "checkpoints").steps() == [2] and (copied / "checkpoints" / "4.set_aside").is_dir()
    assert run(["--resume", "--output", str(copied)]) == 0
    assert "is finished at step 2" in capsys.readouterr().out


def test_a_lost_run_is_refused_and_begins_again_when_asked(copied, monkeypatch, capsys):
    shutil.rmtree(copied / "checkpoints")
    files = {path.name: path.read_bytes() for path in copied.iterdir()}
    assert run(["--resume", "--output", str(copied)]) == 2
    assert "the run had saved step 4, but" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in copied.iterdir()} == files
    monkeypatch.setattr(loop, "_compile", lambda *_: lambda state, batch: (state, FIGURES))
    monkeypatch.setattr(loop, "_finish", lambda *_: {})
    assert run(["--resume", "0", "--output", str(copied), "--train.steps", "1"]) == 0
    assert len(logged(copied, "metrics.dropped.jsonl")) == 5 and logged(copied) == [(1, False)]


@pytest.mark.parametrize("options", [("--train.steps", "0"), ("--train.steps", "20", "--train.stop_after", "0")])
def test_a_run_that_would_end_before_is_finished_and_left_as_it_is(copied, options, capsys):
    before = (copied / "config.yaml").read_bytes()
    assert run(["--resume", "--output", str(copied), "--optim.lr", "0.5", *options]) == 0
    assert "is finished at step 4: nothing is trained" in capsys.readouterr().out
    assert (copied / "config.yaml").read_bytes() == before and len(logged(copied)) == 5


def test_a_run_does_not_go_back_to_beyond_its_end(copied, capsys):
    assert run(["--resume", "4", "--train.steps", "3", "--output", str(copied)]) == 2
    assert "--resume 4: the run would end before, at step 3" in capsys.readouterr().err
    assert Checkpoints(copied / "checkpoints").steps() == [2, 4]


def test_a_changed_digit_and_a_foreign_line_are_told(copied, capsys):
    file, log = copied / "config.yaml", copied / "metrics.jsonl"
    text = file.read_text()
    assert "weight_decay: 0.1\n" in text
    file.write_text(text.replace("weight_decay: 0.1\n", "weight_decay: 0.7\n"))
    log.write_bytes(log.read_bytes() + b'{"step": "x"}\n{"step": null}\n')
    assert run(["--resume", "--output", str(copied)]) == 0
    assert "changed since: optim.weight_decay 0.1 -> 0.7" in capsys.readouterr().out
