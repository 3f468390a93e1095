"""One number for the bits of an array, the same on every mesh, so that a checkpoint can be told from a damaged one.

Every element is mixed with its coordinates and the results are added modulo 2^32, in two ways: 64 bits in all. A sum
does not care for order, so that each shard can be summed where it lies and the sums of all shards added, whatever the
mesh. The mixing is one to one for given coordinates: a single element that changes always changes the sum; several
pass with a chance of about 2^-64. It finds accidents; who writes both the data and its checksum can forge it.

Arrays on accelerators are summed there, in one compiled function. What lies in the memory of the host (CPU devices,
offloaded state) is summed by NumPy on all cores: nothing is compiled for it or sent to a device.
"""

import functools
import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_DIMS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1, 0xD3A2646D, 0xFD7046C5, 0xB55A4F09)
"""What a step along each dim adds to the key of an element; odd, and without a pattern among them."""
_BLOCK = 1 << 16
"""Elements that the host mixes at a time: a few such blocks stay in the cache of a core."""


def checksums(arrays: Mapping[str, jax.Array], extents: Mapping[str, Sequence[int]] | None = None) -> dict[str, str]:
    """Sums up arrays.

    Args:
        arrays: by name; every process gives those of the same names.
        extents: for arrays of which only the beginning counts, how far along each dim.

    Returns:
        16 hexadecimal digits for each array.
    """
    ends_of = extents or {}
    cut = lambda name, x: tuple(ends_of[name]) if name in ends_of else x.shape
    groups: dict[Any, list[str]] = {}
    for name, x in arrays.items():
        groups.setdefault(_place(x), []).append(name)
    found = {}
    for place, names in groups.items():
        some, ends = [arrays[name] for name in names], tuple(cut(name, arrays[name]) for name in names)
        sums = _on_host(some, ends) if place is None else _on_devices(some, ends)
        found |= dict(zip(names, np.asarray(sums), strict=True))
    return {name: f"{found[name][0]:08x}{found[name][1]:08x}" for name in arrays}


def _place(x: jax.Array) -> Any:
    """None for arrays that the host can read where they lie; else a key that arrays of one computation share."""
    on_host = next(iter(x.sharding.device_set)).platform == "cpu" or "host" in (x.sharding.memory_kind or "")
    return None if on_host else getattr(x.sharding, "mesh", x.sharding)


def _mixed(words: Any, key: Any) -> tuple[Any, Any]:
    """Mixes words with keys, uint32 arrays of one shape: the finaliser of MurmurHash3, and a step beyond it."""
    x = words ^ key
    # NumPy does this in place, which is twice as fast; JAX makes new arrays.
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x85EBCA6B)
    x ^= x >> np.uint32(13)
    x *= np.uint32(0xC2B2AE35)
    x ^= x >> np.uint32(16)
    y = x * np.uint32(0x9E3779B1)
    y ^= y >> np.uint32(15)
    return x, y


def _on_host(arrays: Sequence[jax.Array], ends: Sequence[Sequence[int]]) -> np.ndarray:
    """Sums uint32 [arrays, 2] of the shards that this process holds, each counted once."""
    pieces = [
        (i, part, offset, end)
        for i, (x, end) in enumerate(zip(arrays, ends, strict=True))
        for shard in x.addressable_shards
        if shard.replica_id == 0
        for part, offset in _blocks(np.asarray(shard.data), [s.start or 0 for s in shard.index])
    ]
    sums = np.zeros((len(arrays), 2), np.uint32)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for (i, *_), pair in zip(pieces, pool.map(lambda piece: _block_sums(*piece[1:]), pieces), strict=True):
            sums[i] += pair
    return sums


def _blocks(data: np.ndarray, start: Sequence[int]) -> Iterator[tuple[np.ndarray, list[int]]]:
    """Views of at most about `_BLOCK` elements, with the global coordinates of their first element."""
    dim = 0
    while dim < data.ndim - 1 and math.prod(data.shape[dim + 1 :]) > _BLOCK:
        dim += 1
    step = max(1, _BLOCK // max(1, math.prod(data.shape[dim + 1 :])))
    steps = [*(1 for _ in range(dim)), step][: data.ndim]
    for corner in itertools.product(*(range(0, n, k) for n, k in zip(data.shape, steps, strict=False))):
        part = data[tuple(slice(at, at + k) for at, k in zip(corner, steps, strict=True))]
        yield part, [at + more for at, more in itertools.zip_longest(start, corner, fillvalue=0)]


def _block_sums(part: np.ndarray, offset: Sequence[int], end: Sequence[int]) -> np.ndarray:
    """Sums uint32 [2] of a block whose first element has the coordinates `offset`, as far as it lies before `end`."""
    part = part[tuple(slice(0, max(0, stop - at)) for stop, at in zip(end, offset, strict=True))]
    # An element of 8 bytes is two words along one more dim, as for `jax.lax.bitcast_convert_type`.
    size = part.dtype.itemsize
    shape = (*part.shape, 2) if size == 8 else part.shape or (1,)
    words = np.ascontiguousarray(part).reshape(-1).view(f"u{min(size, 4)}").reshape(shape).astype(np.uint32, copy=False)
    key = np.zeros((), np.uint32)
    for at, n, constant in zip([*offset, 0], shape, _DIMS, strict=False):
        key = key[..., None] + (np.arange(at, at + n, dtype=np.uint64) * constant).astype(np.uint32)
    return np.array([np.sum(x, dtype=np.uint32) for x in _mixed(words, key)], np.uint32)


@functools.partial(jax.jit, static_argnums=1)
def _on_devices(arrays: Sequence[jax.Array], ends: Sequence[Sequence[int]]) -> jax.Array:
    """Sums uint32 [arrays, 2]; every device sums its shards."""
    return jnp.stack([_device_sums(x, end) for x, end in zip(arrays, ends, strict=True)])


def _device_sums(x: jax.Array, end: Sequence[int]) -> jax.Array:
    size = x.dtype.itemsize
    words = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * min(size, 4)}")).astype(jnp.uint32)
    key, counts = jnp.zeros(words.shape, jnp.uint32), jnp.ones(words.shape, bool)
    for dim, n in enumerate(words.shape):
        at = jax.lax.broadcasted_iota(jnp.uint32, words.shape, dim)
        key += at * np.uint32(_DIMS[dim])
        if dim < x.ndim and end[dim] < n:
            counts &= at < end[dim]
    return jnp.stack([jnp.sum(jnp.where(counts, m, 0), dtype=jnp.uint32) for m in _mixed(words, key)])
