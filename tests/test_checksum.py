"""Checksums of arrays: the same on every mesh, and another one for whatever changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxshard.training import checksum
from jaxshard.training.checksum import checksums

RNG = np.random.default_rng(0)
ARRAYS = {
    "fp32": RNG.normal(size=(4, 16, 8)).astype(np.float32),
    "bf16": RNG.normal(size=(8, 8)).astype(jnp.bfloat16),
    "int32": np.int32(7),
    "int8": np.arange(32, dtype=np.int8),
    "fp64": RNG.normal(size=(8, 8)),
}


def placed(arrays, data: int, model: int, *spec):
    mesh = Mesh(np.array(jax.devices()[: data * model]).reshape(data, model), ("data", "model"))
    place = lambda x: NamedSharding(mesh, PartitionSpec(*spec[: max(0, np.ndim(x))]))
    return {name: jax.device_put(x, place(x)) for name, x in arrays.items()}


def test_a_sum_is_the_same_on_every_mesh_and_in_blocks_of_any_size(monkeypatch):
    with jax.enable_x64(True):
        expected = checksums(placed(ARRAYS, 1, 1))
        assert len(set(expected.values())) == len(ARRAYS)
        for mesh in ((4, 2, "data", "model"), (2, 4, "data"), (4, 2, None, "model"), (2, 2)):
            assert checksums(placed(ARRAYS, *mesh)) == expected
        monkeypatch.setattr(checksum, "_BLOCK", 24)
        assert checksums(placed(ARRAYS, 4, 2, "data", "model")) == expected


@pytest.mark.parametrize("mesh", [(4, 2, "data", "model"), (1, 1)])
def test_devices_and_the_host_come_to_the_same_sum(mesh):
    """What accelerators compute, here on CPU devices; with an end that lies within a shard, and one of the whole."""
    with jax.enable_x64(True):
        some = placed({name: ARRAYS[name] for name in ("fp32", "bf16", "int32", "fp64")}, *mesh)
        extents = {"fp32": (4, 11, 8), "bf16": (8, 7)}
        ends = tuple(extents.get(name, x.shape) for name, x in some.items())
        found = np.asarray(checksum._on_devices(list(some.values()), ends))
        assert [f"{a:08x}{b:08x}" for a, b in found] == list(checksums(some, extents).values())


def test_padding_does_not_count_where_it_is_left_out():
    table = ARRAYS["bf16"]
    padded = np.concatenate([table, np.ones((4, 8), jnp.bfloat16)])
    whole, wider = checksums(placed({"t": table}, 4, 2, "data")), placed({"t": padded}, 4, 2, "data")
    assert checksums(wider, {"t": (8, 8)}) == whole != checksums(wider)


def test_whatever_changes_has_another_sum():
    """A linear sum would miss an even number of flipped signs; one without coordinates an exchange."""
    x = ARRAYS["fp32"]
    changes = {"nothing": x}
    for bit in range(32):
        other = x.copy()
        other.view(np.uint32)[1, 2, 3] ^= np.uint32(1 << bit)
        changes[f"bit {bit}"] = other
    for pair in range(40):
        other = x.copy()
        other.view(np.uint32).flat[[pair, 511 - pair]] ^= np.uint32(1 << 31)
        changes[f"two signs {pair}"] = other
    changes |= {"rows": x[:, ::-1], "layers": x[[1, 0, 2, 3]], "shape": x.reshape(4, 8, 16), "zeros": x * 0}
    sums = checksums({name: jnp.asarray(value) for name, value in changes.items()})
    assert len(set(sums.values())) == len(changes)
