"""The batchable wrapper of the fused attention kernel, with the plain one in the kernel's place (it needs a GPU)."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxshard.models.fused_attention import batchable


def _plain(q, k, v, mask):
    assert q.ndim == 4 and mask.shape[1] == 1
    return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True, implementation="xla")


def _arrays(*lead):
    rng = np.random.default_rng(0)
    make = lambda *shape: jnp.asarray(rng.normal(size=(*lead, *shape)), jnp.float32)
    segments = jnp.asarray(rng.integers(1, 3, (*lead, 6)))
    mask = (segments[..., None, :, None] == segments[..., None, None, :]) | jnp.eye(6, dtype=bool)
    return make(6, 4, 8), make(6, 2, 8), make(6, 2, 8), mask


def _loss(attention):
    return lambda q, k, v, mask: (attention(q, k, v, mask) ** 2).sum()


def test_two_vmaps_give_the_values_and_gradients_of_one_batch():
    arrays = _arrays(2, 3, 5)  # stages, groups, batch
    flat = tuple(a.reshape(-1, *a.shape[3:]) for a in arrays)
    slopes = jax.grad(_loss(batchable(_plain)), (0, 1, 2))
    ours = jax.vmap(jax.vmap(slopes))(*arrays)
    right = jax.grad(_loss(_plain), (0, 1, 2))(*flat)
    for mine, theirs in zip(ours, right, strict=True):
        np.testing.assert_allclose(mine.reshape(theirs.shape), theirs, rtol=1e-5, atol=1e-6)


def test_an_array_that_is_not_vmapped_is_spread():
    q, k, v, mask = _arrays(3, 2)
    attention = batchable(_plain)
    ours = jax.vmap(attention, in_axes=(0, None, 0, 0))(q, k[0], v, mask)
    right = jax.vmap(_plain)(q, jnp.broadcast_to(k[0], k.shape), v, mask)
    np.testing.assert_allclose(ours, right, rtol=1e-6, atol=1e-6)
