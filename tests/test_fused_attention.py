"""The wrappers of the fused attention kernel, with the plain one in the kernel's place (it needs a GPU)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxshard.models import fused_attention
from jaxshard.models.fused_attention import band_size, batchable, within_documents


def _plain(q, k, v, mask):
    assert q.ndim == 4 and mask.shape[1:] == (1, q.shape[1], k.shape[1])
    how = {"mask": mask, "is_causal": True} if mask.dtype == bool else {"bias": mask}
    return jax.nn.dot_product_attention(q, k, v, **how, implementation="xla")


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


def _rows(T, *lead):
    """Queries, keys, values, and segments of three documents and padding that lie across the bands."""
    rng = np.random.default_rng(1)
    make = lambda *shape: jnp.asarray(rng.normal(size=(*lead, *shape)), jnp.float32)
    segments = np.searchsorted([5, 6, 19], np.arange(T), side="right") + 1
    segments[-3:] = 0
    return make(T, 4, 8), make(T, 2, 8), make(T, 2, 8), jnp.broadcast_to(jnp.asarray(segments, jnp.int32), (*lead, T))


def _whole_mask(q, k, v, segments):
    return _plain(q, k, v, segments[:, None, :, None] == segments[:, None, None, :])


@pytest.fixture
def short_bands(monkeypatch):
    for name, value in (("WHOLE_MASK", 8), ("BAND", 8), ("BANDS", 4)):
        monkeypatch.setattr(fused_attention, name, value)


@pytest.mark.parametrize("kernel", [pytest.param(_plain, marks=pytest.mark.slow), batchable(_plain)])
def test_bands_give_the_values_and_gradients_of_the_whole_mask(kernel, short_bands):
    arrays = _rows(28, 2, 3)  # stages, batch; the last band is half as long
    banded = lambda *arrays: within_documents(kernel, *arrays)
    ours = jax.vmap(jax.value_and_grad(_loss(banded), (0, 1, 2)))(*arrays)
    right = jax.vmap(jax.value_and_grad(_loss(_whole_mask), (0, 1, 2)))(*arrays)
    for mine, theirs in zip(jax.tree.leaves(ours), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)


def test_no_mask_is_kept_whatever_is_recomputed(short_bands):
    q, k, v, segments = _rows(32, 2)
    everything = jax.checkpoint_policies.everything_saveable
    attention = jax.checkpoint(lambda q, k, v: within_documents(_plain, q, k, v, segments), policy=everything)
    kept = jax.tree.leaves(jax.vjp(attention, q, k, v)[1])
    assert max(leaf.size for leaf in kept) <= q.size
    assert all(leaf.shape[-1] != leaf.shape[-2] for leaf in kept if leaf.ndim > 3)


@pytest.mark.parametrize("seq_len,size", [(2048, 2048), (8192, 8192), (8448, 2048), (65536, 2048), (131072, 4096)])
def test_long_rows_are_cut_into_few_bands(seq_len, size):
    assert band_size(seq_len) == size
    assert -(-seq_len // size) <= fused_attention.BANDS
