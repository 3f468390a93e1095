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
    assert len(fields(Constants)) <= 12
    assert set(benchmark("planner_accuracy").BOUNDS) == {
        *("misaligned", "dispatch", "engine", "long_rows", "rendezvous")
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
    accuracy, rows_of = benchmark("planner_accuracy"), benchmark("measured_rows")
    columns = {name: np.ones(3) for name in rows_of.COLUMNS}
    rows = accuracy.Rows(columns | {"measured_ms": np.array([10.0, 12.0, 20.0])})
    assert accuracy.regrets(rows, np.array([2.0, 1.0, 3.0])) == pytest.approx([20])
    assert accuracy.regrets(rows, np.array([1.0, 2.0, 3.0])) == pytest.approx([0])
    assert accuracy.rank_correlation(np.array([1.0, 2.0, 3.0]), np.array([3.0, 2.0, 1.0])) == pytest.approx(-1)


def several(**changed):
    """Rows as columns: those of ROW, with lists of values for some."""
    count = len(next(iter(changed.values())))
    columns = {name: np.full(count, value, float) for name, value in ROW.items()}
    return benchmark("measured_rows").Rows(columns | {name: np.array(v, float) for name, v in changed.items()})


def test_the_rule_takes_the_least_tp_then_the_least_pp_then_the_largest_microbatch():
    rows = several(tp=[2, 1, 1, 1], pp=[1, 2, 1, 1], microbatch_sequences=[8, 8, 1, 2])
    assert np.argsort(benchmark("measured_rows").by_rule(rows)).tolist() == [3, 2, 1, 0]


def test_measured_rows_correct_others_with_the_same_block():
    """Of two rows that took twice as long as predicted, one with another number of layers has the block of row 0."""
    known = several(n_layers=[12, 12], tp=[2, 2])
    asked = several(n_layers=[24, 24, 24], tp=[2, 4, 2], microbatch_sequences=[2, 2, 4])
    corrected = benchmark("block_evidence").corrected
    found = corrected(known.columns, np.array([2.0, 2.0]), asked.columns, np.array([10.0, 10.0, 10.0]))
    assert found == pytest.approx([10 * 2 ** (2 / 3), 10, 10])  # the model's own word counts as a third row


def test_held_out_rows_share_no_group_with_the_rest():
    rows_of = benchmark("measured_rows")
    rows = several(n_layers=np.repeat(np.arange(12, 22), 3))
    fifths = rows_of.fifths(rows)
    assert all(len({*fifths[group]}) == 1 for group in rows.groups()) and {*fifths} == {0, 1, 2, 3, 4}
    left = rows_of.unseen(rows, rows.where(fifths == 0))
    assert sorted(left.columns["n_layers"]) == sorted(rows.columns["n_layers"][fifths != 0])


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
        (["--known", "absent.csv"], "cannot be read"),
        (["--known", "rows.csv"], "none is left to predict"),
    ],
)
def test_bad_input_to_the_accuracy_script_is_one_line(arguments, said, tmp_path, monkeypatch, capsys):
    accuracy = benchmark("planner_accuracy")
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "rows.csv", ROW)
    monkeypatch.setattr(sys, "argv", ["planner_accuracy.py", "--measured", "rows.csv", *arguments])
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
    accuracy, rows_of = benchmark("planner_accuracy"), benchmark("measured_rows")
    rows = accuracy.joined(accuracy.read(path) for path in paths.split(os.pathsep))
    found = accuracy.accuracy(rows)
    for part, limit in (("one node", 6.2), ("several nodes", 8.1)):
        if part in found:
            assert found[part]["MAPE %"] <= limit
            assert found[part]["regret p90 %"] <= min(11, found[part]["rule's p90 %"])
    assert found["all"]["regret median %"] <= 1
    fifths = rows_of.fifths(rows)
    for part in range(5):  # other groups' rows tell what sizes do not
        known, asked = rows.where(fifths != part), rows.where(fifths == part)
        assert accuracy.accuracy(asked, known=known)["all"]["regret p90 %"] <= 4
