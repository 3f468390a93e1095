"""The command `collectives`: every result is checked, bandwidths are those of nccl-tests, and plans can use the fit."""

import json
import math
import os
import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxshard.analysis import bandwidth
from jaxshard.analysis.bandwidth import COLLECTIVES, Measurement, cases, measure
from jaxshard.analysis.calibration import FITTED, calibrate, calibrated, fit, predicted, write_calibration
from jaxshard.analysis.efficiency import XLA, Constants
from jaxshard.analysis.links import fabric, with_measured
from jaxshard.analysis.roofline import seconds_text
from jaxshard.commands import cli
from jaxshard.commands.collectives import size_of
from jaxshard.errors import InputError
from jaxshard.parallel.axes import AXES, MeshShape
from jaxshard.parallel.mesh import build_mesh
from jaxshard.planner.confirm import compiler_missing
from jaxshard.xla.absent import mesh_for
from jaxshard.xla.hardware import Measured, parse_target

ROOT = Path(__file__).parent.parent
NAMES = [each.name for each in COLLECTIVES]


def mesh(**sizes: int) -> jax.sharding.Mesh:
    shape = MeshShape(**sizes)
    return build_mesh(shape, jax.devices("cpu")[: shape.devices])


def replaced(monkeypatch, name: str, run) -> None:
    """Puts another function in the place of one collective's, and measures only that."""
    (real,) = (each for each in COLLECTIVES if each.name == name)
    wrong = replace(real, run=lambda x, axis, n: run(real.run, x, axis, n))
    monkeypatch.setattr(bandwidth, "COLLECTIVES", (wrong,))


# What is measured.


def test_every_collective_over_every_axis_is_right():
    """Three members too: trees and parts that are no powers of two."""
    found = list(measure(mesh(data=3, model=2), 1024))
    assert [(row.axis, row.collective) for row in found] == [(a, name) for a in ("data", "model") for name in NAMES]
    assert all(row.correct and row.seconds > 0 and row.nodes == 1 for row in found)
    assert {row.bytes for row in found} == {1020, 1024}


def test_bandwidths_are_those_of_nccl_tests():
    factors = {"all_reduce": 1.75, "reduce_scatter": 0.875, "all_gather": 0.875, "all_to_all": 0.875}
    assert {each.name: each.factor(8) for each in COLLECTIVES} == dict.fromkeys(NAMES, 1) | factors
    (row,) = (row for row in measure(mesh(model=2), 1024) if row.collective == "reduce_scatter")
    assert row.algorithm_bandwidth == pytest.approx(1024 / row.seconds)
    assert row.bus_bandwidth == pytest.approx(512 / row.seconds)


def test_sizes_start_at_one_kib_and_end_at_the_largest():
    sizes = [size for _, size, each in cases(mesh(data=2), 70_000) if each.name == "reduce"]
    assert sizes == [1024, 4096, 16384, 65536]
    assert {size for _, size, _ in cases(mesh(replica=2, stage=2), 1)} == {1024}


@pytest.mark.parametrize("name", NAMES)
def test_one_wrong_number_on_one_device_is_seen(monkeypatch, name):
    replaced(monkeypatch, name, lambda real, x, axis, n: real(x, axis, n).at[-1].add(jax.lax.axis_index(axis) == 0))
    (row,) = measure(mesh(data=2), 1024)
    assert not row.correct


def test_a_sum_over_the_wrong_axis_is_seen(monkeypatch):
    other = {"data": "model", "model": "data"}
    replaced(monkeypatch, "all_reduce", lambda real, x, axis, n: real(x, other[axis], n))
    assert [row.correct for row in measure(mesh(data=2, model=2), 1024)] == [False, False]


def test_a_permute_the_wrong_way_round_is_seen(monkeypatch):
    back = lambda real, x, axis, n: jax.lax.ppermute(x, axis, [(i, (i - 1) % n) for i in range(n)])
    replaced(monkeypatch, "permute", back)
    assert not next(measure(mesh(data=4), 1024)).correct


OPCODES = {
    "all_reduce": "all-reduce",
    "reduce": "collective-permute",
    "reduce_scatter": "reduce-scatter",
    "all_gather": "all-gather",
    "all_to_all": "all-to-all",
    "permute": "collective-permute",
}


@pytest.mark.parametrize(("target", "broadcast"), [("cpu:8", "collective-permute"), ("h100:8", "collective-broadcast")])
def test_the_loop_holds_the_collective(target, broadcast):
    """A compiler that moved it out of the loop would have it timed once for many calls."""
    hardware = parse_target(target)
    if missing := compiler_missing(hardware):
        pytest.skip(missing)
    there = mesh_for(hardware, MeshShape(data=4, model=2))
    spread, whole = (NamedSharding(there, spec) for spec in (PartitionSpec(AXES), PartitionSpec()))
    x = jax.ShapeDtypeStruct((8, 1024), np.float32, sharding=spread)
    calls = jax.ShapeDtypeStruct((), np.int32, sharding=whole)
    for each in COLLECTIVES:
        text = bandwidth.program(there, "data", each).lower(x, calls).compile().as_text()
        (body,) = re.findall(r" while\(.*body=%?([\w.-]+)", text)
        inside = text[text.index(f"%{body} (") :].partition("\n}")[0]
        assert re.search(rf" {OPCODES.get(each.name, broadcast)}(-start)?\(", inside), each.name


# The command.


def test_a_wrong_result_is_named_and_fails(monkeypatch, capsys, tmp_path):
    replaced(monkeypatch, "all_gather", lambda real, x, axis, n: real(x, axis, n) + 1)
    file = tmp_path / "network.json"
    assert cli.run(["collectives", "--mesh", "tp=2", "--largest", "1KiB", "--calibration", str(file)]) == 1
    assert "WRONG: all_gather over tp, 1,024 bytes" in capsys.readouterr().out
    assert not file.exists()


def test_the_result_and_the_calibration_file(capsys, tmp_path):
    file = tmp_path / "network.json"
    line = ["collectives", "--mesh", "dp=2", "--largest", "4KiB", "--json", "--calibration", str(file)]
    assert cli.run(line) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["mesh"], result["devices"], result["processes"]) == ("dp=2", 2, 1)
    assert len(result["measurements"]) == 14 and result["measurements"][0]["axis"] == "dp"
    assert json.loads(file.read_text()) == result["calibration"]
    assert calibrated(parse_target("cpu:8"), file).measured == Measured(**result["calibration"]["measured"])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--mesh dp=1", "need two devices or more"),
        ("--mesh dp=2 --largest 64", "such as 64MiB"),
        ("--mesh dp=2 --largest lots", "such as 64MiB"),
        ("--mesh dp=2 --largest 1KiB --calibration /proc/none/x.json", "cannot be written"),
    ],
)
def test_bad_input_is_one_line(capsys, line, said):
    assert cli.run(["collectives", *line.split()]) == 2
    assert said in capsys.readouterr().err


def test_sizes_and_times_as_people_write_them():
    assert [size_of(text) for text in ("4096", "64MiB", "1 GiB", "8k", "2GB")] == [2**12, 2**26, 2**30, 2**13, 2**31]
    texts = [seconds_text(seconds) for seconds in (1.234e-5, 2e-3, 1.5, math.inf, math.nan)]
    assert texts == ["12.3 us", "2 ms", "1.5 s", "not known", "not known"]


# The fit, and what a plan makes of it.


def measured_by(net: Measured, target: str, axes: dict[str, tuple[int, int]]) -> list[Measurement]:
    """What would be measured if the planner's formulas were the truth; axes: (members, nodes)."""
    there = with_measured(fabric(parse_target(target)), net)
    rows = []
    for axis, (members, nodes) in axes.items():
        for name in FITTED:
            for size in 4.0 ** np.arange(5, 15):
                row = Measurement(name, axis, members, nodes, int(size), 1.0, 1.0, 1.0, True)
                rows.append(replace(row, seconds=predicted(row, there)))
    return rows


@pytest.mark.parametrize("target", ["h100:32", "v5e:4x8"])
def test_the_fit_finds_the_network_that_was_measured(target):
    truth = Measured(start=2e-5, hop=3e-6, fast=2e11, slow=2e10)
    rows = measured_by(truth, target, {"model": (8, 1), "data": (4, 4), "replica": (8, 2)})
    found = fit(rows, fabric(parse_target(target)))
    assert (found.start, found.hop) == pytest.approx((truth.start, truth.hop), rel=1e-6)
    assert (found.fast, found.slow) == pytest.approx((truth.fast, truth.slow), rel=1e-6)


def test_what_was_not_measured_stays_as_it_is():
    target = parse_target("h100:32")
    found = calibrate(measured_by(Measured(1e-5, 1e-6, 1e11, None), "h100:8", {"model": (8, 1)}), target)
    assert found.measured.slow is None and found.error < 1e-6 and found.rows == 40
    before, after = fabric(target), fabric(replace(target, measured=found.measured))
    assert after.slow == before.slow and after.fast == pytest.approx(1e11 / Constants().fast_links)


def step_seconds(capsys, *options: str) -> list[float]:
    line = "plan --model.preset gpt2-124m --target h100:16 --mesh dp=16 --zero 0 --train.global_batch 64 --confirm 0"
    assert (
        cli.run([*line.split(), *["--parallel.remat", "none", "--parallel.accumulation", "1", "--json"], *options]) == 0
    )
    return [plan["step_seconds"] for plan in json.loads(capsys.readouterr().out)["plans"]]


def test_a_plan_takes_the_measured_network(capsys, tmp_path):
    c, chip = Constants(), parse_target("h100:16").chip
    assert XLA.rendezvous is not None
    sheet = Measured(XLA.rendezvous, c.hop, c.fast_links * chip.link.bandwidth, c.slow_links * chip.network.bandwidth)
    as_told, slower = tmp_path / "told.json", tmp_path / "slower.json"
    told = replace(calibrate([], parse_target("h100:16")), measured=sheet, error=0.0)
    write_calibration(told, as_told)
    write_calibration(replace(told, measured=replace(sheet, slow=sheet.slow / 10)), slower)
    plain = step_seconds(capsys)
    assert step_seconds(capsys, "--calibration", str(as_told)) == pytest.approx(plain)
    assert step_seconds(capsys, "--calibration", str(slower))[0] > 1.5 * plain[0]


def test_a_calibration_of_another_chip_or_no_calibration_is_refused(tmp_path):
    file = tmp_path / "a100.json"
    write_calibration(calibrate([], parse_target("a100:8")), file)
    with pytest.raises(InputError, match="measured on a100, and the target h100:8 is h100"):
        calibrated(parse_target("h100:8"), file)
    both = calibrate(
        measured_by(Measured(1e-5, 1e-6, 1e11, 1e10), "a100:32", {"data": (4, 4)}), parse_target("a100:32")
    )
    write_calibration(both, file)
    with pytest.raises(InputError, match="both say how fast the network between hosts is"):
        calibrated(parse_target("a100:8"), file, "gbps=25")
    file.write_text("[]")
    with pytest.raises(InputError, match="not a calibration"):
        calibrated(parse_target("h100:8"), file)
    with pytest.raises(InputError, match="cannot be read"):
        calibrated(parse_target("h100:8"), tmp_path / "none.json")


@pytest.mark.parametrize(
    ("name", "value", "must"),
    [
        *(("fast", value, "fast is .* null or a positive") for value in ("abc", [1], 0, -1, math.inf, math.nan, True)),
        *(("start", value, "start is .* 0 or a positive") for value in (None, -1e-6, math.nan, False, "0", 10**400)),
        ("fast", "x" * 500, "and must be"),
        ("quick", 1.0, "not a calibration"),
    ],
)
def test_a_calibration_with_a_value_that_is_none_is_refused(tmp_path, name, value, must):
    file = tmp_path / "h100.json"
    told = calibrate([], parse_target("h100:8")).as_json()
    told["measured"] |= {name: value}
    file.write_text(json.dumps(told))
    with pytest.raises(InputError, match=must) as refused:
        calibrated(parse_target("h100:8"), file)
    assert len(str(refused.value)) < 250 + len(str(file))


def test_a_calibration_of_a_hundred_thousand_lists_is_refused(tmp_path):
    file = tmp_path / "h100.json"
    file.write_text("[" * 100_000)
    with pytest.raises(InputError, match="not a calibration"):
        calibrated(parse_target("h100:8"), file)


# Several processes.


@pytest.mark.slow
@pytest.mark.parametrize(
    "places",
    [("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"), ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")],
    ids=["by hand", "Open MPI 5"],
)
def test_two_processes_measure_together(places, tmp_path):
    """Two devices each; the first one prints and writes, the other says nothing on stdout."""
    # Bound until the end, so that nobody else is given the port; the first process may share it.
    kept = socket.socket()
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    kept.bind(("localhost", 0))
    address = f"localhost:{kept.getsockname()[1]}"
    file = tmp_path / "network.json"
    line = ["collectives", "--mesh", "dp=2,tp=2", "--largest", "1KiB", "--json", "--calibration"]
    runs = []
    for rank in range(2):
        environment = os.environ | {
            "JAX_COORDINATOR_ADDRESS": address,
            "JAX_PLATFORMS": "cpu",
            places[0]: "2",
            places[1]: str(rank),
        }
        command = [sys.executable, str(ROOT / "run.py"), *line, str(file)]
        runs.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    (out, error), (other, _) = (run.communicate(timeout=600) for run in runs)
    kept.close()
    assert [run.returncode for run in runs] == [0, 0], error
    assert other == ""
    result = json.loads(out)
    assert (result["devices"], result["processes"]) == (4, 2)
    assert len(result["measurements"]) == 14 and all(row["correct"] for row in result["measurements"])
    assert file.exists()


def test_the_largest_size_is_more_than_32_bits_hold(monkeypatch):
    """What goes between processes becomes int32 on the way."""
    monkeypatch.setattr(bandwidth, "_everywhere", lambda value: np.asarray(jnp.asarray(value)).reshape(-1))
    free = {"bytes_limit": 6 * 23 * 2**30, "bytes_in_use": 0}
    device = SimpleNamespace(process_index=0, platform="gpu", memory_stats=lambda: free)
    assert bandwidth.largest_that_fits([device]) == 23 * 2**30
