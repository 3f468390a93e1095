"""Lock files and comparisons of two explanations, as the command runs them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from ledger_layouts import config, ledger, program_for

from jaxshard import cli
from jaxshard.insight import explain


@pytest.fixture(scope="module")
def small():
    return ledger(program_for(config("dp=4,tp=2", 1, precision="fp32"), "cpu:8"), "cpu:8")


@pytest.fixture
def command(small, monkeypatch, tmp_path):
    """Runs a command line on the small explanation, without compiling it again; returns the exit code."""
    monkeypatch.chdir(tmp_path)
    found = [small]
    monkeypatch.setattr(explain, "explain_config", lambda *_: found[0])

    def run(line: str, explanation=None) -> int:
        found[0] = explanation or small
        return cli.run(line.split())

    return run


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
    assert f"exceeds the lock: bytes over model: {now:,}, locked {now // 2:,} (+100.0 %)" in said
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


def test_a_lock_of_something_else_is_refused(command, small, capsys):
    command("explain --lock a.json")
    capsys.readouterr()
    assert command("explain --lock a.json", replace(small, mesh="dp=8")) == 2
    error = capsys.readouterr().err
    assert "is of mesh 'dp=4,tp=2', and this is 'dp=8'" in error and "keep a file for each" in error
    assert command("explain --lock nowhere/a.json") == 2


def test_two_explanations_are_compared(command, small, capsys):
    halved = replace(small, rows=tuple(replace(row, count=2 * row.count) for row in small.rows))
    for name, explanation in (("a.json", small), ("b.json", halved)):
        capsys.readouterr()
        assert command("explain --json", explanation) == 0
        Path(name).write_text(capsys.readouterr().out)
    assert command("explain --compare a.json b.json") == 0
    said = capsys.readouterr().out
    assert "bytes over model" in said and "+100.0 %" in said and "row-parallel output" in said
    assert command("explain --compare a.json a.json") == 0
    assert "no difference" in capsys.readouterr().out
    assert command("explain --compare a.json c.json") == 2
    assert "explain --json > c.json" in capsys.readouterr().err
