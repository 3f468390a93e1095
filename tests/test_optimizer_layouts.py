"""One update is the same on every layout, for every optimizer; twenty steps in fp32 follow one device."""

from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest
from layout_table import table

from jaxshard.config import OptimConfig
from jaxshard.training import optimizer, update
from jaxshard.training.invariance import compare, compile_quickly, one_step, synthetic_batch, wide_types
from jaxshard.training.program import build_program

OPTIMIZERS = ("adamw", "muon", "adafactor", "lion", "sgd")
LAYOUTS = {
    "zero 1": ("dp=4,tp=2", 1, {}),
    "zero 2": ("replica=2,dp=2", 2, {"accumulation": 2}),
    "zero 3": ("dp=2,tp=4", 3, {"sequence_parallel": True}),
}
OFFLOADED = {mode: ("dp=2,tp=2", 1, {"offload": "optimizer", "offload_mode": mode}) for mode in ("stream", "host")}
CLIP = 1e-3
"""Far below the gradient's norm, so that every update is clipped."""


@pytest.fixture(autouse=True)
def factored(monkeypatch):
    """Adafactor factors the moments of large matrices; here those of small ones too."""
    monkeypatch.setattr(optimizer, "SMALLEST_FACTORED", 8)


def updated(name: str, mesh: str, zero: int, options: dict):
    case = table.Case("gqa", mesh, zero, options)
    config = replace(case.config(), optim=OptimConfig(name=name, clip=CLIP, warmup_steps=1))
    with wide_types():
        program = build_program(config, jax.devices()[: case.devices])
    return one_step(program, table.batch_of("gqa"))


@cache
def alone(name: str):
    return updated(name, "dp=1", 0, {})


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_update_is_one_devices(name, layout, capfd):
    expected = alone(name)
    result = compare(updated(name, *LAYOUTS[layout]), expected)
    assert result.faults() == []
    assert result.worst_update is not None and result.worst_update.update < 1e-9
    assert "Involuntary full rematerialization" not in capfd.readouterr().err
    norm = np.sqrt(sum((g**2).sum() for g in expected.gradients.values()))
    assert expected.norm == pytest.approx(norm, rel=1e-12) and norm > 100 * CLIP


@pytest.mark.slow
@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_an_update_of_a_pipeline_is_one_devices(name):
    result = compare(updated(name, "pp=2,dp=2,tp=2", 1, {}), alone(name))
    assert result.faults() == []
    assert result.worst_update is not None and result.worst_update.update < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("name", ["muon", "adafactor", "lion"])
@pytest.mark.parametrize("mode", OFFLOADED)
def test_an_update_with_state_in_host_memory_is_one_devices(name, mode):
    result = compare(updated(name, *OFFLOADED[mode]), alone(name))
    assert result.faults() == []
    assert result.worst_update is not None and result.worst_update.update < 1e-9


def test_a_layer_that_is_not_written_back_is_seen(monkeypatch):
    expected, put = alone("lion"), update.Cut.put
    last = lambda cut, x, one, turn: update.jnp.where(turn == 1, x, put(cut, x, one, turn))
    monkeypatch.setattr(update.Cut, "put", last)
    faults = compare(updated("lion", *OFFLOADED["stream"]), expected).faults()
    assert any("update of blocks" in fault for fault in faults)


def test_an_update_from_a_clipped_part_is_seen(monkeypatch):
    """Each device clips by the norm of its own shard: the parts of a matrix move by different factors."""
    from jaxshard.training import step

    expected = alone("sgd")
    own = lambda tree: step.jnp.sqrt(sum((leaf[: leaf.shape[0] // 2] ** 2).sum() for leaf in jax.tree.leaves(tree)))
    monkeypatch.setattr(step, "global_norm", own)
    faults = compare(updated("sgd", *LAYOUTS["zero 1"]), expected).faults()
    assert any("norm" in fault for fault in faults) and any("update" in fault for fault in faults)


CURVES = [("dp=8", 0), ("dp=4,tp=2", 0), ("tp=4", 0), ("dp=2,tp=4", 1), ("dp=2,tp=4", 2), ("dp=2,tp=4", 3)]
PIPELINE = pytest.param("pp=2,dp=2,tp=2", 1, marks=pytest.mark.slow)


def curve(mesh: str, zero: int, steps: int = 20) -> list[float]:
    """Losses of a tiny model in fp32."""
    case = table.Case("mha", mesh, zero, {"precision": "fp32"})
    config = replace(case.config(), optim=OptimConfig(lr=1e-2, warmup_steps=2))
    program = build_program(config, jax.devices()[: case.devices])
    state = compile_quickly(program.init.lower(), program)()
    step = compile_quickly(program.step.lower(program.abstract, program.abstract_batch()), program)
    losses = []
    for number in range(steps):
        batch = synthetic_batch(7, 16, table.LENGTH, True, number)
        state, metrics = step(state, program.place(batch))
        losses.append(float(metrics["loss"]))
    return losses


@cache
def curve_alone() -> tuple[float, ...]:
    return tuple(curve("dp=1", 0))


@pytest.mark.parametrize("mesh, zero", [*CURVES, PIPELINE])
def test_twenty_steps_follow_one_device(mesh, zero):
    expected = curve_alone()
    assert expected[-1] < 0.7 * expected[0]  # It learns that most of the vocabulary does not occur.
    assert curve(mesh, zero) == pytest.approx(expected, rel=1e-5)
