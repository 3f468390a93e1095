"""The split embedding lookup against `jnp.take`, in values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxshard.models.lookup import LookupSpec, lookup

IDS = np.array([[0, 5, 11, 5], [3, 3, 8, 2], [11, 0, 0, 7], [6, 1, 10, 4]], np.int32)


def _nothing(x, axes):
    return x


def _table():
    return jnp.asarray(np.random.default_rng(0).normal(size=(12, 8)), jnp.float32)


@pytest.mark.parametrize(("parts", "groups"), [(1, 1), (3, 1), (1, 2), (4, 4)])
def test_same_as_take(parts, groups):
    spec = LookupSpec(parts, groups, jnp.float32, _nothing)
    weight = jnp.asarray(np.random.default_rng(1).normal(size=(4, 4, 8)), jnp.float32)
    ours = lambda table: (lookup(spec, table, IDS) * weight).sum()
    take = lambda table: (jnp.take(table, IDS, axis=0) * weight).sum()
    np.testing.assert_array_equal(lookup(spec, _table(), IDS), jnp.take(_table(), IDS, axis=0))
    np.testing.assert_allclose(jax.grad(ours)(_table()), jax.grad(take)(_table()), rtol=1e-6)


def test_gradient_of_a_16_bit_result_is_summed_in_the_tables_type():
    spec = LookupSpec(2, 1, jnp.bfloat16, _nothing)
    ids = np.zeros((1, 1000), np.int32)
    slope = jax.grad(lambda table: lookup(spec, table, ids).astype(jnp.float32).sum())(_table())
    assert slope.dtype == jnp.float32
    assert slope[0, 0] == 1000  # in bfloat16 it would stop at 256


def test_rows_travel_in_the_compute_type():
    """The sum over parts must not be widened: it is what an all-reduce carries."""
    spec = LookupSpec(2, 1, jnp.bfloat16, _nothing)
    text = str(jax.make_jaxpr(lambda table: lookup(spec, table, IDS))(_table()))
    reduces = [line for line in text.splitlines() if "reduce_sum" in line or "= reduce[" in line]
    assert reduces
    assert all("f32" not in line for line in reduces)
