"""Time and bandwidth of every collective over every mesh axis, measured; each result is checked against NumPy.

Sizes S and bandwidths are those of nccl-tests (NVIDIA/nccl-tests, doc/PERFORMANCE.md and the GetBw functions of src/):
algorithm bandwidth S / t, and bus bandwidth, which is that times a factor for n members,

    all_reduce 2 (n-1)/n    reduce_scatter, all_gather, all_to_all (n-1)/n    broadcast, reduce, permute (sendrecv) 1

S is the input of one device in bytes, for all_gather its output.
"""

import socket
import statistics
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxshard.parallel.axes import AXES, SHORT

ROUNDS = 5
"""Timed rounds of a measurement; the median counts."""
MOST_CALLS, MOST_BYTES = 20, 2**26
"""Calls in a round, 20 as in nccl-tests; fewer where together they would move more than so many bytes."""
SMALLEST, STEP = 2**10, 4
"""First size in bytes, and by how much the next one is larger."""
CPU_LARGEST = 2**22
"""Largest size by default where the devices are faked: all seven collectives are done within half a minute."""
COPIES = 6
"""Buffers of the largest size that a device must have room for: input, output, and what the loop and XLA add."""
PERIOD = 251
"""Inputs repeat after so many numbers, and so do their sums: any part of an expected result is quick to make. A prime
shares no factor with sizes that are powers of two, so parts of a buffer differ from one another."""

Array = jax.Array


@dataclass(frozen=True)
class Collective:
    """One collective: what a device does, what must come out, and how its bandwidth is counted."""

    name: str
    factor: Callable[[int], float]
    """Bus over algorithm bandwidth, of the number of members."""
    run: Callable[[Array, str, int], Array]
    """(a device's input, axis, members) -> its output."""
    expected: Callable[[Sequence[np.ndarray], int, int], np.ndarray | None]
    """(each member's period of input, elements of S, own rank) -> the right output; None: anything."""
    gathers: bool = False
    """S is the size of the output: a device's input is S / n."""


def _tree(n: int, x: Array, axis: str, *, up: bool) -> Array:
    """A binomial tree of permutes with rank 0 as its root: `up` adds on the way to the root, else copies from it."""
    rank = jax.lax.axis_index(axis)
    strides = [2**i for i in range((n - 1).bit_length())]
    for stride in strides if up else reversed(strides):
        pairs = [(child, child - stride) for child in range(stride, n, 2 * stride)]
        sent = jax.lax.ppermute(x, axis, pairs if up else [(parent, child) for child, parent in pairs])
        x = x + sent if up else jnp.where(rank % (2 * stride) == stride, sent, x)
    return x


def _broadcast(x: Array, axis: str, n: int) -> Array:
    """XLA's own on GPUs; other backends have none."""
    own = lambda x: jax.lax.pbroadcast(x, (axis,), 0)
    return jax.lax.platform_dependent(x, cuda=own, rocm=own, default=lambda x: _tree(n, x, axis, up=False))


def _part(period: np.ndarray, start: int, count: int) -> np.ndarray:
    """`count` numbers of an endlessly repeated period, from `start` on."""
    return np.resize(np.roll(period, -(start % PERIOD)), count)


def _parts(periods: Sequence[np.ndarray], start: int, count: int) -> np.ndarray:
    return np.concatenate([_part(period, start, count) for period in periods])


COLLECTIVES = (
    Collective("broadcast", lambda n: 1, _broadcast, lambda given, size, rank: _part(given[0], 0, size)),
    Collective(
        "all_reduce",
        lambda n: 2 * (n - 1) / n,
        lambda x, axis, n: jax.lax.psum(x, axis),
        lambda given, size, rank: _part(np.sum(given, 0), 0, size),
    ),
    Collective(
        "reduce",
        lambda n: 1,
        lambda x, axis, n: _tree(n, x, axis, up=True),
        lambda given, size, rank: _part(np.sum(given, 0), 0, size) if rank == 0 else None,
    ),
    Collective(
        "reduce_scatter",
        lambda n: (n - 1) / n,
        lambda x, axis, n: jax.lax.psum_scatter(x, axis, tiled=True),
        lambda given, size, rank: _part(np.sum(given, 0), rank * (size // len(given)), size // len(given)),
    ),
    Collective(
        "all_gather",
        lambda n: (n - 1) / n,
        lambda x, axis, n: jax.lax.all_gather(x, axis, tiled=True),
        lambda given, size, rank: _parts(given, 0, size // len(given)),
        gathers=True,
    ),
    Collective(
        "all_to_all",
        lambda n: (n - 1) / n,
        lambda x, axis, n: jax.lax.all_to_all(x, axis, 0, 0, tiled=True),
        lambda given, size, rank: _parts(given, rank * (size // len(given)), size // len(given)),
    ),
    Collective(
        "permute",
        lambda n: 1,
        lambda x, axis, n: jax.lax.ppermute(x, axis, [(i, (i + 1) % n) for i in range(n)]),
        lambda given, size, rank: _part(given[rank - 1], 0, size),
    ),
)


@dataclass(frozen=True)
class Measurement:
    """One collective over one axis at one size."""

    collective: str
    axis: str
    members: int
    nodes: int
    """Hosts (TPU: slices) over which the members are spread evenly; 0: unevenly."""
    bytes: int
    """S."""
    seconds: float
    """Of one call: the median of the rounds."""
    algorithm_bandwidth: float
    """Bytes a second: S / t."""
    bus_bandwidth: float
    """Bytes a second: that times the factor of nccl-tests."""
    correct: bool

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"axis": SHORT[self.axis]}


def measure(mesh: Mesh, largest: int) -> Iterator[Measurement]:
    """Measures all collectives over all axes of more than one device, sizes up to `largest` bytes.

    All groups of an axis run at the same time, as in training. In a run of several processes every one calls this, and
    `correct` speaks for all of them.
    """
    nodes = _nodes(mesh)
    for axis, size, collective in cases(mesh, largest):
        n = mesh.shape[axis]
        seconds, correct = _measure(mesh, axis, size // 4, collective)
        rate = size / seconds
        yield Measurement(
            collective.name, axis, n, nodes[axis], size, seconds, rate, rate * collective.factor(n), correct
        )


def cases(mesh: Mesh, largest: int) -> list[tuple[str, int, Collective]]:
    """(axis, bytes, collective) in the order in which they are measured.

    Sizes are whole float32 numbers for each member, and so a little smaller than powers of two where n is none.
    """
    found = []
    for axis in (axis for axis in AXES if mesh.shape[axis] > 1):
        unit, size, sizes = 4 * mesh.shape[axis], SMALLEST, []
        while size <= max(largest, SMALLEST):
            sizes.append(max(size // unit, 1) * unit)
            size *= STEP
        found += [(axis, size, collective) for collective in COLLECTIVES for size in dict.fromkeys(sizes)]
    return found


def largest_that_fits(devices: Sequence[Any]) -> int:
    """Bytes of the largest buffer of which `COPIES` fit into the free memory of every device of this process."""
    local = [device for device in devices if device.process_index == jax.process_index()]
    found = [device.memory_stats() for device in local] if local[0].platform != "cpu" else []
    free = [stats["bytes_limit"] - stats["bytes_in_use"] for stats in found if stats and "bytes_limit" in stats]
    here = min(free) // COPIES if free else CPU_LARGEST
    # Every process must measure the same sizes. In KiB: without x64 jax carries 32 bits.
    return int(_everywhere(np.int32(here // 1024)).min()) * 1024


def _measure(mesh: Mesh, axis: str, elements: int, collective: Collective) -> tuple[float, bool]:
    """(seconds of one call, whether its result is right everywhere)."""
    given = elements // mesh.shape[axis] if collective.gathers else elements
    jitted, spec = program(mesh, axis, collective), PartitionSpec(AXES)
    make = lambda index: _part(_period(index[0].start or 0), 0, given)[None]
    x = jax.make_array_from_callback((mesh.devices.size, given), NamedSharding(mesh, spec), make)
    calls = max(1, min(MOST_CALLS, MOST_BYTES // (4 * elements)))
    out = jax.block_until_ready(jitted(x, np.int32(calls)))  # compiles, and makes connections
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        out = jax.block_until_ready(jitted(x, np.int32(calls)))
        seconds.append((time.perf_counter() - start) / calls)
    correct = all(_right(mesh, axis, shard, elements, collective) for shard in out.addressable_shards)
    return statistics.median(seconds), bool(_everywhere(correct).all())


def program(mesh: Mesh, axis: str, collective: Collective) -> Any:
    """The jitted function ([devices, elements], calls) -> [devices, elements of the output]."""
    spec = PartitionSpec(AXES)
    function = partial(_repeat, run=collective.run, axis=axis, n=mesh.shape[axis])
    return jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec, check_vma=False)
    )


def _repeat(x: Array, calls: Array, *, run: Callable[[Array, str, int], Array], axis: str, n: int) -> Array:
    """Runs a collective on [1, elements] `calls` times within one program, so that starting it is paid once.

    The barrier ties each input to the output before it: otherwise a compiler could run the same call once.
    """
    first = x[0]
    shape = jax.eval_shape(lambda x: run(x, axis, n), first)

    def once(_: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        return jax.lax.optimization_barrier((carry[0], run(carry[0], axis, n)))

    return jax.lax.fori_loop(0, calls, once, (first, jnp.zeros(shape.shape, shape.dtype)))[1][None]


def _period(device: int) -> np.ndarray:
    """[PERIOD] the input of the device at a position of the mesh: whole numbers, so that float32 sums are exact."""
    return ((np.arange(PERIOD) * 31 + device * 17) % PERIOD).astype(np.float32)


def _right(mesh: Mesh, axis: str, shard: Any, elements: int, collective: Collective) -> bool:
    """Whether a device holds what NumPy says."""
    numbers = np.arange(mesh.devices.size).reshape(mesh.devices.shape)
    place = np.unravel_index(shard.index[0].start or 0, numbers.shape)
    dim = AXES.index(axis)
    group = numbers[tuple(slice(None) if i == dim else at for i, at in enumerate(place))]
    expected = collective.expected([_period(int(device)) for device in group], elements, int(place[dim]))
    return expected is None or np.array_equal(np.asarray(shard.data)[0], expected)


def _everywhere(value: Any) -> np.ndarray:
    """A number of each process, in all of them."""
    return np.asarray(multihost_utils.process_allgather(np.asarray(value))).reshape(-1)


def _nodes(mesh: Mesh) -> dict[str, int]:
    """Axis -> hosts, or TPU slices, over which each of its groups is spread; 0 where that is uneven."""
    hosts = _everywhere(np.uint32(zlib.crc32(socket.gethostname().encode())))
    node = lambda device: getattr(device, "slice_index", None) if device.platform == "tpu" else None
    at = [hosts[d.process_index] if (found := node(d)) is None else found for d in mesh.devices.flat]
    found = {}
    for dim, axis in enumerate(AXES):
        groups = np.moveaxis(np.array(at).reshape(mesh.devices.shape), dim, -1).reshape(-1, mesh.shape[axis])
        counts = [np.unique(group, return_counts=True)[1] for group in groups]
        even = all(len(set(count.tolist())) == 1 and len(count) == len(counts[0]) for count in counts)
        found[axis] = len(counts[0]) if even else 0
    return found
