"""The scripts that hold predicted times against measured and published runs, and the constants that they fit."""

import importlib.util
import os
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from jaxshard.analysis.cost import step_time
from jaxshard.analysis.efficiency import MEGATRON_DEEPSPEED, Constants
from jaxshard.analysis.kernels import MATRIX_UNITS
from jaxshard.errors import InputError


def benchmark(name: str):
    folder = Path(__file__).parent.parent / "benchmarks"
    sys.path.insert(0, str(folder))
    try:
        spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(folder))
    return module


def test_constants_are_physical():
    constants = Constants()
    shares = ("misaligned", "memory", "slow_links", "fast_links", "flash", "borrowed")
    assert all(0 < getattr(constants, name) < 1 for name in shares)
    waits = {f.name for f in fields(Constants)} - {*shares, "long_rows"}
    assert all(0 < getattr(constants, name) < 1e-3 for name in waits)
    assert all(0 < unit.best <= 1 for unit in MATRIX_UNITS.values())
    assert len(fields(Constants)) <= 13
    assert set(benchmark("planner_accuracy").BOUNDS) == {
        *("misaligned", "dispatch", "engine", "long_rows", "rendezvous", "host_skew")
    }  # what is fitted


def test_published_runs_of_compiled_programs_are_met():
    runs = benchmark("published_runs")
    errors = []
    for run in runs.PUBLISHED:
        tokens = run.layout.global_batch * run.seq_len / run.layout.devices
        errors.append(abs(tokens / run.seconds(None).total / run.tokens_per_second - 1))
    assert max(errors) < 0.12, errors
    assert np.mean(errors) < 0.07


def test_regret_and_rank_correlation_by_hand():
    accuracy = benchmark("planner_accuracy")
    columns = {name: np.ones(3) for name in accuracy.COLUMNS}
    rows = accuracy.Rows(columns | {"measured_ms": np.array([10.0, 12.0, 20.0])})
    assert accuracy.regrets(rows, np.array([2.0, 1.0, 3.0])) == pytest.approx([20])
    assert accuracy.regrets(rows, np.array([1.0, 2.0, 3.0])) == pytest.approx([0])
    assert accuracy.rank_correlation(np.array([1.0, 2.0, 3.0]), np.array([3.0, 2.0, 1.0])) == pytest.approx(-1)


ROW = {
    **dict(gpus=8, global_batch=16, microbatch_sequences=2, d_model=1024, n_heads=16, n_layers=24, seq_len=1024),
    **dict(tp=2, dp=4, pp=1, measured_ms=500.0),
}


def written(path, row):
    path.write_text(",".join(row) + "\n" + ",".join(str(value) for value in row.values()) + "\n")
    return str(path)


def test_rows_are_predicted_under_their_stated_conditions(tmp_path):
    accuracy = benchmark("planner_accuracy")
    rows = accuracy.read(written(tmp_path / "rows.csv", ROW))
    arch, layout, seq_len = accuracy.setup(rows)
    assert (layout.remat, layout.precision, layout.zero, layout.schedule) == ("full", "fp16", 0, "1f1b")
    assert (int(arch.vocab_size[0]), int(arch.d_ff[0]), int(seq_len[0])) == (50256, 4096, 1024)  # 2 shards of 25128
    assert accuracy.STATED.predict(rows)[0] > accuracy.Conditions("none").predict(rows)[0]
    hidden = step_time(arch, layout, accuracy.MACHINE, seq_len, MEGATRON_DEEPSPEED).data_comm_hidden
    assert float(hidden[0]) == 0


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--target", "a101:8"], "unknown chip 'a101'"),
        (["--target", "cpu:8"], "no step time can be predicted"),
        (["--measured", "absent.csv"], "cannot be read"),
    ],
)
def test_bad_input_to_the_accuracy_script_is_one_line(arguments, said, tmp_path, monkeypatch, capsys):
    accuracy = benchmark("planner_accuracy")
    monkeypatch.setattr(
        sys, "argv", ["planner_accuracy.py", "--measured", written(tmp_path / "rows.csv", ROW), *arguments]
    )
    assert accuracy.main() == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_a_file_without_the_columns_says_which_are_missing(tmp_path):
    accuracy = benchmark("planner_accuracy")
    path = written(tmp_path / "rows.csv", {name: value for name, value in ROW.items() if name != "tp"})
    with pytest.raises(InputError, match="no column tp"):
        accuracy.read(path)


def test_measured_rows():
    """Needs the rows: JAXSHARD_MEASURED names their files, separated as in PATH."""
    paths = os.environ.get("JAXSHARD_MEASURED")
    if not paths:
        pytest.skip("JAXSHARD_MEASURED is not set")
    accuracy = benchmark("planner_accuracy")
    rows = accuracy.joined(accuracy.read(path) for path in paths.split(os.pathsep))
    found = accuracy.accuracy(rows)
    for part, limit in (("one node", 7), ("several nodes", 9)):
        if part in found:
            assert found[part]["MAPE %"] <= limit
    assert found["all"]["regret median %"] <= 1
    assert found["all"]["regret p90 %"] <= 6
