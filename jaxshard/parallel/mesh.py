"""The device mesh: the axes of `axes` over real, faked or absent devices."""

import math
import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxshard.errors import InputError, nearest
from jaxshard.parallel.axes import ALIASES, AXES, DEFAULT, MODEL, REPLICA, ROWS, MeshShape, mesh_text

Device = Any
"""A jax.Device, which type checkers do not take for a class."""


def parse_mesh(text: str | None) -> dict[str, int]:
    """Reads "dp=4,tp=2" into {"data": 4, "model": 2}; a size may be -1 once.

    Raises:
        InputError: an axis is unknown or given twice, a size is not a whole number, is 0 or below -1, or more than
            one size is -1.
    """
    sizes: dict[str, int] = {}
    for part in (text or f"{DEFAULT}=-1").split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if name == "auto":
            raise InputError(
                f"--mesh {text!r}: auto is for train, which plans a layout, and for plan; elsewhere give each axis a "
                "size, such as dp=4,tp=2"
            )
        if not equals:
            raise InputError(f"--mesh {text!r}: {part!r} is not of the form axis=size, such as dp=4,tp=2")
        if name not in ALIASES:
            valid = ", ".join(row.name if row.short == row.name else f"{row.short} ({row.name})" for row in ROWS)
            raise InputError(f"--mesh {text!r}: unknown axis {name!r}{nearest(name, ALIASES)}; the axes are {valid}")
        axis = ALIASES[name]
        if axis in sizes:
            raise InputError(f"--mesh {text!r}: axis {name!r} is given twice; give each axis once")
        try:
            size = int(value)
        except ValueError:
            raise InputError(f"--mesh {text!r}: size {value!r} of axis {name!r} is not a whole number") from None
        if size < 1 and size != -1:
            raise InputError(f"--mesh {text!r}: size {size} of axis {name!r} must be 1 or more, or -1 for the rest")
        sizes[axis] = size
    if list(sizes.values()).count(-1) > 1:
        raise InputError(f"--mesh {text!r}: only one axis may be -1; write the size of the others")
    return sizes


def resolve_mesh(text: str | None, device_count: int) -> MeshShape:
    """Fills in -1 and checks the product against the number of devices.

    Raises:
        InputError: as `parse_mesh`, or the product is not `device_count`.
    """
    sizes = parse_mesh(text)
    fixed = math.prod(size for size in sizes.values() if size != -1)
    free = next((axis for axis, size in sizes.items() if size == -1), None)
    if free is not None and device_count % fixed == 0:
        sizes[free] = device_count // fixed
    shape = MeshShape(**{axis: size for axis, size in sizes.items() if size != -1})
    if shape.devices != device_count or -1 in sizes.values():
        product = " x ".join(str(size) for size in sizes.values() if size != -1)
        product = f"{product} = {fixed}" if " x " in product else f"{fixed}"
        raise InputError(
            f"--mesh {text!r} needs {product} devices{' or a multiple' if free else ''}, and there are "
            f"{device_count}; what fits: {_suggest(sizes, device_count)}, or --fake-devices {fixed} on a CPU"
        )
    return shape


def _suggest(sizes: dict[str, int], device_count: int) -> str:
    """Nearest mesh: keep the inner axes as they are and give the rest of the devices to data."""
    inner = sizes.get(MODEL, 1)
    while inner > 1 and device_count % inner:
        inner -= 1
    inner = max(1, inner)
    return f"--mesh {mesh_text({DEFAULT: device_count // inner} | ({MODEL: inner} if inner > 1 else {}))}"


MOST_FAKED = 1024


def accelerator_present() -> bool:
    """Whether this machine shows a GPU or TPU, without starting a backend."""
    nodes = ("nvidia[0-9]*", "nvidiactl", "accel[0-9]*", "vfio/[0-9]*", "kfd", "dxg")
    return any(True for node in nodes for _ in Path("/dev").glob(node))


def cpu_by_default() -> bool:
    """Whether devices are CPUs where no option says what they are."""
    platforms = os.environ.get("JAX_PLATFORMS", "")  # what the user asks of jax outside of our options
    return platforms == "cpu" or (platforms == "" and not accelerator_present())


def open_devices(mesh: str | None, kind: str, fake_devices: int | None) -> list[Device]:
    """Returns the devices to run on, faking CPU devices where there is no accelerator.

    Args:
        mesh: as given to --mesh; its product is the number of faked devices unless `fake_devices` says otherwise.
        kind: auto, cpu, gpu or tpu.
        fake_devices: number of faked CPU devices, or None.

    Raises:
        InputError: the mesh text is wrong, the asked kind is absent, or the backend already runs with fewer devices.
    """
    sizes = parse_mesh(mesh)
    if fake_devices is not None and kind in ("gpu", "tpu"):
        raise InputError(f"--fake-devices {fake_devices} fakes CPU devices, and --devices asks for {kind}: drop one")
    cpu = kind == "cpu" or fake_devices is not None or (kind == "auto" and cpu_by_default())
    wanted = fake_devices or math.prod(size for size in sizes.values() if size != -1)
    if cpu and wanted > MOST_FAKED:
        raise InputError(
            f"{wanted:,} faked CPU devices are more than {MOST_FAKED:,}, which one machine bears; a larger mesh can be "
            "planned (plan --target h100:4096) or run on a cluster"
        )
    if cpu:
        return _cpu_devices(wanted, exact=fake_devices is not None or -1 not in sizes.values())
    try:
        return list(jax.devices(None if kind == "auto" else kind))
    except (RuntimeError, AssertionError) as error:  # an assertion is what jax fails with when no backend is left
        why = (str(error).splitlines() or ["jax finds no backend"])[0]
        what = f"--devices {kind}" if kind != "auto" else f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS')}"
        raise InputError(f"{what}: no such device here ({why}); try --devices cpu") from None


def _cpu_devices(wanted: int, exact: bool) -> list[Device]:
    try:
        # With a CPU asked for, a GPU or TPU plugin that happens to be installed must not be started.
        jax.config.update("jax_platforms", "cpu")
        # More than are wanted may have been asked for already, for other meshes of the same process.
        asked = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_num_cpu_devices", max(wanted, asked))
    except RuntimeError:
        pass  # The backend runs already; what it has is checked below.
    devices = jax.devices("cpu")
    if len(devices) < wanted:
        raise InputError(
            f"{wanted} faked CPU devices are needed, but jax already runs with {len(devices)}: set "
            f"JAX_NUM_CPU_DEVICES={wanted} in the environment, or ask for the mesh before using jax"
        )
    return list(devices[:wanted]) if exact else list(devices)


def build_mesh(shape: MeshShape, devices: Sequence[Device]) -> Mesh:
    """Places devices on the mesh: `model` on the fastest links, `replica` across slices or hosts.

    Args:
        shape: sizes of the axes.
        devices: as many devices as the product, of one kind.
    """
    assert len(devices) == shape.devices, (len(devices), shape)
    return Mesh(_arrange(shape, devices), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _arrange(shape: MeshShape, devices: Sequence[Device]) -> np.ndarray:
    if devices[0].platform == "tpu" and len(devices) > 1:
        from jax.experimental import mesh_utils

        slices = {getattr(device, "slice_index", 0) for device in devices}
        if len(slices) > 1 and shape.replica % len(slices) == 0:
            across = tuple(len(slices) if axis == REPLICA else 1 for axis in AXES)
            inner = tuple(size // outer for size, outer in zip(shape.sizes, across, strict=True))
            return mesh_utils.create_hybrid_device_mesh(inner, across, devices=devices)
        return mesh_utils.create_device_mesh(shape.sizes, devices=devices, allow_split_physical_axes=True)
    # Elsewhere hosts are contiguous, so the innermost axis stays inside a host for as long as it fits.
    ordered = sorted(devices, key=lambda device: (device.process_index, device.id))
    return np.array(ordered).reshape(shape.sizes)


@lru_cache(maxsize=4096)
def divisors(n: int) -> tuple[int, ...]:
    """In ascending order."""
    low = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return tuple(sorted({*low, *(n // d for d in low)}))
