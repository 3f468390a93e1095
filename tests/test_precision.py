"""Number types: what is stored and summed in which type, the dynamic loss scale, and updates that must not happen."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxshard.config import Config, DataConfig, ModelConfig, OptimConfig, grouped
from jaxshard.models import products
from jaxshard.parallel.precision import POLICIES, LossScale, next_loss_scale
from jaxshard.training.checkpoint import Checkpoints
from jaxshard.training.gradients import gradients
from jaxshard.training.invariance import compile_quickly, synthetic_batch
from jaxshard.training.program import Program, build_program

V, T, B = 64, 8, 8
OVERFLOW = 2.0**120
"""A loss scale at which every scaled gradient is infinite."""


def program(mesh: str = "dp=1", devices: int = 1, zero: int = 0, **train: Any) -> Program:
    config = Config(
        model=ModelConfig(family="llama", d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=32, vocab_size=V),
        data=DataConfig(seq_len=T),
        optim=OptimConfig(lr=3e-3, warmup_steps=2),
        **grouped(mesh=mesh, zero=zero, **dict(global_batch=B) | train),
    )
    return build_program(config, jax.devices()[:devices])


@cache
def compiled(*args: Any, **train: Any) -> tuple[Program, Any, Any]:
    """The program, its compiled init and step."""
    made = program(*args, **train)
    step = compile_quickly(made.step.lower(made.abstract, made.abstract_batch()), made)
    return made, compile_quickly(made.init.lower(), made), step


def batch_of(made: Program, seed: int = 0, targets: bool = True) -> dict[str, jax.Array]:
    batch = synthetic_batch(V, B, T, True, seed)
    if not targets:
        batch["targets"][:] = -1
    return made.place(batch, made.config.parallel.accumulation)


def host(state: Any) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path, simple=True, separator="."): np.array(leaf) for path, leaf in leaves}


def assert_only_counted(before: dict, after: dict, *more: str) -> None:
    """Nothing changed, bit for bit, but the counters (and what `more` names)."""
    counters = {"step", "skipped", "skipped_in_row", *more}
    assert {name for name in before if before[name].tobytes() != after[name].tobytes()} == counters


# The dynamic loss scale.


def test_the_loss_scale_halves_doubles_and_has_a_floor():
    step = partial(next_loss_scale, interval=3)
    state = LossScale(jnp.float32(1024), jnp.int32(0))
    seen = []
    for finite in (True, True, False, True, True, True, True, False):
        state = step(state, jnp.asarray(finite))
        seen.append((float(state.scale), int(state.good)))
    assert seen == [(1024, 1), (1024, 2), (512, 0), (512, 1), (512, 2), (1024, 0), (1024, 1), (512, 0)]
    floor = step(LossScale(jnp.float32(1.5), jnp.int32(2)), jnp.asarray(False))
    assert float(floor.scale) == 1.0 and int(floor.good) == 0
    assert float(step(floor, jnp.asarray(False)).scale) == 1.0
    top = step(LossScale(jnp.float32(2.0**32), jnp.int32(2)), jnp.asarray(True))
    assert float(top.scale) == 2.0**32


LAYOUTS = [("dp=1", 1, 0, 1), ("dp=4,tp=2", 8, 1, 2), ("dp=2,tp=2", 4, 2, 2), ("replica=2,dp=2", 4, 3, 1)]
PIPELINES = [("pp=2,dp=2", 4, 1, 1), ("pp=2,dp=2,tp=2", 8, 3, 2)]


def fp16(layout: tuple) -> tuple[Program, Any, Any]:
    mesh, devices, zero, accumulation = layout
    return compiled(mesh, devices, zero, precision="fp16", accumulation=accumulation, loss_scale_interval=2)


def with_scale(state: Any, scale: float) -> Any:
    """The state with another loss scale."""
    placed = jax.device_put(np.float32(scale), state.loss_scale.scale.sharding)
    return replace(state, loss_scale=LossScale(placed, state.loss_scale.good))


@pytest.mark.parametrize(
    "layout",
    [*LAYOUTS, *(pytest.param(layout, marks=pytest.mark.slow) for layout in PIPELINES)],
    ids=lambda layout: f"{layout[0]} zero {layout[2]}",
)
def test_an_overflow_changes_nothing_but_the_scale_and_counters(layout):
    made, init, step = fp16(layout)
    state, metrics = step(init(), batch_of(made))
    assert int(state.skipped) == 0 and np.isfinite(float(metrics["grad_norm"]))
    state = with_scale(state, OVERFLOW)
    before = host(state)
    state, metrics = step(state, batch_of(made, 1))
    after = host(state)
    assert_only_counted(before, after, "loss_scale.scale", "loss_scale.good")
    assert float(state.loss_scale.scale) == OVERFLOW / 2 and int(state.loss_scale.good) == 0
    assert (int(state.step), int(state.skipped), int(state.skipped_in_row)) == (2, 1, 1)
    assert not np.isfinite(float(metrics["grad_norm"])) and np.isfinite(float(metrics["loss"]))
    # The next good update goes on where the last good one stopped: same place in the schedule, same count.
    schedule = float(metrics["lr"])
    state, metrics = step(with_scale(state, 1024.0), batch_of(made, 2))
    assert float(metrics["lr"]) == schedule
    assert (int(state.step), int(state.skipped), int(state.skipped_in_row)) == (3, 1, 0)
    counts = [value for name, value in host(state.moments).items() if name.endswith("count")]
    assert counts and all(count == 2 for count in counts)


def decisions(layout: tuple) -> list[tuple[float, int, int]]:
    """Loss scale and counters after each of 16 steps from a scale that is far too large."""
    made, init, step = fp16(layout)
    state, history = with_scale(init(), 2.0**26), []
    for seed in range(16):
        state, _ = step(state, batch_of(made, seed))
        history.append((float(state.loss_scale.scale), int(state.skipped), int(state.skipped_in_row)))
    return history


@pytest.mark.slow
@pytest.mark.parametrize("layout", PIPELINES, ids=lambda layout: layout[0])
def test_a_pipeline_decides_alike(layout):
    assert decisions(layout) == decisions(LAYOUTS[0])


def test_every_layout_decides_alike():
    """Down to a scale that fits, and up again after good updates."""
    histories = [decisions(layout) for layout in LAYOUTS]
    assert all(history == histories[0] for history in histories[1:])
    skips = [skipped for _, skipped, _ in histories[0]]
    assert 1 <= skips[-1] < 16 and len({scale for scale, _, _ in histories[0]}) > 2


def test_the_scale_and_the_counters_survive_a_checkpoint(tmp_path):
    made, init, step = fp16(LAYOUTS[1])
    state, _ = step(init(), batch_of(made))
    for seed in (1, 2):
        state, _ = step(with_scale(state, OVERFLOW), batch_of(made, seed))
    other = fp16(LAYOUTS[2])[0]
    with Checkpoints(tmp_path, keep=1) as saved:
        saved.save(3, state, {})
        resume = lambda made: saved.restore(3, made.abstract, axes=made.logical_axes, sizes={"vocab": V})[0]
        restored, elsewhere = resume(made), resume(other)
    for found in (state, restored, elsewhere):
        assert (float(found.loss_scale.scale), int(found.loss_scale.good)) == (OVERFLOW / 2, 0)
        assert (int(found.step), int(found.skipped), int(found.skipped_in_row)) == (3, 2, 2)
    # What follows is the run that was not interrupted: the next overflow, and then a good update.
    runs = []
    for now in (state, restored):
        now, _ = step(now, batch_of(made, 3))
        assert (float(now.loss_scale.scale), int(now.skipped_in_row)) == (OVERFLOW / 4, 3)
        runs.append(host(step(with_scale(now, 1024.0), batch_of(made, 4))[0]))
    assert all(runs[0][name].tobytes() == runs[1][name].tobytes() for name in runs[0])
    assert (int(runs[1]["skipped"]), int(runs[1]["skipped_in_row"])) == (3, 0)


def test_the_scale_does_not_reach_the_update():
    """Gradients are unscaled before norm and clipping: powers of two change nothing in fp32 sums."""
    made, init, step = fp16(LAYOUTS[0])
    results = [step(with_scale(init(), scale), batch_of(made)) for scale in (256.0, 1024.0)]
    norms = [float(metrics["grad_norm"]) for _, metrics in results]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3) and 1e-2 < norms[0] < 1e2


# The guard of the other types.


def _poisoned(params: Any) -> Any:
    scale = params["head"]["norm"]["scale"]
    bad = jax.device_put(scale.at[0].set(jnp.nan), scale.sharding)
    return params | {"head": params["head"] | {"norm": {"scale": bad}}}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", [("dp=1", 1, 0), ("dp=2,tp=2", 4, 3)], ids=lambda layout: layout[0])
def test_a_gradient_that_is_not_finite_is_not_applied(precision, layout):
    made, init, step = compiled(*layout, precision=precision)
    state, _ = step(init(), batch_of(made))
    # Parameters are a copy of the masters where there are masters.
    state = replace(state, params=_poisoned(state.params), masters=state.masters and _poisoned(state.masters))
    before = host(state)
    state, metrics = step(state, batch_of(made, 1))
    assert_only_counted(before, host(state))
    assert (int(state.skipped), int(state.skipped_in_row)) == (1, 1) and np.isnan(float(metrics["loss"]))
    state, _ = step(state, batch_of(made, 2))
    assert (int(state.step), int(state.skipped), int(state.skipped_in_row)) == (3, 2, 2)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_batch_without_targets_changes_nothing(precision):
    made, init, step = fp16(LAYOUTS[1]) if precision == "fp16" else compiled("dp=2,tp=2", 4, 3, precision=precision)
    state, _ = step(init(), batch_of(made))
    before = host(state)
    state, metrics = step(state, batch_of(made, 1, targets=False))
    scaled = ("loss_scale.good", "loss_scale.scale") if precision == "fp16" else ()
    changed = {name for name, value in host(state).items() if value.tobytes() != before[name].tobytes()}
    assert changed - set(scaled) == {"step", "skipped", "skipped_in_row"}
    assert float(metrics["loss"]) == 0 and float(metrics["grad_norm"]) == 0 and int(metrics["tokens"]) == 0


# Types.

TYPES = {
    "fp32": ("float32", None, "float32"),
    "bf16": ("bfloat16", "float32", "float32"),
    "fp16": ("float16", "float32", "float32"),
    "pure-bf16": ("bfloat16", None, "bfloat16"),
}


@pytest.mark.parametrize("precision", TYPES)
def test_state_has_the_types_of_its_policy(precision):
    state = program(precision=precision).abstract
    parameters, masters, moments = TYPES[precision]
    kinds = lambda tree: {leaf.dtype.name for leaf in jax.tree.leaves(tree) if leaf.ndim}
    assert kinds(state.params) == {parameters} and kinds(state.moments) == {moments}
    assert kinds(state.masters) == ({masters} if masters else set())
    assert (state.loss_scale is not None) == (precision == "fp16")
    line = POLICIES[precision].describe()
    assert f"parameters {parameters}" in line and f"moments {moments}" in line and "gradients float32" in line


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation of a jaxpr, those of inner ones included."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def narrow_gradients(made: Program) -> list[str]:
    """Products and sums in the step's gradients that make something of a weight's shape in 16 bits."""
    rows = jax.tree.leaves(made.model.weights, is_leaf=lambda x: hasattr(x, "axes"))
    shapes = {row.shape[1:] if row.axes[0] == "layers" else row.shape for row in rows}
    shapes = {tuple(n for n in shape if n > 1) for shape in shapes if len(shape) > 1}
    jaxpr = jax.make_jaxpr(partial(gradients, made.recipe))(
        made.abstract.params, made.abstract_batch(), made.abstract.step, jnp.float32(1)
    )
    assert {aval.dtype.name for aval in jaxpr.out_avals} == {"float32", "int32"}
    found = []
    for eqn in equations(jaxpr.jaxpr):
        if eqn.primitive.name in ("dot_general", "reduce_sum", "add_any", "add", "scatter-add", "psum"):
            aval = eqn.outvars[0].aval
            if tuple(n for n in aval.shape if n > 1) in shapes and aval.dtype.itemsize < 4:
                found.append(f"{eqn.primitive.name} {aval.str_short()}")
    return found


@pytest.mark.parametrize("zero, accumulation", [(0, 1), (1, 2), (2, 2), (3, 1)])
def test_gradients_are_summed_in_fp32(zero, accumulation):
    # Sizes of activations must not be sizes of weights.
    made = program("dp=2,tp=2", 4, zero, precision="bf16", accumulation=accumulation)
    assert narrow_gradients(made) == []


def test_a_gradient_in_16_bits_is_seen(monkeypatch):
    def narrow(spec, saved, dy):
        x, w = saved
        inputs, out = spec.split("->")
        left, right = inputs.split(",")
        dw = jnp.einsum(f"{left},{out}->{right}", x, dy).astype(w.dtype)
        return jnp.einsum(f"{out},{right}->{left}", dy, w.astype(dy.dtype)), dw

    monkeypatch.setattr(products._einsum, "bwd", narrow)
    assert narrow_gradients(program("dp=2,tp=2", 4, 2, precision="bf16"))


def test_many_equal_microbatches_lose_nothing():
    """128 equal parts have the gradient of one; a 16-bit sum would stop growing long before."""
    one, parts = program(precision="bf16"), 128
    many = program(precision="bf16", accumulation=parts, global_batch=parts * B)
    params = compile_quickly(one.init.lower(), one)().params
    batch = synthetic_batch(V, B, T, True)
    results = []
    for made, tokens in ((one, batch), (many, {name: np.tile(a, (parts, 1)) for name, a in batch.items()})):
        placed = made.place(tokens, made.config.parallel.accumulation)
        args = (params, placed, jnp.int32(0), jnp.float32(1))
        run = jax.jit(partial(gradients, made.recipe)).lower(*args)
        results.append(host(compile_quickly(run, made)(*args)[0]))
    for name, expected in results[0].items():
        assert np.abs(results[1][name] - expected).max() <= 1e-5 * np.abs(expected).max(), name


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_16_bits_follow_fp32_for_200_steps(precision):
    curves = {}
    for kind in ("fp32", precision):
        made, init, step = compiled("dp=2", 2, 1, precision=kind, steps=200)
        state, losses = init(), []
        for seed in range(200):
            batch = synthetic_batch(V, B, T, True, seed)
            # Something to learn: every token follows from the one before.
            batch["targets"] = np.where(batch["targets"] >= 0, (batch["inputs"] * 7 + 3) % V, -1)
            state, metrics = step(state, made.place(batch))
            losses.append(float(metrics["loss"]))
        curves[kind] = np.array(losses)
    smooth = {kind: curve.reshape(20, 10).mean(axis=1) for kind, curve in curves.items()}
    assert smooth["fp32"][-1] < 0.5 * smooth["fp32"][0]
    np.testing.assert_allclose(smooth[precision], smooth["fp32"], rtol=0.02)
