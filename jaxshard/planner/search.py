"""All the ways to lay a training step out over a number of devices: what divides, what is pinned.

Their times are predicted by `prediction`; `ranking` looks at their memory, fastest layouts first.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxshard.analysis.shardable import unsharded
from jaxshard.config import Config
from jaxshard.errors import InputError
from jaxshard.models.presets import Architecture
from jaxshard.parallel.axes import MeshShape, mesh_text
from jaxshard.parallel.mesh import divisors, parse_mesh
from jaxshard.parallel.resolve import misfits
from jaxshard.training.pipeline_plan import OPTIONS, plan_pipeline
from jaxshard.training.program import check_fit
from jaxshard.xla.hardware import GPUS_PER_HOST, Target

REMATS = ("none", "dots", "full")
MOST_SEQUENCES = 64
"""Sequences of one microbatch on one device that are tried at most, where a larger one is not the whole batch."""
SEARCHED = {
    "zero": "zero",
    "parallel.remat": "remat",
    "parallel.accumulation": "accumulation",
    "parallel.microbatches": "microbatches",
    "parallel.schedule": "schedule",
    "parallel.virtual_stages": "virtual_stages",
    "parallel.offload": "offload",
    "parallel.sequence_parallel": "sequence_parallel",
}
"""Option -> field of `ParallelConfig` and of `Candidate`; the mesh beside them is searched axis by axis."""
DEPENDENT = {"parallel.pipeline_gather": "pipeline_gather", "parallel.offload_mode": "offload_mode"}
"""Option -> field of `ParallelConfig` that only some layouts have (`Candidate.has`). It is not searched; pinned it
leaves the layouts that have it."""


@dataclass(frozen=True, order=True)
class Candidate:
    """One layout of a step."""

    shape: MeshShape
    zero: int
    remat: str
    accumulation: int = 1
    microbatches: int | None = None
    schedule: str | None = None
    virtual_stages: int | None = None
    sequence_parallel: bool = False
    offload: str = "none"

    def has(self, name: str) -> bool:
        """Whether a field of `DEPENDENT` means something here."""
        return self.zero == 3 and self.shape.stage > 1 if name == "pipeline_gather" else self.offload != "none"

    @property
    def complexity(self) -> tuple[int, ...]:
        """Smaller is simpler: fewer things split, fewer things done twice; ties are broken by it."""
        s = self.shape
        return (
            (s.model > 1) + (s.stage > 1) + (s.replica > 1) + (self.offload != "none"),
            self.zero,
            REMATS.index(self.remat) if self.remat in REMATS else len(REMATS),
            self.accumulation > 1,
            bool(self.virtual_stages),
            self.sequence_parallel,
        )


def words(c: Candidate) -> str:
    """A layout in one line: "dp=4,tp=2, ZeRO-1, remat full, accumulation 4"."""
    parts = [str(c.shape), f"ZeRO-{c.zero}", f"remat {c.remat}"]
    if c.accumulation > 1:
        parts.append(f"accumulation {c.accumulation}")
    if c.microbatches:
        chunks = f" with {c.virtual_stages} chunks" if c.virtual_stages else ""
        parts.append(f"{c.microbatches} microbatch{'es' * (c.microbatches > 1)} {c.schedule}{chunks}")
    if c.sequence_parallel:
        parts.append("sequence parallel")
    if c.offload != "none":
        parts.append("masters and moments in host memory")
    return ", ".join(parts)


@dataclass(frozen=True)
class Pins:
    """What the user fixed.

    Attributes:
        mesh: sizes by axis; -1 is what is left over. Empty: all free.
        fields: field of `Candidate` or `DEPENDENT` -> its value.
    """

    mesh: Mapping[str, int]
    fields: Mapping[str, Any]

    def allows(self, candidate: Candidate) -> bool:
        return all(
            candidate.has(name) if name in DEPENDENT.values() else getattr(candidate, name) == value
            for name, value in self.fields.items()
        )

    def __str__(self) -> str:
        options = {field: f"--{option}" for option, field in (SEARCHED | DEPENDENT).items()}
        mesh = mesh_text(self.mesh)
        parts = [f"--mesh {mesh}"] if mesh else []
        return " ".join(parts + [f"{options[name]} {value}" for name, value in self.fields.items()])


def pins_of(config: Config, given: Mapping[str, Any]) -> Pins:
    """What the user fixed on the command line; what a file says is where the search starts, and stays free, as does
    what the line leaves open with null.

    Args:
        config: as configured.
        given: names of the options on the command line.
    """
    values = vars(config.parallel)
    options = (SEARCHED | DEPENDENT).items()
    fields = {field: values[field] for option, field in options if option in given and values[field] is not None}
    return Pins(parse_mesh(config.mesh) if "mesh" in given and config.mesh != "auto" else {}, fields)


def apply(config: Config, candidate: Candidate) -> Config:
    """The configuration with a candidate's choices in it."""
    c = candidate
    parallel = replace(
        config.parallel,
        mesh=str(c.shape),
        zero=c.zero,
        remat=c.remat,
        accumulation=c.accumulation,
        microbatches=c.microbatches,
        schedule=c.schedule,
        virtual_stages=c.virtual_stages,
        sequence_parallel=c.sequence_parallel,
        offload=c.offload,
        **{name: getattr(config.parallel, name) if c.has(name) else None for name in DEPENDENT.values()},
    )
    return replace(config, parallel=parallel)


def candidates(config: Config, arch: Architecture, target: Target, pins: Pins, offload: bool) -> list[Candidate]:
    """Every legal layout, in a fixed order; with `offload` those that keep something in host memory.

    Raises:
        InputError: nothing is legal; names the pin or the size that stands in the way.
    """
    found = []
    for shape in meshes(config, arch, target, pins):
        for split in _splits(config, arch, shape, pins):
            for zero in (0, 1, 2, 3):
                if zero and (shape.data == 1 and "zero" not in pins.fields):
                    continue
                if not _shards(arch, config, shape, zero):
                    continue
                for remat in _remats(pins, offload):
                    for place in _places(pins, remat, offload):
                        candidate = replace(split, zero=zero, remat=remat, offload=place)
                        if pins.allows(candidate):
                            found.append(candidate)
    return found


def _remats(pins: Pins, offload: bool) -> Sequence[str]:
    if "remat" in pins.fields:
        return (pins.fields["remat"],)
    return (*REMATS, "offload") if offload else REMATS


def _places(pins: Pins, remat: str, offload: bool) -> Sequence[str]:
    if "offload" in pins.fields:
        return (pins.fields["offload"],)
    return ("none",) if not offload else ("none", "optimizer") if remat == "offload" else ("optimizer",)


def meshes(config: Config, arch: Architecture, target: Target, pins: Pins) -> list[MeshShape]:
    """Mesh shapes that use every device and that model and batch divide by.

    Raises:
        InputError: there is none; says which pin or size stands in the way.
    """
    found, reasons = [], []
    for shape in _factorizations(target.count, pins.mesh):
        reason = _refusal(config, arch, shape, target, pins)
        if reason is None:
            found.append(shape)
        else:
            reasons.append(reason)
    if found:
        return found
    mesh = mesh_text(pins.mesh)
    if pins.mesh and not reasons:
        raise InputError(
            f"--mesh {mesh} does not make the {target.count} devices of target {target.name}: choose sizes that divide "
            f"{target.count}, and give one axis -1 for the rest"
        )
    first = reasons[0] if reasons else "there is no factorization"
    raise InputError(
        f"no mesh of {target.name}'s {target.count} devices works: {'--mesh ' + mesh + ': ' if mesh else ''}{first}"
    )


def _factorizations(count: int, pinned: Mapping[str, int]) -> Iterator[MeshShape]:
    """All (replica, stage, data, model) whose product is `count`, with the pinned axes; an axis left out of --mesh
    is 1 when one is -1 or the sizes fill the devices, as for train."""
    fixed = {axis: size for axis, size in pinned.items() if size != -1}
    closed = bool(pinned)
    for model in divisors(count):
        for data in divisors(count // model):
            for stage in divisors(count // model // data):
                shape = MeshShape(replica=count // model // data // stage, stage=stage, data=data, model=model)
                sizes = shape.by_axis
                if any(sizes[axis] != size for axis, size in fixed.items()):
                    continue
                if closed and any(size > 1 for axis, size in sizes.items() if axis not in pinned):
                    continue
                yield shape


def _refusal(config: Config, arch: Architecture, shape: MeshShape, target: Target, pins: Pins) -> str | None:
    """Why a shape is not tried, or None."""
    if misfit := next(misfits(config, arch, shape), None):
        return str(misfit)
    if not pins.mesh and target.chip.platform == "gpu" and shape.model > GPUS_PER_HOST:
        return f"tp = {shape.model} reaches beyond a host of {GPUS_PER_HOST}"
    # Copies of everything pay only where they keep traffic off the network between hosts.
    if not pins.mesh and shape.replica > 1 and (target.hosts == 1 or target.hosts % shape.replica):
        return f"replica = {shape.replica} does not divide the {target.hosts} hosts"
    return None


def _splits(config: Config, arch: Architecture, shape: MeshShape, pins: Pins) -> Iterator[Candidate]:
    """How the batch of one data group is taken: accumulation parts, microbatches, schedule, sequence parallelism."""
    own = config.train.global_batch // shape.batch_ways
    sequence = [False]
    if shape.model > 1 and config.data.seq_len % shape.model == 0:
        sequence = [False, True]
    for parallel in sequence:
        for parts in divisors(own):
            if shape.stage == 1:
                if own // parts <= MOST_SEQUENCES or parts == 1:
                    yield Candidate(shape, 0, "none", accumulation=parts, sequence_parallel=parallel)
                continue
            wanted = pins.fields.get("accumulation", 1)
            if (
                own % wanted
                or parts > own // wanted
                or (own // wanted) % parts
                or own // wanted // parts > MOST_SEQUENCES
            ):
                continue
            for schedule, chunks in _schedules(arch, shape, pins):
                if parts < min(shape.stage, own // wanted):  # fewer microbatches than stages: mostly idle
                    continue
                yield Candidate(shape, 0, "none", wanted, parts, schedule, chunks, parallel)


def _schedules(arch: Architecture, shape: MeshShape, pins: Pins) -> Iterator[tuple[str, int | None]]:
    name = pins.fields.get("schedule")
    chunks = pins.fields.get("virtual_stages")
    if chunks in (None, 1) and name != "interleaved":
        yield name or "1f1b", chunks
    for count in (chunks,) if chunks else (2, 4):
        if name in (None, "interleaved") and arch.n_layers % (shape.stage * count) == 0:
            yield "interleaved", count


def _shards(arch: Architecture, config: Config, shape: MeshShape, zero: int) -> bool:
    """Whether the state can be split over the data axis as the stage asks (`rules.check_replicated`)."""
    if zero == 0 or shape.data == 1:
        return True
    return unsharded(arch, config.optim, config.train.precision, shape, zero, config.parallel.allow_replicated) is None


def obstacle(config: Config, arch: Architecture, target: Target, pins: Pins) -> str | None:
    """What a run says to the pins, on the first mesh where it says something; None where the pins exclude each other.

    Where an option of pipelines is pinned, meshes with stages are asked first.
    """
    fixed = {name: value for name, value in pins.fields.items() if name not in DEPENDENT.values()}
    dependent: dict[str, Any] = {name: value for name, value in pins.fields.items() if name in DEPENDENT.values()}
    free = {
        "zero": 3 if "pipeline_gather" in dependent else 0,
        "remat": "none",
        "offload": "optimizer" if "offload_mode" in dependent else "none",
    }
    staged = any(pins.fields.get(name) is not None for name in OPTIONS)
    for shape in sorted(meshes(config, arch, target, pins), key=lambda shape: (shape.stage > 1) != staged):
        candidate = Candidate(shape, **free | fixed)
        try:
            tried = apply(config, candidate)
            tried = tried.with_parallel(**dependent)
            check_fit(tried, arch, shape)
            plan_pipeline(tried, candidate.zero, arch, shape)
        except InputError as error:
            return str(error)
        if not _shards(arch, config, shape, candidate.zero):
            allowed = config.parallel.allow_replicated
            return unsharded(arch, config.optim, config.train.precision, shape, candidate.zero, allowed)
    return None
