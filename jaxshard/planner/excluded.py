"""What a search leaves out because sizes do not divide, in words: who misses a layout should read why."""

from collections.abc import Iterator, Sequence

from jaxshard.analysis.shardable import unsharded
from jaxshard.config import Config
from jaxshard.models.presets import Architecture
from jaxshard.parallel.axes import MODEL, SHORT, STAGE
from jaxshard.parallel.mesh import divisors
from jaxshard.parallel.resolve import divided
from jaxshard.planner.search import Pins, meshes
from jaxshard.xla.hardware import GPUS_PER_HOST, Target


def excluded(config: Config, arch: Architecture, target: Target, pins: Pins) -> list[str]:
    """Sentences: sizes of the axes, and stages of ZeRO, that these devices would allow and the model or batch does not.

    Args:
        config: that is searched.
        arch: the model.
        target: the hardware.
        pins: what is fixed; of an axis with a fixed size nothing is said.
    """
    return [*_sizes(config, arch, target, pins), *_stages(config, arch, target, pins)]


def _sizes(config: Config, arch: Architecture, target: Target, pins: Pins) -> Iterator[str]:
    sizes = [size for size in divisors(target.count) if size > 1]
    within: dict[tuple[str, ...], list[int]] = {
        (MODEL,): [size for size in sizes if size <= GPUS_PER_HOST or target.chip.platform != "gpu"],
        (STAGE,): [size for size in sizes if size <= arch.n_layers],
    }
    for option, value, axes in divided(config, arch):
        name, tried = " x ".join(SHORT[axis] for axis in axes), within.get(axes, sizes)
        out = [size for size in tried if value % size]
        if not out or not any(_free(axis, pins) for axis in axes):
            continue
        kept = [size for size in tried if value % size == 0]
        rest = f"; {_listed(kept, 'and')} {'does' if len(kept) == 1 else 'do'}" if kept else ""
        hint = ""
        if axes == (STAGE,):
            others = [size for size in divisors(value) if 1 < size <= sizes[-1] and size not in sizes][:6]
            hint = f" (stages are equal; on other numbers of devices {_listed(others, 'or')} would)" if others else ""
        which, them = _listed(out, "or"), "it" if len(out) == 1 else "them"
        yield f"Not searched: {name} = {which}: {option} = {value:,} does not divide by {them}{rest}{hint}."


def _stages(config: Config, arch: Architecture, target: Target, pins: Pins) -> Iterator[str]:
    """Stages of ZeRO that a weight stands against which cannot be split, each with the first mesh where it is so."""
    allowed = config.parallel.allow_replicated
    for zero in (1, 2, 3):
        if pins.fields.get("zero", zero) != zero:
            continue
        split = [shape for shape in meshes(config, arch, target, pins) if shape.data > 1]
        said = [unsharded(arch, config.optim, config.train.precision, shape, zero, allowed) for shape in split]
        left = [(shape, why) for shape, why in zip(split, said, strict=True) if why]
        if left:
            which = str(left[0][0]) if len(left) == 1 else f"{len(left)} of {len(split)} meshes, such as {left[0][0]}"
            yield f"Not searched: ZeRO-{zero} on {which}: {left[0][1]}."
            return  # the next stages say the same of more


def _free(axis: str, pins: Pins) -> bool:
    return not pins.mesh or pins.mesh.get(axis) == -1


def _listed(sizes: Sequence[int], last: str) -> str:
    return str(sizes[0]) if len(sizes) == 1 else f"{', '.join(map(str, sizes[:-1]))} {last} {sizes[-1]}"
