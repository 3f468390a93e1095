"""Optimizers and schedules against formulas, optax's own optimizers, and the same weights unstacked and unpadded."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxshard.config import OptimConfig
from jaxshard.training.optimizer import build, learning_rate, matrix_dims, state_axes

NAMES = ("adamw", "adafactor", "lion", "muon", "sgd")
L, D, H, E, F, V = 3, 128, 2, 64, 192, 144
AXES = {
    "query": ("layers", "embed", "heads", "head_dim"),
    "out": ("layers", "heads", "head_dim", "embed"),
    "down": ("layers", "mlp", "embed"),
    "norm": ("layers", "embed"),
    "bias": ("layers", "heads", "head_dim"),
    "embedding": ("vocab", "embed"),
}
ROLES = {name: name if name in ("norm", "bias", "embedding") else "matrix" for name in AXES}
SIZES = {"layers": L, "embed": D, "heads": H, "head_dim": E, "mlp": F, "vocab": V}


def draw(seed, dtype=jnp.float32, **sizes):
    """Values for every weight, with a scale of their own in every layer."""
    rng = np.random.default_rng(seed)
    shape = lambda axes: [(SIZES | sizes)[name] for name in axes]
    values = {name: rng.normal(size=shape(axes)) * 10.0 ** rng.uniform(-3, 1) for name, axes in AXES.items()}
    for name, axes in AXES.items():
        if axes[0] == "layers":
            values[name] *= (10.0 ** -np.arange(L)).reshape(-1, *[1] * (len(axes) - 1))
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), values)


def run(tx, params, grads, lr=0.01):
    """Applies one update for each of `grads`; returns parameters, last update and state."""
    state, update = jax.jit(tx.init)(params), jax.jit(tx.update)
    for g in grads:
        u, state = update(g, state, params)
        params = jax.tree.map(lambda p, u: p - lr * u, params, u)
    return params, u, state


def close(a, b, rtol=1e-5, atol=1e-6):
    """Equal to `rtol`, or to `atol` of the largest entry of the array."""
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol * float(np.abs(y).max())), a, b)


# --- learning rate ---


def rates(steps, **optim):
    schedule = jax.jit(learning_rate(OptimConfig(lr=2.0, **optim), steps))
    return np.array([schedule(jnp.int32(i)) for i in range(max(steps, 1) + 3)])


def test_warmup_ends_at_the_peak_and_wastes_no_update():
    lr = rates(20, warmup_steps=4, schedule="constant")
    np.testing.assert_allclose(lr[:5], [0.5, 1.0, 1.5, 2.0, 2.0], rtol=1e-6)


@pytest.mark.parametrize("warmup", [0, 1, 4])
def test_schedules_follow_their_formulas(warmup):
    steps, peak, first = 20, 2.0, max(warmup, 1)
    t = (np.arange(first, steps + 1) - first) / (steps - first)
    formulas = {
        "cosine": peak * (0.1 + 0.9 * (1 + np.cos(np.pi * t)) / 2),
        "linear": peak * (1 - 0.9 * t),
        "constant": np.full(len(t), peak),
        "wsd": peak * (1 - 0.9 * np.clip((np.arange(first, steps + 1) - 15) / 5, 0, 1)),
    }
    for name, expected in formulas.items():
        lr = rates(steps, warmup_steps=warmup, schedule=name, decay_fraction=0.25)
        np.testing.assert_allclose(lr[first - 1 : steps], expected, rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(lr[steps:], expected[-1], rtol=1e-5, err_msg=f"{name} after the end")


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_short_runs(schedule):
    np.testing.assert_allclose(rates(3, warmup_steps=10, schedule=schedule)[:3], [0.2, 0.4, 0.6], rtol=1e-6)
    for steps in (0, 1):
        np.testing.assert_allclose(rates(steps, warmup_steps=0, schedule=schedule)[0], 2.0, rtol=1e-6)
    full = rates(10, warmup_steps=0, schedule=schedule, decay_fraction=1.0)
    assert full[0] == 2.0 and np.isfinite(full).all()
    assert rates(10, warmup_steps=2, schedule="wsd", decay_fraction=0.0)[-1] == 2.0


def test_schedule_keeps_double_precision():
    with jax.enable_x64(True):
        for name in ("cosine", "linear", "wsd", "constant"):
            value = jax.jit(learning_rate(OptimConfig(lr=0.3, schedule=name), 20))(jnp.int32(2))
            assert value.dtype == jnp.float64
            assert abs(float(value) - 0.3 * 3 / 10) < 1e-15


# --- matrices ---


def test_matrix_dims_follow_the_logical_axes():
    dims = lambda name, **sizes: matrix_dims(ROLES[name], AXES[name], draw(0)[name].shape, sizes)
    assert (dims("query").inputs, dims("query").outputs) == ((1,), (2, 3))
    assert (dims("out").inputs, dims("out").outputs) == ((1, 2), (3,))
    assert (dims("down").fan_in, dims("down").fan_out) == (F, D)
    assert (dims("norm").inputs, dims("norm").fan_out, dims("norm").stacked) == ((), D, (0,))
    assert dims("embedding", vocab=100).fan_in == 100


@pytest.mark.parametrize("name", NAMES)
def test_stacked_layers_are_independent(name):
    blocks = [key for key in AXES if AXES[key][0] == "layers"]
    only = lambda tree: {key: tree[key] for key in blocks}
    tx = build(OptimConfig(name=name), only(ROLES), only(AXES))
    alone = build(OptimConfig(name=name), only(ROLES), {key: AXES[key][1:] for key in blocks})
    with jax.enable_x64(True):
        params, *grads = (only(draw(seed, jnp.float64)) for seed in range(4))
        _, stacked, _ = run(tx, params, grads)
        for layer in range(L):
            part = lambda tree, layer=layer: {key: tree[key][layer] for key in blocks}
            _, expected, _ = run(alone, part(params), [part(g) for g in grads])
            close(part(stacked), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_padded_vocabulary_changes_nothing(name):
    only = lambda tree: {key: tree[key] for key in ("embedding", "norm")}
    pad = lambda tree: tree | {"embedding": jnp.pad(tree["embedding"], ((0, 112), (0, 0)))}
    make = lambda sizes: build(OptimConfig(name=name), only(ROLES), only(AXES), sizes)
    with jax.enable_x64(True):
        params, *grads = (only(draw(seed, jnp.float64)) for seed in range(4))
        expected, _, _ = run(make(None), params, grads)
        padded, _, _ = run(make({"vocab": V}), pad(params), [pad(g) for g in grads])
        assert not np.any(padded["embedding"][V:])
        close(padded | {"embedding": padded["embedding"][:V]}, expected, rtol=1e-12, atol=1e-12)
        if name == "adafactor":  # The sizes are what does it.
            wrong, _, _ = run(make(None), pad(params), [pad(g) for g in grads])
            assert np.abs(wrong["embedding"][:V] - expected["embedding"]).max() > 1e-4


def test_decay_goes_by_role():
    params = jax.tree.map(jnp.ones_like, draw(0))
    zero = jax.tree.map(jnp.zeros_like, params)
    for name in ("adamw", "adafactor"):
        _, update, _ = run(build(OptimConfig(name=name, weight_decay=0.25), ROLES, AXES), params, [zero])
        for key, u in update.items():
            np.testing.assert_array_equal(u, 0.0 if key in ("norm", "bias") else 0.25, err_msg=f"{name} {key}")


# --- against references ---


def test_adamw_in_float64_equals_the_formula():
    with jax.enable_x64(True):
        params, grads = draw(0, jnp.float64), [draw(seed, jnp.float64) for seed in (1, 2, 3)]
        optim = OptimConfig(weight_decay=0.1, beta1=0.9, beta2=0.95)
        got, _, _ = run(build(optim, ROLES, AXES), params, grads, lr=0.01)
        for key in AXES:
            p, m, v = np.array(params[key]), 0.0, 0.0
            for t, g in enumerate((np.array(g[key]) for g in grads), 1):
                m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
                step = (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.95**t)) + 1e-8)
                p = p - 0.01 * (step + (0.0 if key in ("norm", "bias") else 0.1) * p)
            np.testing.assert_allclose(got[key], p, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", NAMES)
def test_float64_stays_float64(name):
    with jax.enable_x64(True):
        params = draw(0, jnp.float64)
        params, update, state = run(build(OptimConfig(name=name), ROLES, AXES), params, [draw(1, jnp.float64)])
        floats = [x.dtype for x in jax.tree.leaves((params, update, state)) if jnp.issubdtype(x.dtype, jnp.floating)]
        assert set(floats) == {jnp.dtype("float64")}


def test_adafactor_equals_optax_on_plain_matrices():
    axes, roles = {"down": ("mlp", "embed"), "norm": ("embed",)}, {"down": "matrix", "norm": "norm"}
    part = lambda tree: {"down": tree["down"][0], "norm": tree["norm"][0]}
    params, grads = part(draw(0)), [part(draw(seed)) for seed in (1, 2, 3)]
    tx = build(OptimConfig(name="adafactor", beta2=0.999, weight_decay=0.0), roles, axes)
    reference = optax.adafactor(multiply_by_parameter_scale=False)
    reference = optax.chain(reference, optax.scale(-1))
    close(run(tx, params, grads)[0], run(reference, params, grads)[0])
    state = tx.init(params)[0]
    assert (state.rows["down"].shape, state.columns["down"].shape) == ((F,), (D,))


def test_muon_equals_optax_and_keeps_the_vocabulary_for_adamw():
    params, grads = draw(0), [draw(seed) for seed in (1, 2, 3)]
    axes, roles = AXES | {"head": ("vocab", "embed")}, ROLES | {"head": "matrix"}
    head = lambda tree: tree | {"head": tree["embedding"]}
    params, grads = head(params), [head(g) for g in grads]
    optim = OptimConfig(name="muon", weight_decay=0.0)
    dims = {
        "query": optax.contrib.MuonDimensionNumbers((1,), (2, 3)),
        "out": optax.contrib.MuonDimensionNumbers((1, 2), (3,)),
        "down": optax.contrib.MuonDimensionNumbers((1,), (2,)),
    } | dict.fromkeys(("norm", "bias", "embedding", "head"))
    reference = optax.contrib.muon(
        1.0,
        beta=optim.beta1,
        adam_b1=optim.beta1,
        adam_b2=optim.beta2,
        consistent_rms=0.2,
        muon_weight_dimension_numbers=dims,
    )
    # optax gives Nesterov momentum to its Adam too, so only the matrices are compared with it.
    _, update, _ = run(build(optim, roles, axes), params, grads)
    _, expected, _ = run(optax.chain(reference, optax.scale(-1)), params, grads)
    matrices = lambda tree: {key: tree[key] for key in ("query", "out", "down")}
    close(matrices(update), matrices(expected))
    _, adamw, _ = run(build(OptimConfig(weight_decay=0.0), roles, axes), params, grads)
    rest = lambda tree: {key: tree[key] for key in ("norm", "bias", "embedding", "head")}
    close(rest(update), rest(adamw))
    rms = np.sqrt(np.mean(np.square(update["query"]), (1, 2, 3)))
    assert np.all((rms > 0.1) & (rms < 0.3))


# --- types ---


def test_moments_have_their_own_type():
    only = lambda tree: {"norm": tree["norm"]}
    roles, axes, grads = only(ROLES), only(AXES), only(draw(1))
    params16 = only(draw(0, jnp.bfloat16))
    floats = lambda state: {x.dtype.name for x in jax.tree.leaves(state) if x.ndim}
    for moments in (jnp.float32, jnp.bfloat16):
        tx = build(OptimConfig(), roles, axes, moments=moments)
        state = tx.init(params16)
        update, new = tx.update(grads, state, params16)
        assert floats(state) == floats(new) == {jnp.dtype(moments).name}
        assert floats(update) == {"float32"}
    with pytest.raises(AssertionError, match="moments in"):
        build(OptimConfig(), roles, axes).init(params16)
    tx = build(OptimConfig(), roles, axes)
    with pytest.raises(AssertionError, match="fp32 or fp64"):
        tx.update(params16, tx.init(grads), grads)


# --- axes of the state ---


def abstract(**shapes):
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


def test_state_axes_of_equal_dims_are_exact():
    params, axes = (
        abstract(a=(128, 128), b=(4, 130, 130), c=(127, 127, 127)),
        {
            "a": ("embed", "mlp"),
            "b": ("layers", "embed", "mlp"),
            "c": ("x", "y", "z"),
        },
    )
    found = state_axes(optax.adafactor(1e-3), params, axes)[0]
    assert found.count == ()
    assert {found.v_row["a"], found.v_col["a"]} == {("embed",), ("mlp",)}
    assert {found.v_row["b"], found.v_col["b"]} == {("layers", "embed"), ("layers", "mlp")}
    assert (found.v["a"], found.v["c"], found.v_row["c"]) == ((None,), ("x", "y", "z"), (None,))
    order = np.argsort((128, 128))  # Rows lose the dim that optax calls largest.
    assert found.v_row["a"] == (axes["a"][order[0]],)


def test_state_axes_of_any_transformation():
    params, axes = abstract(w=(6, 6), head=(6,)), {"w": ("embed", "mlp"), "head": ("mlp",)}
    history = state_axes(optax.scale_by_lbfgs(memory_size=6), params, axes)
    assert history.diff_params_memory["w"] == (None, "embed", "mlp")
    kronecker = optax.GradientTransformation(
        lambda p: {"left": jax.tree.map(lambda x: jnp.zeros((x.shape[0],) * 2), p), "seed": jnp.zeros(3)}, None
    )
    found = state_axes(kronecker, params, axes)
    assert found["left"]["w"] == ("embed", None) and found["seed"] == (None,)
    masked = state_axes(optax.masked(optax.scale_by_adam(), {"w": True, "head": False}), params, axes)
    assert masked.inner_state.mu["w"] == ("embed", "mlp")
    assert state_axes(optax.scale_by_adam(), params["w"], axes["w"]).mu == ("embed", "mlp")


@pytest.mark.parametrize("name", NAMES)
def test_sharded_state_gives_the_same_update(name):
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model"))
    rules = {"embed": "data", "heads": "model", "mlp": "model", "vocab": "model"}
    place = lambda axes: NamedSharding(mesh, PartitionSpec(*(rules.get(a) for a in axes)))
    is_axes = lambda x: type(x) is tuple and all(a is None or isinstance(a, str) for a in x)
    shardings = lambda axes: jax.tree.map(place, axes, is_leaf=is_axes)
    only = lambda tree: {key: tree[key] for key in ("out", "down", "embedding")}
    axes = only(AXES)
    tx = build(OptimConfig(name=name), only(ROLES), axes)
    params, grads = only(draw(0)), only(draw(1))
    where = shardings(axes), shardings(state_axes(tx, params, axes))
    state = jax.jit(tx.init, out_shardings=where[1])(params)
    spread = [x for x in jax.tree.leaves(state) if x.size >= D]
    assert all(not x.sharding.is_fully_replicated for x in spread)
    step = jax.jit(tx.update, in_shardings=(where[0], where[1], where[0]), out_shardings=where)
    close(step(grads, state, params)[0], run(tx, params, [grads])[1], rtol=1e-4, atol=1e-5)
