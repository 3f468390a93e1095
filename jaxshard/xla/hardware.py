"""Chips and networks as data, and the names that --target takes.

Every figure is per chip and one direction, with the document it was read in. Bytes are bytes (not GiB), rates are per
second. A figure of 0 means "not known": whoever divides by it must say so instead.
"""

import math
import re
from dataclasses import dataclass, replace
from typing import Literal

from jaxshard.errors import InputError, nearest
from jaxshard.xla.pool import pool_bytes

GB = 10**9
GIB = 2**30
GPUS_PER_HOST = 8
"""GPUs in one host of every GPU target here: HGX and DGX boards carry eight behind one NVLink switch."""
MOST_DEVICES = 100_000
"""Longest device list that a target may ask for; larger numbers are slips of the keyboard."""


@dataclass(frozen=True)
class Network:
    """What carries bytes between chips: all of a chip's links together, one direction."""

    name: str
    shape: Literal["switch", "torus"]
    bandwidth: float
    """Bytes a second that one chip can send: over its switch port, or over one link of a torus."""
    links: int
    """Links per chip that can send at once: 1 to a switch, 2 per dimension of a torus."""
    source: str


@dataclass(frozen=True)
class Chip:
    """One accelerator chip: what it computes, holds and moves."""

    name: str
    platform: Literal["cpu", "gpu", "tpu"]
    device_kinds: tuple[str, ...]
    """Substrings of jax's device_kind that mean this chip."""
    bf16_flops: float
    """Dense bfloat16 matrix FLOP/s (no sparsity)."""
    memory_bytes: int
    """Device memory, as the vendor or driver states it."""
    usable_bytes: int
    """Device memory that a program may use: the compiler refuses more (TPU), or jax's pool has no more (GPU)."""
    memory_bandwidth: float
    """Bytes a second from device memory."""
    host_bandwidth: float
    """Bytes a second between device and host memory, one direction."""
    link: Network
    """Inside a host (GPU) or slice (TPU)."""
    network: Network
    """Between hosts (GPU) or slices (TPU)."""
    dims: int
    """Dimensions of the chip grid in a target's name: 0 for a plain count."""
    source: str


def _switch(name: str, gigabytes: float, source: str) -> Network:
    return Network(name, "switch", gigabytes * GB, 1, source)


_SCALING = "jax-ml.github.io/scaling-book, part 2"
_XLA = "openxla/xla, xla/backends/gpu/target_config/specs"
_HDR = _switch("InfiniBand HDR, 200 Gbit/s a GPU", 25, "NVIDIA DGX A100 datasheet: 8 ConnectX-6 200 Gb/s ports")
_NDR = _switch("InfiniBand NDR, 400 Gbit/s a GPU", 50, "NVIDIA DGX H100, H200 and B200 datasheets: 400 Gb/s a GPU")


def _gpu(
    name: str, tflops: float, memory: int, memory_gb_s: float, pcie: float, nvlink: Network, net: Network, why: str
) -> Chip:
    source = f"{why}; memory bytes: {_XLA}"
    rates = (tflops * 1e12, memory, pool_bytes(memory), memory_gb_s * GB, pcie * GB)
    return Chip(name, "gpu", (name.upper(),), *rates, nvlink, net, 0, source)


def _tpu(
    name: str,
    kinds: tuple[str, ...],
    tflops: float,
    gib: float,
    usable: float,
    gb_s: float,
    pcie: float,
    ici: Network,
    why: str,
) -> Chip:
    dcn = _switch("DCN", {"v5e": 3.125, "v6e": 12.5}.get(name, 6.25), f"{_SCALING}; cloud.google.com/tpu/docs/{name}")
    source = f"cloud.google.com/tpu/docs/{name}: {why}; PCIe: {_SCALING}; usable bytes: what libtpu 0.0.42 compiles for"
    rates = (tflops * 1e12, int(gib * GIB), int(usable * GIB), gb_s * GB, pcie * GB)
    return Chip(name, "tpu", kinds, *rates, ici, dcn, ici.links // 2, source)


def _ici(dims: int, gigabytes: float) -> Network:
    return Network(f"ICI {dims}D torus", "torus", gigabytes * GB, 2 * dims, f"{_SCALING}: ICI per link, one way")


_NOT_KNOWN = "no single figure: it depends on the machine"
_CPU = Chip(
    *("cpu", "cpu", ("cpu",), 0.0, 0, 0, 0.0, 0.0),
    link=_switch("shared memory", 0, _NOT_KNOWN),
    network=_switch("network", 0, _NOT_KNOWN),
    dims=0,
    source=_NOT_KNOWN,
)

CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        _gpu(
            *("a100", 312, 85_100_068_864, 2039, 32),
            _switch("NVLink 3", 300, "NVIDIA A100 datasheet: 600 GB/s both ways"),
            _HDR,
            "NVIDIA A100 80GB SXM datasheet (312 TFLOP/s bf16, 2,039 GB/s, PCIe Gen4 64 GB/s both ways)",
        ),
        _gpu(
            *("h100", 989, 84_942_979_072, 3352, 64),
            _switch("NVLink 4", 450, "NVIDIA H100 datasheet: 900 GB/s both ways"),
            _NDR,
            "NVIDIA H100 SXM datasheet (bf16 1,979 TFLOP/s with sparsity: 989 dense; 3.35 TB/s, PCIe Gen5 x16)",
        ),
        _gpu(
            *("h200", 989, 151_397_597_184, 4800, 64),
            _switch("NVLink 4", 450, "NVIDIA H200 datasheet: 900 GB/s both ways"),
            _NDR,
            "NVIDIA H200 SXM datasheet (bf16 1,979 TFLOP/s with sparsity: 989 dense; 4.8 TB/s, PCIe Gen5 x16)",
        ),
        _gpu(
            *("b200", 2250, 191_514_411_008, 7672, 64),
            _switch("NVLink 5", 900, "NVIDIA HGX B200 datasheet: 1.8 TB/s both ways"),
            _NDR,
            f"NVIDIA HGX B200 datasheet (bf16 2.25 PFLOP/s dense; PCIe Gen5 in DGX B200); 7,672 GB/s: {_XLA}",
        ),
        _tpu("v4", ("TPU v4",), 275, 32, 30.75, 1200, 16, _ici(3, 45), "275 TFLOP/s, 32 GiB, 1,200 GB/s"),
        _tpu("v5e", ("TPU v5 lite", "TPU v5e"), 197, 16, 15.75, 819, 16, _ici(2, 45), "197 TFLOP/s, 16 GB, 819 GB/s"),
        _tpu("v5p", ("TPU v5p",), 459, 96, 95.74, 2765, 16, _ici(3, 90), "459 TFLOP/s, 95 GiB, 2,765 GB/s"),
        _tpu(
            "v6e", ("TPU v6 lite", "TPU v6e"), 918, 32, 31.25, 1640, 32, _ici(2, 90), "918 TFLOP/s, 32 GB, 1,640 GB/s"
        ),
        _CPU,
    )
}

_SHAPES_2D = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
"""Slices of v5e and v6e (cloud.google.com/tpu/docs/v5e and v6e)."""
_SMALL_3D = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
"""Slices of v4 and v5p below one cube; larger ones are whole 4x4x4 cubes (cloud.google.com/tpu/docs/v4 and v5p)."""
_MOST_CHIPS = {"v4": 4096, "v5p": 6144}
"""Largest single slice (same documents)."""


@dataclass(frozen=True)
class Measured:
    """What a network was measured to do (`calibration.py`), one direction, per device."""

    start: float
    """Seconds of any collective besides hops and bytes."""
    hop: float
    """Seconds of one step of a ring or tree."""
    fast: float | None
    """Bytes a second inside a host or slice (torus: around one dimension); None: not measured."""
    slow: float | None
    """Bytes a second between hosts or slices; None: not measured."""


@dataclass(frozen=True)
class Target:
    """Hardware to compile for: present (local, cpu) or absent (the rest)."""

    name: str
    chip: Chip
    count: int
    """Devices, all hosts together (one device a chip)."""
    topology: tuple[int, ...]
    """GPU and CPU: (hosts, devices per host). TPU: the chip grid."""
    measured: Measured | None = None
    """Goes before the chip's datasheet where it is there."""

    @property
    def devices_per_host(self) -> int:
        """GPU: up to 8. TPU: chips of one host (2x2 of the grid, or all of a slice of up to 8 v5e or v6e chips)."""
        if self.chip.platform != "tpu":
            return self.topology[-1]
        return self.count if self.chip.dims == 2 and self.count <= 8 else 4

    @property
    def hosts(self) -> int:
        """Machines in the target."""
        return max(1, self.count // self.devices_per_host)

    @property
    def absent(self) -> bool:
        """True when the devices are only described to the compiler."""
        return self.name != "local" and self.chip.platform != "cpu"

    def with_network(self, bytes_per_second: float) -> "Target":
        """The same target with another speed between hosts (bytes a second per chip, one direction)."""
        slower = replace(self.chip.network, name=f"{bytes_per_second * 8 / 1e9:g} Gbit/s", bandwidth=bytes_per_second)
        return replace(self, chip=replace(self.chip, network=slower))


def parse_target(text: str) -> Target:
    """Reads "h100:64", "v5p:4x4x8", "cpu:8" or "local".

    Raises InputError (one line, with the nearest valid name) for unknown chips and sizes that do not exist.
    """
    name, _, size = text.strip().lower().partition(":")
    if name == "local":
        if size:
            raise InputError(f"target {text!r}: local takes no size; it is the devices that are present")
        return _local_target()
    chip = CHIPS.get(name)
    if chip is None:
        known = ", ".join([*CHIPS, "local"])
        raise InputError(f"target {text!r}: unknown chip {name!r}{nearest(name, [*CHIPS, 'local'])}; known: {known}")
    if chip.dims:
        return _tpu_target(text, chip, size)
    return _counted_target(text, chip, size)


def chip_of(device_kind: str) -> Chip | None:
    """The chip that jax calls `device_kind`, or None when its figures are not known here."""
    for chip in CHIPS.values():
        if any(kind.lower() in device_kind.lower() for kind in chip.device_kinds):
            return chip
    return CHIPS["v5p"] if device_kind == "TPU v5" else None  # what libtpu calls it


def _counted_target(text: str, chip: Chip, size: str) -> Target:
    """A chip whose targets are plain counts: GPUs in hosts of eight, CPU devices in one host."""
    count = int(size) if re.fullmatch(r"\d{1,9}", size) else 0
    if not 1 <= count <= MOST_DEVICES:
        raise InputError(
            f"target {text!r}: {size or 'nothing'!r} is not a device count; write {chip.name}:8 (1 to {MOST_DEVICES})"
        )
    if chip.platform == "cpu":
        return Target(f"{chip.name}:{count}", chip, count, (1, count))
    if count > GPUS_PER_HOST and count % GPUS_PER_HOST:
        below, above = count // GPUS_PER_HOST * GPUS_PER_HOST, -(-count // GPUS_PER_HOST) * GPUS_PER_HOST
        raise InputError(
            f"target {text!r}: {count} GPUs do not fill hosts of {GPUS_PER_HOST}; nearest: {chip.name}:{below} or "
            f"{chip.name}:{above} (1 to {GPUS_PER_HOST}, or a multiple of {GPUS_PER_HOST})"
        )
    per_host = min(count, GPUS_PER_HOST)
    return Target(f"{chip.name}:{count}", chip, count, (count // per_host, per_host))


def _tpu_target(text: str, chip: Chip, size: str) -> Target:
    """A TPU slice by its chip grid."""
    parsed = re.fullmatch(r"\d{1,4}(x\d{1,4})*", size)
    grid = tuple(int(part) for part in size.split("x")) if parsed else ()
    if len(grid) != chip.dims or not _known_grid(chip, grid):
        wanted = math.prod(grid) if grid else 4 * chip.dims
        names = " or ".join(f"{chip.name}:{'x'.join(map(str, shape))}" for shape in _nearest_grids(chip, wanted))
        raise InputError(
            f"target {text!r}: {size or 'nothing'!r} is no {chip.dims}D slice of {chip.name} that can be had; "
            f"nearest: {names}"
        )
    return Target(f"{chip.name}:{size}", chip, math.prod(grid), grid)


def _known_grid(chip: Chip, grid: tuple[int, ...]) -> bool:
    if chip.dims == 2:
        return tuple(sorted(grid)) in _SHAPES_2D
    if grid in _SMALL_3D:
        return True
    return all(dim > 0 and dim % 4 == 0 for dim in grid) and math.prod(grid) <= _MOST_CHIPS[chip.name]


def _nearest_grids(chip: Chip, chips: int) -> tuple[tuple[int, ...], ...]:
    """The largest slice of at most `chips` and the smallest of at least `chips` (one of them at the ends)."""
    if chip.dims == 2:
        grids = list(_SHAPES_2D)
    else:
        steps = range(4, 33, 4)
        cubes = [(a, b, c) for a in steps for b in steps for c in steps if a <= b <= c <= 2 * a]
        grids = [*_SMALL_3D, *(grid for grid in cubes if math.prod(grid) <= _MOST_CHIPS[chip.name])]
    grids.sort(key=math.prod)
    below = [grid for grid in grids if math.prod(grid) <= chips][-1:]
    above = [grid for grid in grids if math.prod(grid) >= chips][:1]
    return tuple(dict.fromkeys([*below, *above]))


def _local_target() -> Target:
    """The devices that jax sees, which starts its backend."""
    import jax

    devices = jax.devices()
    platform = {"cpu": "cpu", "tpu": "tpu"}.get(devices[0].platform, "gpu")
    chip = chip_of(devices[0].device_kind)
    if chip is None:
        unknown = replace(_CPU, source="not in the table of known chips", device_kinds=())
        chip = replace(unknown, name=devices[0].device_kind, platform=platform)
    per_host = max(1, jax.local_device_count())
    return Target("local", chip, len(devices), (max(1, len(devices) // per_host), per_host))
