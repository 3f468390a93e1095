"""A run that goes on: with the same rows or not at all, as it was configured, without what was of one run alone."""

import json
import shutil
import sysconfig
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxshard.commands import train
from jaxshard.commands.cli import run, understand
from jaxshard.commands.generate import _other_tokenizer
from jaxshard.config import Config, DataConfig, LogConfig, ParallelConfig, TrainConfig
from jaxshard.config.file import load_run, record_checksum, run_to_yaml, saved_values
from jaxshard.data import build, load_tokenizer, with_whole_paths
from jaxshard.data.corpus import read_documents
from jaxshard.errors import InputError
from jaxshard.training import loop
from jaxshard.training.program import Program
from jaxshard.training.start import write_config

MODEL = ["--model.family", "llama", "--model.d_model", "8", "--model.n_layers", "1", "--model.n_heads", "2"]
TINY = [*MODEL, "--mesh", "dp=1", "--data.seq_len", "16", "--log.tensorboard", "false", "--log.every", "50"]


def write_corpus(path: Path, documents: int) -> None:
    """Documents of 48 letters, none like another: three rows each, and all rows differ."""
    draw = np.random.default_rng(0)
    texts = ["".join(map(chr, draw.integers(97, 123, 48))) for _ in range(documents)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


@pytest.fixture(scope="module")
def taken() -> list[bytes]:
    """The inputs of every row that a step or an evaluation has taken, in their order."""
    return []


@pytest.fixture(scope="module")
def finished(tmp_path_factory, taken) -> Path:
    """A run of 100 updates of 4 rows; its corpus, of 180 training rows, lies beside it."""
    folder = tmp_path_factory.mktemp("resume")
    write_corpus(folder / "corpus.jsonl", 70)
    with pytest.MonkeyPatch.context() as patch:
        watch(patch, taken)
        options = ["--train.steps", "100", "--train.global_batch", "4"]
        paths = ["--data.path", str(folder / "corpus.jsonl"), "--output", str(folder / "run")]
        assert run([*TINY, *options, "--data.eval_fraction", "0.1", *paths]) == 0
    return folder / "run"


def watch(patch: pytest.MonkeyPatch, taken: list[bytes]) -> None:
    place = Program.place
    patch.setattr(train, "sample", lambda *_: "")
    patch.setattr(
        Program, "place", lambda self, batch, *a: (taken.extend(map(bytes, batch["inputs"])), place(self, batch, *a))[1]
    )


@pytest.fixture
def copied(finished, tmp_path) -> Path:
    """A copy of the run and of its corpus, which may be changed: the run reads the copy."""
    corpus = shutil.copy(finished.with_name("corpus.jsonl"), tmp_path)
    folder = shutil.copytree(finished, tmp_path / "run")
    moved = lambda text: text.replace(str(finished.with_name("corpus.jsonl")), str(corpus))
    file = folder / "config.yaml"
    file.write_text(moved(file.read_text()))
    resign(folder, moved)
    return folder


def resign(folder: Path, change: Callable[[str], str]) -> None:
    """Changes the JSON of checkpoint 100, and gives it the checksum of what it holds now."""
    meta = folder / "checkpoints" / "100" / "meta" / "metadata"
    record = json.loads(change(meta.read_text()))
    del record["checksum"]
    meta.write_text(json.dumps(record | {"checksum": record_checksum(record)}))


def without(*names: str) -> Callable[[str], str]:
    """A change for `resign`: leaves out what the run recorded under these names."""

    def change(text: str) -> str:
        record = json.loads(text)
        for name in names:
            del record["meta"][name]
        return json.dumps(record)

    return change


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def resumed(folder: Path) -> list[str]:
    return ["train", "--resume", "--output", str(folder)]


def reached(*_) -> None:
    """In place of what would compile: everything before it was passed."""
    raise InputError("reached")


def refused(folder: Path, capsys, *options: str, command: str = "train") -> str:
    """The message of a run that is not gone on with, and that is as it was."""
    before = contents(folder)
    assert run([command, *["--resume"] * (command == "train"), "--output", str(folder), *options]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and contents(folder) == before, error
    return error


# The data.


def test_another_batch_skips_and_repeats_no_row(finished, copied, taken, monkeypatch, capsys):
    dataset = build(load_run(finished / "config.yaml").data)
    rows = [bytes(row) for row in dataset.train.batch(np.arange(len(dataset.train)))["inputs"]]
    assert len(set(rows)) == len(rows) > 180
    stream = [row for row in taken if row in set(rows)]
    assert len(stream) == 400
    monkeypatch.setattr(loop.Evaluator, "possible", False)
    watch(monkeypatch, stream)
    more = ["--train.steps", "120", "--train.global_batch", "8"]
    assert run([*resumed(copied), *more]) == 0
    assert "train.global_batch 4 -> 8" in capsys.readouterr().out and len(stream) == 400 + 20 * 8
    for start in range(0, 560, len(rows)):
        epoch = stream[start : start + len(rows)]
        assert sorted(epoch) == sorted(rows) or (start + len(rows) > 560 and len(set(epoch)) == len(epoch))


def change_text(corpus: Path) -> None:
    corpus.write_text(corpus.read_text().replace("a", "b", 1))


def cut(corpus: Path) -> None:
    corpus.write_text("".join(corpus.read_text().splitlines(keepends=True)[:35]))


def append(corpus: Path) -> None:
    with corpus.open("a") as file:
        file.write('{"text": "one more document"}\n')


CHANGES = {
    "one letter": (change_text, (), "(70 documents, 3,430 tokens) and is"),
    "cut": (cut, (), "(70 documents, 3,430 tokens) and is"),
    "appended": (append, (), "(71 documents, 3,448 tokens)"),
    "seq_len": (None, ("--data.seq_len", "8"), "data.seq_len was 16 and is 8"),
    "pack": (None, ("--data.pack", "false"), "data.pack was True and is False"),
    "eval_fraction": (None, ("--data.eval_fraction", "0.2"), "data.eval_fraction was 0.1 and is 0.2"),
    "seed": (None, ("--train.seed", "1"), "train.seed was 0 and is 1"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_data_is_refused_with_what_changed(name, copied, capsys):
    change, options, words = CHANGES[name]
    if change:
        change(copied.with_name("corpus.jsonl"))
    error = refused(copied, capsys, *options, "--train.steps", "101")
    assert words in error and "--allow_changed_data" in error
    assert error.count("the text was ") == (change is not None)


def test_changed_data_is_gone_on_with_when_asked_for_and_told_by_eval(copied, monkeypatch, capsys):
    append(copied.with_name("corpus.jsonl"))
    assert run(["eval", "--output", str(copied), "--json"]) == 0
    captured = capsys.readouterr()
    (change,) = json.loads(captured.out)["changed_data"]
    assert change in captured.err and "not the text of the run" in captured.err
    monkeypatch.setattr(loop, "_compile", reached)
    assert run([*resumed(copied), "--train.steps", "101", "--allow_changed_data"]) == 2
    error = capsys.readouterr().err
    assert "It goes on behind row 400 of the new order" in error and "error: reached" in error
    assert run([*TINY, "--output", str(copied / "new"), "--allow_changed_data"]) == 2
    assert "give --resume too" in capsys.readouterr().err


def test_text_of_another_tokenizer_is_told(copied):
    said = lambda: _other_tokenizer(load_tokenizer("bytes"), copied / "checkpoints", 100)
    assert said() == ""
    resign(copied, lambda text: text.replace('"tokenizer": "bytes", "seq_len"', '"tokenizer": "1234:0", "seq_len"'))
    assert "it is bytes and was 1234:0" in said()


def test_a_checkpoint_without_a_fingerprint_goes_on_where_its_batch_was(copied, monkeypatch, capsys):
    resign(copied, without("data", "config"))
    starts = []
    monkeypatch.setattr(loop, "_compile", lambda *_: None)
    monkeypatch.setattr(loop, "run_steps", lambda parts, *_: starts.append(parts.rows(100)) or reached())
    assert run([*resumed(copied), "--train.steps", "101", "--train.global_batch", "8"]) == 2
    assert starts == [400] and "has no fingerprint of its data" in capsys.readouterr().err


def test_the_fingerprint_is_of_the_text_and_not_of_its_files(tmp_path):
    """And of where documents end."""
    files = {
        "a.jsonl": ["one text", "another"],
        "b.parquet": ["one text", "another"],
        "c.jsonl": ["one tex", "tanother"],
    }
    for name, texts in files.items():
        path = tmp_path / name
        if name.endswith("parquet"):
            pq.write_table(pa.table({"text": texts}), path)
        else:
            path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    a, b, c = (build(DataConfig(str(tmp_path / name), seq_len=4)).fingerprint(3) for name in files)
    assert a == b and a.changes_since(vars(a)) == [] and a.text != c.text
    assert a.changes_since({"seed": 4}) == ["train.seed was 4 and is 3"]
    assert a.changes_since({"seed": 4}, order=False) == []


def test_the_fingerprint_of_ids_is_of_the_ids_and_the_tokenizer(tmp_path):
    ids = np.arange(400, dtype=np.uint16) % 10
    found = []
    for number, tokenizer in enumerate(("ids", "ids", "ids:9")):
        path = tmp_path / f"{number}.bin"
        (ids if number else ids[::-1]).astype("<u2").tofile(path)
        found.append(build(DataConfig(str(path), tokenizer, seq_len=8, eval_fraction=0)).fingerprint(0))
    assert found[0].text != found[1].text == found[2].text
    assert [found[n].tokenizer for n in (1, 2)] == ["ids", "ids:9"]


# Words that are no paths.


@pytest.mark.parametrize("word", ["stdlib", "bytes", "ids", "ids:50256"])
@pytest.mark.parametrize("kind", ["folder", "file", "nothing"])
def test_a_word_stays_a_word_whatever_lies_there(word, kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if kind == "folder":
        Path(word).mkdir()
    elif kind == "file":
        Path(word).write_text("text")
    data = (lambda text: DataConfig(path=text)) if word == "stdlib" else (lambda text: DataConfig(tokenizer=text))
    assert with_whole_paths(data(word)) == data(word)
    assert with_whole_paths(data(f"./{word}")) == data(str(tmp_path / word))


def test_a_folder_of_a_words_name_is_read_when_it_is_written_as_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("stdlib").mkdir()
    Path("stdlib", "a.txt").write_text("a text of our own\n" * 9)
    assert next(read_documents(DataConfig("./stdlib"))).source.startswith("stdlib/a.txt")
    assert next(read_documents(DataConfig("stdlib"))).source.startswith(sysconfig.get_paths()["stdlib"])
    for word in ("bytes", "ids", "ids:9"):
        Path(word).mkdir()
        with pytest.raises(InputError, match="folder without a tokenizer"):
            load_tokenizer(f"./{word}")
        assert load_tokenizer(word).name == word


# What belongs to one run.


def test_a_finished_run_keeps_its_configuration(copied, capsys):
    before = contents(copied)
    for options in (
        ["--optim.lr", "0.5"],
        ["--train.steps", "7"],
        ["--train.steps", "200", "--train.stop_after", "99"],
    ):
        assert run([*resumed(copied), *options]) == 0
        raised = options[-2]
        assert f"raise {raised if '.s' in raised else '--train.steps'} (now" in capsys.readouterr().out
    assert contents(copied) == before


def test_what_ends_with_a_run_is_not_taken_over(tmp_path, monkeypatch, capsys):
    """Neither from a configuration of now nor from one that has it, as was saved before."""
    config = Config(train=TrainConfig(steps=10, stop_after=5), log=LogConfig(profile_steps=(2, 3)))
    write_config(config, tmp_path)
    expected = replace(config, train=TrainConfig(steps=10), log=LogConfig())
    assert (
        "stop_after: null" in (tmp_path / "config.yaml").read_text() and load_run(tmp_path / "config.yaml") == expected
    )
    (tmp_path / "config.yaml").write_text(run_to_yaml(saved_values(config)))
    assert load_run(tmp_path / "config.yaml") == expected
    assert understand(["train", "--resume", "--output", str(tmp_path)]).config.train.stop_after is None
    given = ["--train.stop_after", "7", "--log.profile_steps", "[6,6]"]
    found = understand(["train", "--resume", "--output", str(tmp_path), *given]).config
    assert (found.train.stop_after, found.log.profile_steps) == (7, (6, 6))


# Configurations that are not whole.


@pytest.mark.parametrize("share, command", [(0.0, "train"), (0.3, "eval"), (0.98, "train")])
def test_a_cut_configuration_is_refused_and_can_be_restored(share, command, copied, capsys):
    file, whole = copied / "config.yaml", (copied / "config.yaml").read_bytes()
    file.write_bytes(whole[: int(share * len(whole))])
    restored = copied / "config.from-100.yaml"
    restored.write_bytes(whole)  # So that nothing is new in the folder.
    error = refused(copied, capsys, command=command)
    assert str(file) in error and f"What checkpoint 100 recorded is in {restored} now" in error
    restored.rename(file)
    assert run([*resumed(copied)]) == 0 and "finished at step 100" in capsys.readouterr().out


def test_every_cut_of_a_configuration_is_noticed(tmp_path):
    write_config(Config(parallel=ParallelConfig(allow_replicated=("a", "b"))), tmp_path)
    file = tmp_path / "config.yaml"
    whole, found = file.read_text(), load_run(file)
    assert whole.endswith(" values\n")
    last = whole.rindex("#")
    for end in range(0, last, 23):
        file.write_text(whole[:end])
        with pytest.raises(InputError, match="There is no copy of it"):
            load_run(file)
    for end in (last, last - 1, last - 2):
        file.write_text(whole[:end])
        with pytest.raises(InputError, match="was cut"):
            load_run(file)
    file.write_text(whole)
    assert load_run(file) == found
    file.write_text(whole.replace("  remat: none\n", "").replace("train:\n", "train:\n  remat: none\n"))
    with pytest.raises(InputError, match="Runs that an earlier jaxshard saved are not read"):
        load_run(file)
    file.write_text(whole.replace("  seed: 0\n", ""))
    with pytest.raises(InputError, match=r"config.yaml is damaged: it holds \d+ of \d+ values"):
        load_run(file)


def test_an_earlier_configuration_is_named_and_a_run_may_be_stated_in_full(copied, monkeypatch, capsys):
    file = copied / "config.yaml"
    resign(copied, without("config"))
    whole = file.read_text()
    file.write_text("")
    assert "go on with --resume --config FILE" in refused(copied, capsys)
    (copied / "config.before-60.yaml").write_text(whole)
    (copied / "config.before-70.yaml").write_text("")
    assert f"{copied}/config.before-60.yaml: look at it, and copy it to {file}" in refused(copied, capsys)
    other = copied.with_name("stated.yaml")
    other.write_text(whole)
    monkeypatch.setattr(loop, "_compile", reached)
    assert run([*resumed(copied), "--config", str(other), "--train.steps", "101"]) == 2
    captured = capsys.readouterr()
    assert "error: reached" in captured.err and "damaged, is written anew" in captured.out
    assert load_run(file).train.steps == 101


# Folders that cannot be.


def test_what_stands_in_the_way_of_an_output_folder_is_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    (tmp_path / "gone").symlink_to(tmp_path / "target")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "target")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    gone = f"{tmp_path}/gone is a symbolic link to {tmp_path}/target, which is not there: make it, or remove the link"
    cases = {
        "gone": gone,
        "gone/run": gone,
        "file": f"{tmp_path}/file is a file and no folder",
        "file/run": f"{tmp_path}/file is a file and no folder",
        "link": f"{tmp_path}/link is a symbolic link to {tmp_path}/file, which is a file and no folder",
        "run": f"{tmp_path}/run/checkpoints is a symbolic link to {tmp_path}/target, which is not there",
        "loop": f"{tmp_path}/loop is a symbolic link to {tmp_path}/loop, which is not there",
    }
    for name, words in cases.items():
        for command in (TINY, ["train", "--resume=auto", *TINY]):
            assert run([*command, "--output", str(tmp_path / name)]) == 2
            error = capsys.readouterr().err
            assert words in error and "choose another --output" in error and error.count("\n") == 1
    assert not (tmp_path / "target").exists()
    monkeypatch.setattr("os.access", lambda *_: False)
    assert run([*TINY, "--output", str(tmp_path / "new" / "run")]) == 2
    assert f"this user may not write into {tmp_path};" in capsys.readouterr().err


def test_a_lost_configuration_is_restored_from_a_record_that_is_whole(copied, capsys):
    (copied / "config.yaml").unlink()
    meta = copied / "checkpoints" / "100" / "meta" / "metadata"
    whole = meta.read_text()
    record = json.loads(whole)
    record["meta"]["config"]["optim"]["lr"] = 7.0
    meta.write_text(json.dumps(record))
    assert "There is no copy of it" in refused(copied, capsys)
    meta.write_text(whole)
    assert run(resumed(copied)) == 2
    assert f"What checkpoint 100 recorded is in {copied / 'config.from-100.yaml'}" in capsys.readouterr().err
