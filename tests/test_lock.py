"""Lock files and comparisons of two explanations, as the command runs them."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import rich.console
from ledger_layouts import config, ledger, program_for

from jaxshard.analysis.compare import Difference
from jaxshard.commands import cli, explain
from jaxshard.config import Config, grouped
from jaxshard.config.file import config_to_yaml, run_to_yaml, saved_values
from jaxshard.console import Console

LAYOUT = ["--mesh", "dp=4,tp=2", "--zero", "1"]


@pytest.fixture(scope="module")
def small():
    return ledger(program_for(config("dp=4,tp=2", 1, precision="fp32"), "cpu:8"), "cpu:8")


@pytest.fixture
def command(small, monkeypatch, tmp_path):
    """Runs a command line on the small explanation, without compiling it again; returns the exit code.

    The layout that the line names, by default the small one's, matters to locks only.
    """
    monkeypatch.chdir(tmp_path)
    found = [small]
    monkeypatch.setattr(explain, "explain_config", lambda *_: found[0])

    def run(line: str, explanation=None) -> int:
        found[0] = explanation or small
        return cli.run([*line.split(), *([] if "--mesh" in line or "--compare" in line else LAYOUT)])

    return run


def test_what_is_waited_for_is_said_and_not_within_json(command, capsys):
    assert command("explain") == 0
    assert capsys.readouterr().out.startswith("compiling the step for cpu:8 ...\ncpu:8, mesh dp=4,tp=2")
    assert command("explain --target cpu:8 --json") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["target"] == "cpu:8" and err.startswith("compiling the step for cpu:8 ...\n")


def changed(file: str, **figures: float) -> None:
    lock = json.loads(Path(file).read_text())
    lock["figures"] |= {name.replace("_", " "): value for name, value in figures.items()}
    Path(file).write_text(json.dumps(lock))


def test_a_lock_is_written_and_holds(command, capsys):
    assert command("explain --lock a.json") == 0
    lock = json.loads(Path("a.json").read_text())
    assert (lock["target"], lock["mesh"], lock["zero"]) == ("cpu:8", "dp=4,tp=2", 1)
    assert {"FLOPs of one device", "memory.peak", "bytes over data", "bytes over model"} <= set(lock["figures"])
    assert command("explain --lock a.json") == 0
    assert "held against a.json" in capsys.readouterr().out


def test_an_exceeded_lock_fails_with_the_difference(command, small, capsys):
    command("explain --lock a.json")
    now = json.loads(Path("a.json").read_text())["figures"]["bytes over model"]
    changed("a.json", bytes_over_model=now // 2)
    assert command("explain --lock a.json") == 1
    said = capsys.readouterr().out
    assert f"exceeds the lock: bytes over tp: {now:,}, locked {now // 2:,} (+100.0 %)" in said
    assert command("explain --lock a.json --tolerance 1.1") == 0
    # Using less than what is locked is no failure.
    changed("a.json", bytes_over_model=2 * now)
    assert command("explain --lock a.json") == 0


def test_the_peak_is_locked_and_new_axes_are_seen(command, small, capsys):
    command("explain --lock a.json")
    more = replace(small, memory=replace(small.memory, peak=2 * small.memory.peak))
    assert command("explain --lock a.json", more) == 1
    assert "memory.peak" in capsys.readouterr().out
    odd = replace(small, rows=(*small.rows, replace(small.rows[0], axes=("replica",))))
    assert command("explain --lock a.json", odd) == 1
    assert "bytes over replica" in capsys.readouterr().out


def test_a_lock_of_something_else_is_refused_before_compiling(command, monkeypatch, capsys):
    command("explain --lock a.json")
    monkeypatch.setattr(explain, "explain_config", lambda *_: pytest.fail("compiled"))
    capsys.readouterr()
    for line, was, now in (
        ("--mesh dp=8 --zero 1", "mesh 'dp=4,tp=2'", "'dp=8'"),
        ("--mesh dp=4,tp=2", "zero 1", "0"),
        ("--mesh dp=4,tp=2 --zero 1 --target h100:8", "target 'cpu:8'", "'h100:8'"),
    ):
        assert command(f"explain --lock a.json {line}") == 2
        error = capsys.readouterr().err
        assert f"is of {was}, and this is {now}: keep a file for each" in error
    assert command("explain --lock nowhere/a.json") == 2


def test_unexpected_traffic_above_the_threshold_is_exit_code_1(command, small, capsys):
    extra = Difference("an activation travels over data", ("data",), small.check.threshold + 1)
    assert command("explain", replace(small, check=replace(small.check, unexpected=(extra,)))) == 1
    assert "unexpected: " in capsys.readouterr().out
    little = replace(extra, bytes=small.check.threshold)
    assert command("explain", replace(small, check=replace(small.check, unexpected=(little,)))) == 0
    assert "no unexpected traffic above" in capsys.readouterr().out


def test_two_explanations_are_compared(command, small, capsys):
    halved = replace(small, zero=2, rows=tuple(replace(row, count=2 * row.count) for row in small.rows))
    for name, explanation in (("a.json", small), ("b.json", halved)):
        capsys.readouterr()
        assert command("explain --json", explanation) == 0
        Path(name).write_text(capsys.readouterr().out)
    assert command("explain --compare a.json b.json") == 0
    said = capsys.readouterr().out
    assert "bytes over tp" in said and "+100.0 %" in said and "row-parallel output" in said
    assert ": all-reduce over tp" in said and "over model" not in said and "over data" not in said
    assert [line.split() for line in said.splitlines() if line.startswith("  zero")] == [["zero", "1", "2"]]
    assert command("explain --compare a.json a.json") == 0
    assert "no difference" in capsys.readouterr().out
    assert command("explain --compare a.json c.json") == 2
    assert "explain --json > c.json" in capsys.readouterr().err
    for line in ("--compare a.json", "--compare", "--compare=a.json --json"):
        assert command(f"explain {line}") == 2
        assert capsys.readouterr().err.startswith("error: --compare needs two values, written --compare A B. Two files")


@pytest.mark.parametrize(
    "line,words",
    [
        ("--mesh dp=2 --tolerance 0.1", "--tolerance 0.1 is of --lock alone"),
        ("--compare a.json b.json --mesh dp=2 --target h100:8", "drop --target h100:8 --mesh dp=2"),
        ("--compare a.json b.json --output runs", "drop --output runs"),
        ("--compare a.json b.json --threshold 3", "--compare compiles nothing, and so --threshold"),
        ("--mesh pp=2 --schedule --threshold 3", "--schedule compiles nothing, and so --threshold"),
        ("--compare a.json b.json --tolerance 1", "--tolerance 1 is of --lock alone"),
    ],
)
def test_options_that_nothing_would_read_are_refused(line, words, monkeypatch, capsys):
    monkeypatch.setattr(explain, "explain_config", lambda *_: pytest.fail("compiled"))
    assert cli.run(["explain", *line.split()]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1


@pytest.mark.parametrize(
    "text",
    ["3", "{}", "[" * 100_000, *(json.dumps({"figures": bad}) for bad in (3, [], {"memory.peak": "x"}, {"a": True}))],
)
def test_what_is_no_lock_is_refused_before_compiling(text, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(explain, "explain_config", lambda *_: pytest.fail("compiled"))
    (tmp_path / "a.json").write_text(text)
    assert cli.run(["explain", "--lock", str(tmp_path / "a.json")]) == 2
    error = capsys.readouterr().err
    assert "not what explain --lock writes" in error and error.count("\n") == 1


def test_a_folder_is_no_lock(tmp_path, capsys):
    assert cli.run(["explain", "--lock", str(tmp_path)]) == 2
    assert "Is a directory" in capsys.readouterr().err


ROW = {"reason": "a", "kind": "all-reduce", "axes": ["data"], "bytes": 1, "count": 1}
GOOD = {"memory": {"peak": 1}, "bytes_by_axis": {}, "flops": 1.0, "collectives": [ROW]}


@pytest.mark.parametrize(
    "bad",
    [
        {"collectives": []},
        *(GOOD | {"collectives": [{**ROW, name: None}]} for name in ROW),
        GOOD | {"memory": {"peak": "x"}},
        GOOD | {"flops": None},
    ],
)
def test_what_is_no_explanation_is_not_compared(bad, tmp_path, capsys):
    for name, held in (("good.json", GOOD), ("bad.json", bad)):
        (tmp_path / name).write_text(json.dumps(held))
    files = [str(tmp_path / name) for name in ("good.json", "bad.json")]
    assert cli.run(["explain", "--compare", *files]) == 2
    error = capsys.readouterr().err
    assert "bad.json: not what explain --json prints" in error and error.count("\n") == 1
    assert cli.run(["explain", "--compare", files[0], files[0]]) == 0


def test_a_report_goes_into_the_folder_that_is_named_and_no_other(command, capsys):
    for folder in ("runs/default", "mine"):
        Path(folder).mkdir(parents=True)
    assert command("explain") == 0
    assert not Path("runs/default/report.html").exists()
    capsys.readouterr()
    assert command("explain --output mine") == 0
    assert Path("mine/report.html").exists()
    assert capsys.readouterr().out.startswith("mine holds no run: what is explained is what the other options say\n")


def test_an_output_folder_that_is_not_there_is_refused(command, monkeypatch, capsys):
    monkeypatch.setattr(explain, "explain_config", lambda *_: pytest.fail("compiled"))
    Path("runs/first").mkdir(parents=True)
    Path("runs/first/config.yaml").write_text(run_to_yaml(saved_values(Config())))
    for line in ("explain --output runs/frist", "explain --schedule --output runs/frist"):
        assert command(line) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: --output runs/frist: there is no such folder") and error.count("\n") == 1
        assert "(did you mean 'first'?)" in error


def test_the_run_that_is_named_is_explained(tmp_path, monkeypatch, capsys):
    """Its own configuration, options over it, as check does; without --output, or without a run there, the defaults."""
    monkeypatch.chdir(tmp_path)
    run_config = Config(output="first", **grouped(mesh="dp=2", zero=3))
    for folder in ("first", "runs/default", "empty"):
        Path(folder).mkdir(parents=True)
    for folder in ("first", "runs/default"):
        Path(folder, "config.yaml").write_text(run_to_yaml(saved_values(run_config)))
    understood = lambda line: cli.understand(line.split()).config
    for line, zero in (("explain --output first", 3), ("explain --output first --zero 2", 2)):
        assert (understood(line).mesh, understood(line).zero) == ("dp=2", zero)
    for line in ("explain", "explain --output empty"):
        assert understood(line).zero == Config().zero
    Path("other.yaml").write_text(config_to_yaml(Config()))
    assert cli.run(["explain", "--config", "other.yaml", "--output", "first"]) == 2
    assert "name two runs; explain takes one of them" in capsys.readouterr().err
    assert understood("explain --config other.yaml --output empty").output == "empty"


def test_long_lists_of_weights_are_cut_in_a_pipe(command, small, capsys):
    paths = ("attention.key", "attention.value", "mlp.down", "mlp.gate", "mlp.up", "norm1.scale", "norm2.scale")
    names = tuple(f"blocks.{path}" for path in paths)
    assert command("explain", replace(small, rows=tuple(replace(row, parameters=names) for row in small.rows))) == 0
    said = capsys.readouterr().out
    assert "blocks.attention.key, blocks.attention.value … and 5 more (" in said and "mlp.gate" not in said


def test_rows_that_are_alike_are_one_line_with_all_their_calls(command, small, capsys):
    row = replace(small.rows[0], reason="a reason", bytes=5 * 2**20, count=4, exact=True, is_async=False)
    others = (replace(row, name="b"), replace(row, name="c"))
    for different in (replace(row, bytes=6 * 2**20), replace(row, source="x.py:1"), replace(row, count=1)):
        found = replace(small, rows=(row, *others, different))
        assert command("explain", found) == 0
        lines = [line.split() for line in capsys.readouterr().out.splitlines() if "a reason" in line]
        calls = [line[line.index("MiB") + 1] for line in lines]
        assert sorted(calls) == sorted(["12", str(different.count)])
        assert len(found.to_dict()["collectives"]) == 4


def test_a_narrow_terminal_keeps_words_whole_and_an_optimizers_many_collectives_together(small):
    optimizer = replace(
        small.rows[0], family="optimizer", reason="arithmetic of the optimizer", source="muon.py:1", note=""
    )
    many = [replace(optimizer, bytes=2**10 * i, count=1, source=f"muon.py:{i}") for i in range(1, 8)]
    file = io.StringIO()
    console = Console(file)
    console._rich = rich.console.Console(file=file, force_terminal=True, color_system=None, width=80)
    replace(small, rows=(*small.rows, *many)).show(console)
    said = file.getvalue()
    assert max(map(len, said.splitlines())) <= 80
    assert said.count("arithmetic of the optimizer") == 1 and "x 7" in said and "to 7.00 KiB" in said
    assert all(word in said for word in ("reduction", "collectives", "meanwhile"))
