"""Devices that are only described: GPUs and TPUs to compile for without having them.

jax's topologies name them; their compilers come with the extras `jaxshard[gpu]` and `jaxshard[tpu]` and run on any
machine, as long as jax itself keeps to the CPU.
"""

import faulthandler
import importlib.util
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import jax
from jax._src import xla_bridge
from jax.experimental import topologies
from jax.sharding import Mesh

from jaxshard.errors import InputError
from jaxshard.parallel.axes import DEFAULT, MeshShape
from jaxshard.parallel.mesh import build_mesh, open_devices, parse_mesh, resolve_mesh
from jaxshard.xla.hardware import Target, parse_target

_GPU_COMMON = (
    "threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 threads_per_core_limit: 2048 "
    "block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 "
    "registers_per_core_limit: 65536 registers_per_block_limit: 65536"
)
_GPU_FIELDS = (
    "core_count",
    "fpus_per_core",
    "memory_bandwidth",
    "l2_cache_size",
    "clock_rate_ghz",
    "shared_memory_per_block_optin",
    "shared_memory_per_core",
)
_GPUS: dict[str, tuple[tuple[float, ...], str, str]] = {
    "a100": (
        (108, 64, 2_039_040_000_000, 41_943_040, 1.41, 166_912, 167_936),
        "major: 8",
        "NVIDIA A100-SXM4-80GB",
    ),
    "h100": (
        (132, 128, 3_352_320_000_000, 52_428_800, 1.98, 232_448, 233_472),
        "major: 9 feature_extension: ACCELERATED_FEATURES",
        "NVIDIA H100 80GB HBM3",
    ),
    "h200": (
        (132, 128, 4_800_000_000_000, 52_428_800, 1.98, 232_448, 233_472),
        "major: 9 feature_extension: ACCELERATED_FEATURES",
        "NVIDIA H200 141GB HBM3e",
    ),
    "b200": (
        (148, 128, 7_672_320_000_000, 132_644_864, 1.965, 232_448, 233_472),
        "major: 10 feature_extension: ACCELERATED_FEATURES",
        "NVIDIA B200",
    ),
}
"""What XLA's GPU compiler asks about a chip: openxla/xla, xla/backends/gpu/target_config/specs/*.txtpb."""


_CUDNN = 91000
"""cuDNN 9.10.0, as cudnnGetVersion counts."""


def devices_for(target: Target) -> list[Any]:
    """The jax devices of a target: present ones, or absent ones that only compile.

    Raises:
        InputError: the compiler for the target is not installed, or this process cannot show enough CPU devices.
    """
    if target.name == "local":
        return list(jax.devices())
    if target.chip.platform == "cpu":
        return open_devices(None, "cpu", target.count)
    return list(_absent_devices(target))


def shape_for(target: Target, mesh: str | None) -> MeshShape:
    """Sizes of the axes on the devices of a target.

    Raises:
        InputError: the mesh text is wrong, or does not use exactly the target's devices.
    """
    sizes = parse_mesh(mesh)
    needs = math.prod(size for size in sizes.values() if size != -1)
    filled = -1 in sizes.values()
    if target.name == "local" or needs == target.count or (filled and target.count % needs == 0):
        return resolve_mesh(mesh, target.count)
    others = {axis: size for axis, size in sizes.items() if axis != DEFAULT and size != -1}
    ways = math.prod(others.values())
    hints = [f"--target {name}" for name in [f"{target.chip.name}:{needs}"] if _is_target(name)]
    if target.count % ways == 0:
        rest = MeshShape(**others, **{DEFAULT: target.count // ways})
        hints.append(f"--mesh {rest}")
    raise InputError(
        f"--mesh {mesh!r} needs {needs} devices{' or a multiple' if filled else ''}, and target {target.name} has "
        f"{target.count}: try {' or '.join(hints) or 'other sizes'}"
    )


def _is_target(name: str) -> bool:
    try:
        return bool(parse_target(name))
    except InputError:
        return False


def mesh_for(target: Target, shape: MeshShape) -> Mesh:
    """A mesh over the devices of a target; TPUs in the order of their torus, GPUs with hosts contiguous.

    Raises:
        InputError: as `devices_for`, or the shape does not use exactly the target's devices.
    """
    if shape.devices != target.count:
        raise InputError(
            f"--mesh {shape} has {shape.devices} devices and target {target.name} has {target.count}: "
            f"let one axis be -1, or choose a target of {shape.devices}"
        )
    return build_mesh(shape, devices_for(target))


@lru_cache(maxsize=64)
def _absent_devices(target: Target) -> tuple[Any, ...]:
    late = xla_bridge.backends_are_initialized()
    # A GPU or TPU plugin must not be started for devices that are not there.
    jax.config.update("jax_platforms", "cpu")
    tpu = target.chip.platform == "tpu"
    if tpu and not _installed("libtpu"):
        raise InputError(f'target {target.name} needs the TPU compiler: pip install "jaxshard[tpu]"')
    if not tpu and not _installed("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12"):
        version = jax.__version__
        raise InputError(
            f'target {target.name} needs the GPU compiler: pip install "jaxshard[gpu]" (or only the compiler, 0.4 GB: '
            f"pip install --no-deps jax-cuda13-plugin=={version} jax-cuda13-pjrt=={version})"
        )
    said = Captured()
    try:
        with captured_stderr() as said:
            return tuple(_tpu_devices(target) if tpu else _gpu_devices(target))
    # jax's own errors: NotImplementedError where a plugin describes no topologies, the others from the compiler.
    except (RuntimeError, NotImplementedError, ValueError) as error:
        first = str(error).splitlines()[0]
        if late and isinstance(error, NotImplementedError):
            # When jax starts without JAX_PLATFORMS=cpu it drops a plugin that finds no device, and its compiler too.
            raise InputError(
                f"target {target.name}: {first}. jax has already started, and it drops compilers whose devices it does "
                "not find: call devices_for before jax.devices() and before the first array, or set JAX_PLATFORMS=cpu"
            ) from error
        raise InputError(f"target {target.name}: its compiler does not start: {first} ({said.last_line()})") from error


def _installed(*modules: str) -> bool:
    for module in modules:
        try:
            if importlib.util.find_spec(module):
                return True
        except ModuleNotFoundError:
            continue
    return False


def _tpu_devices(target: Target) -> list[Any]:
    # Without these, libtpu asks a metadata server where it is, and refuses to be loaded by two processes at once.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    grid = (*target.topology, 1)[:3]
    if target.chip.dims == 2 and target.count <= 8:
        host, wrap = grid, (False, False, False)
    else:
        host = (2, 2, 1)
        # Rings close on whole pods (2D) and whole cubes (3D): cloud.google.com/tpu/docs/system-architecture-tpu-vm
        closes = 16 if target.chip.dims == 2 else 4
        wrap = tuple(dim >= 4 and dim % closes == 0 and all(d % 4 == 0 for d in target.topology) for dim in grid)
    options = {"chip_config_name": "megacore"} if target.chip.name == "v4" else {}
    topology = topologies.get_topology_desc(
        platform="tpu", topology_name=target.name, chips_per_host_bounds=host, wrap=wrap, **options
    )
    return list(topology.devices)


def _gpu_devices(target: Target) -> list[Any]:
    hosts, per_host = target.topology
    shape = f"1x{hosts}x{per_host}"  # slices x hosts x GPUs
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name=shape, topology=shape, target_config=gpu_target_config(target)
    )
    return list(topology.devices)


def gpu_target_config(target: Target) -> str:
    """The GpuTargetConfigProto text that stands in for the driver."""
    values, capability, description = _GPUS[target.chip.name]
    fields = " ".join(f"{name}: {value}" for name, value in zip(_GPU_FIELDS, values, strict=True))
    return (
        f"gpu_device_info {{ {_GPU_COMMON} {fields} device_memory_size: {target.chip.memory_bytes} "
        f"cuda_compute_capability {{ {capability} }} }} "
        f'platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} device_description_str: "{description}"'
    )


@contextmanager
def assumed_cudnn(target: Target) -> Iterator[None]:
    """Lets cuDNN attention be lowered for an absent GPU.

    jax asks the installed cuDNN for its version even when it only compiles, and the small form of the GPU compiler
    comes without one. The version that is assumed is the one in the target's description.
    """
    if not target.absent or target.chip.platform != "gpu":
        yield
        return
    from jax._src.cudnn import fused_attention_stablehlo as attention

    asked = attention.check_cudnn_version
    try:
        asked()
        missing = False
    except Exception:  # no library, or no driver: the type differs between versions of jax
        missing = True
    try:
        if missing:
            attention.check_cudnn_version = lambda: _CUDNN
        yield
    finally:
        attention.check_cudnn_version = asked


class Captured:
    """What native code wrote to the standard error stream."""

    text: str = ""

    def last_line(self) -> str:
        lines = [line for line in self.text.splitlines() if line.strip()]
        return lines[-1] if lines else "it said nothing more"


@contextmanager
def captured_stderr() -> Iterator[Captured]:
    """Redirects file descriptor 2, which compilers write to past sys.stderr; `text` is filled at the end.

    Should native code abort the process meanwhile, Python's fault handler still writes the stack to the real stream.
    """
    captured = Captured()
    sys.stderr.flush()
    kept = os.dup(2)
    guard = not faulthandler.is_enabled()
    if guard:
        faulthandler.enable(file=kept)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield captured
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            if guard:
                faulthandler.disable()
            os.close(kept)
            file.seek(0)
            captured.text = file.read().decode(errors="replace")
