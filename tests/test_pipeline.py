"""The executor alone, on a toy of a model: every schedule, gradients of every weight, sabotage, and program size."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxshard.parallel import pipeline, schedule
from jaxshard.parallel.axes import MeshShape
from jaxshard.parallel.mesh import build_mesh
from jaxshard.parallel.pipeline import Pipeline, Sums, Weights
from jaxshard.training.invariance import wide_types

D, T, B, IDS = 4, 3, 2, 7
AXES = {"stages": "stage", "groups": "data", None: None}


def toy_layer(w, x):
    return x + jnp.tanh(x @ w)


def toy_embed(shared, slots, microbatch):
    return (shared["table"] + slots["table"])[microbatch["ids"]] if slots else shared["table"][microbatch["ids"]]


def toy_stage(weights, slots, chunk, microbatch, x):
    w = jax.lax.dynamic_index_in_dim(weights, chunk, 0, keepdims=False)
    return toy_layer(w if slots is None else w + slots[0], x) * microbatch["scale"][:, None, None]


def toy_loss(shared, slots, microbatch, y):
    head = shared["table"] + slots["table"] if slots else shared["table"]
    ce = jnp.sum(jnp.cos(y @ head.T) * microbatch["scale"][:, None, None])
    return 3 * ce, ce


def toy_data(S, V, M, G):
    rng = np.random.default_rng(0)
    layers = rng.normal(size=(S * V, D, D)) / D
    shared = {"table": rng.normal(size=(IDS, D))}
    microbatches = {"ids": rng.integers(0, IDS, (M, G, B, T)), "scale": rng.uniform(0.9, 1.1, (M, G, B))}
    return layers, shared, microbatches


@cache
def expected(S, V, M, G):
    """Gradients of layers in natural order and of the table, summed over groups; and the sum."""
    layers, shared, microbatches = toy_data(S, V, M, G)

    def objective(layers, shared):
        total = 0.0
        for m in range(M):
            for g in range(G):
                part = jax.tree.map(lambda a, m=m, g=g: a[m, g], microbatches)
                x = toy_embed(shared, None, part)
                for w in layers:
                    x = toy_layer(w, x) * part["scale"][:, None, None]
                total += toy_loss(shared, None, part, x)[0]
        return total

    value, slopes = jax.jit(jax.value_and_grad(objective, (0, 1)))(layers, shared)
    return slopes[0], slopes[1]["table"], value / 3


def toy_pipeline(table, G):
    """The toy on a mesh of its stages, by groups where there are several: a pipeline, weights, start, microbatches."""
    S, V, M = table.stages, table.chunks, table.microbatches
    shape = MeshShape(stage=S, data=G)
    mesh = build_mesh(shape, jax.devices()[: shape.devices])

    def shard(x, names):
        spec = PartitionSpec(*(AXES[name] for name in names))
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    run = Pipeline(table, toy_embed, toy_stage, toy_loss, ("data",) if G > 1 else (), shard)
    layers, shared, microbatches = toy_data(S, V, M, G)
    order = schedule.layer_order(len(layers), S, V).reshape(S, -1)
    lead = (G,) if G > 1 else ()
    start = Sums(jnp.zeros((S, *lead, V, 1, D, D)), {"table": jnp.zeros((*lead, IDS, D))}, jnp.zeros(lead))
    parts = microbatches if G > 1 else jax.tree.map(lambda a: a[:, 0], microbatches)
    return run, Weights(layers[order], shared), start, parts


def error(table, G=1):
    """Largest relative error of the executor's gradients and sum."""
    S, V, M = table.stages, table.chunks, table.microbatches
    with wide_types():
        run, weights, start, parts = toy_pipeline(table, G)
        found = jax.jit(partial(pipeline.gradients, run))(weights, start, parts)
        layers, shared, value = expected(S, V, M, G)
        sums = np.asarray(found.stages).sum(1) if G > 1 else np.asarray(found.stages)
        natural = np.zeros((S * V, D, D))
        natural[schedule.layer_order(S * V, S, V).ravel()] = sums.reshape(S * V, D, D)
        heads = np.asarray(found.shared["table"])
        pairs = (
            (natural, layers),
            (heads.sum(0) if G > 1 else heads, shared),
            (np.asarray(found.sums).sum(), value),
        )
        return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)


@pytest.mark.parametrize(
    "name, S, M, V, G",
    [
        ("gpipe", 2, 3, 1, 2),
        ("1f1b", 2, 5, 1, 2),
        ("1f1b", 4, 7, 1, 2),
        ("1f1b", 4, 1, 1, 1),
        ("interleaved", 2, 5, 3, 1),
        ("interleaved", 4, 3, 2, 1),
        ("interleaved", 4, 8, 2, 2),
    ],
)
def test_gradients_equal_a_plain_loop(name, S, M, V, G):
    assert error(schedule.make(name, S, M, V), G) < 1e-12


@pytest.mark.parametrize("name, S, M, V", [("1f1b", 4, 3, 1), ("interleaved", 2, 5, 2)])
def test_evaluation_equals_a_plain_loop(name, S, M, V):
    table = schedule.make(name, S, M, V)
    with wide_types():
        run, weights, _, parts = toy_pipeline(table, 2)
        found = jax.jit(partial(pipeline.evaluate, run))(weights, jnp.zeros(2), parts)
        assert np.isclose(found.sum(), expected(S, V, M, 2)[2], rtol=1e-12)


TABLE = schedule.make("1f1b", 4, 6)


def broken(column, change):
    values = getattr(TABLE, column).copy()
    change(values)
    return replace(TABLE, **{column: values})


def dropped():
    """The backward of one microbatch at one stage is left out."""
    tick = int(np.flatnonzero(TABLE.bwd_microbatch[:, 1] == 2)[0])
    return broken("bwd_microbatch", lambda a: a.__setitem__((tick, 1), -1))


def swapped():
    """Two rows of the forward microbatches change places."""
    return broken("fwd_microbatch", lambda a: a.__setitem__([4, 5], a[[5, 4]]))


def wrong_slot():
    """One stage loads another saved input."""
    return broken("bwd_load", lambda a: a.__setitem__((8, 0), (a[8, 0] + 1) % TABLE.saved_slots))


@pytest.mark.parametrize("sabotage", [dropped, swapped, wrong_slot])
def test_a_broken_table_is_seen(sabotage):
    assert error(sabotage()) > 1e-3


@pytest.mark.parametrize("direction", [1, -1])
def test_a_wrong_send_is_seen(monkeypatch, direction):
    right = pipeline._send
    monkeypatch.setattr(pipeline, "_send", lambda x, n: right(x, -n if n == direction else n))
    assert error(TABLE) > 1e-3


def instructions(name, S, M, V=1):
    """Instructions of the compiled program on a mesh of S stages."""
    run, weights, start, parts = toy_pipeline(schedule.make(name, S, M, V), 1)
    text = jax.jit(partial(pipeline.gradients, run)).lower(weights, start, parts).compile().as_text()
    return text.count(" = ")


@pytest.mark.parametrize("name, V", [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
def test_the_program_does_not_grow_with_microbatches(name, V):
    few, many = instructions(name, 2, 8, V), instructions(name, 2, 64, V)
    assert abs(many - few) <= 0.03 * few


def test_the_program_grows_with_stages_at_most_linearly():
    two, four, eight = (instructions("1f1b", S, 16) for S in (2, 4, 8))
    assert four <= 2 * two and eight <= 2 * four
