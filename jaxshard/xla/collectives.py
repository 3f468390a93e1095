"""Every collective of a compiled program: kind, mesh axes, bytes, calls, where from, and what runs meanwhile.

How compilers write them, and what counts as one collective here:

- plain        `all-reduce(...)`
- pair         `all-gather-start` ... `all-gather-done`, also `async-start` around a wrapped computation: one
- combined     one instruction with several operands: one call, all operands' bytes
- fused        inside a fusion. TPU: `all-reduce-scatter` (an all-reduce whose slice is taken at once): a reduce-scatter
- async fused  TPU: a fusion with AsyncCollectiveStart, fusions that carry it along beside a matmul, and one with
  AsyncCollectiveDone, each repeating the collective: one
- send         GPU: a permute taken apart into send and recv: one permute
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from jaxshard.xla.flops import instruction_flops
from jaxshard.xla.groups import Span, span
from jaxshard.xla.hlo import Array, Computation, Instruction, Module, Shape, leaves, parse, shape_bytes
from jaxshard.xla.loops import Loop, Scope, scopes

KINDS = (
    "all-reduce",
    "reduce-scatter",
    "all-gather",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_NO_WORK = {
    "parameter",
    "constant",
    "get-tuple-element",
    "tuple",
    "bitcast",
    "after-all",
    "partition-id",
    "replica-id",
    "optimization-barrier",
    "add-dependency",
}
_IS_SYNC = re.compile(r'"is_sync": ?true')
_SEND_PAIRS = re.compile(r"_xla_send_recv_source_target_pairs=\"?(\{\{.*?\}\})")


@dataclass(frozen=True)
class Overlap:
    """What the schedule runs between the start and the end of an asynchronous collective."""

    instructions: tuple[str, ...]
    """Names of instructions that compute or copy."""
    flops: float
    """Matrix FLOPs of those, on one device."""
    collectives: tuple[str, ...]
    """Names of other collectives in flight at the same time."""


@dataclass(frozen=True)
class Part:
    """One array of a collective; combined collectives have several."""

    dtype: str
    elements: int
    bytes: int
    unpadded: str = ""
    """Its shape before it was padded for the collective; "" where it was not."""


@dataclass(frozen=True)
class Collective:
    """One collective instruction of the program."""

    kind: str
    """One of KINDS."""
    axes: tuple[str, ...]
    """Mesh axes, outermost first; empty when no axes describe the groups (see note)."""
    bytes: int
    """Bytes of the full logical result per call on one device: all-gather its result, reduce-scatter its whole input,
    all-reduce its result, all-to-all and permute the array."""
    count: int
    """Calls in one run of the program, loop trips multiplied; unknown trip counts count once (see exact)."""
    exact: bool
    """False when a loop around it has a trip count decided while running, or it stands in a branch."""
    parts: tuple[Part, ...]
    dtype: str
    """Element types that travel, joined by +."""
    op_name: str
    source: str
    """ "file:line" or ""."""
    is_async: bool
    overlap: Overlap | None
    """None when it is not asynchronous."""
    loops: tuple[Loop, ...]
    branches: tuple[str, ...]
    group_size: int
    form: str
    """plain, pair, fused, async fused or send."""
    name: str
    computation: str
    shift: int | None
    """Permutes along one axis: places that every block moves; else None."""
    note: str
    """Empty, or what is unusual about its groups or type."""

    @property
    def total_bytes(self) -> int:
        """Bytes over all calls of one run."""
        return self.bytes * self.count


def collectives(text: str, mesh_shape: Mapping[str, int]) -> list[Collective]:
    """Reads the text of a compiled program.

    Args:
        text: what `jax.stages.Compiled.as_text()` returns.
        mesh_shape: axis name -> size, outermost first, of the mesh whose flattened devices the program runs on.
    """
    return module_collectives(parse(text), mesh_shape)


def module_collectives(module: Module, mesh_shape: Mapping[str, int]) -> list[Collective]:
    """The collectives of a parsed module, in program order of each scope."""
    started = _started_in_fusions(module)
    return [found for scope in scopes(module) for found in _scope_collectives(scope, mesh_shape, started)]


@dataclass(frozen=True)
class _Site:
    """One collective in one scope's schedule: positions of its first and last instruction."""

    kind: str
    form: str
    inner: Instruction
    """The collective itself (inside a fusion, the fused one)."""
    outer: Instruction
    """The scheduled instruction: the same, or the fusion or async-start around it."""
    shape: Shape
    start: int
    end: int
    unpadded: tuple[str, ...] = ()
    """Of a fused one, for each operand: see `Part`."""


def _scope_collectives(scope: Scope, mesh_shape: Mapping[str, int], started: set[str]) -> Iterator[Collective]:
    sites = list(_sites(scope, started))
    for site in sites:
        yield _describe(scope, site, sites, mesh_shape)


def _key(inner: Instruction) -> str:
    """What the repetitions of one asynchronous fused collective have in common."""
    return " ".join((inner.opcode, inner.shape_text.split("{")[0], inner.attribute("channel_id") or ""))


def _targets(computation: Computation) -> set[str | None]:
    return {each.attribute("custom_call_target") for each in computation.instructions if each.opcode == "custom-call"}


def _started_in_fusions(module: Module) -> set[str]:
    """Keys of the collectives that some fusion starts; others carry them along, also within a loop, and end them."""
    starting = [c for c in module.computations.values() if "AsyncCollectiveStart" in _targets(c)]
    return {_key(inner) for computation in starting for inner in computation.instructions if inner.opcode in KINDS}


def _sites(scope: Scope, started: set[str]) -> Iterator[_Site]:
    """Finds the collectives of one schedule, each once."""
    if scope.kind == "call" and scope.caller is not None and scope.caller.opcode == "async-start":
        return  # the async-start that wraps this computation stands for it
    for index, instruction in enumerate(scope.computation.instructions):
        opcode = instruction.opcode
        if opcode in KINDS:
            shape = _logical(opcode, instruction, instruction.shape, scope)
            yield _Site(opcode, "plain", instruction, instruction, shape, index, index)
        elif opcode.removesuffix("-start") in KINDS:
            kind = opcode.removesuffix("-start")
            shape = _logical(kind, instruction, _started(instruction.shape), scope)
            yield _Site(kind, "pair", instruction, instruction, shape, index, _end(scope, index))
        elif opcode == "send" and _SEND_PAIRS.search(instruction.attributes):
            shape = scope.computation.shape_of(instruction.operands[0])
            yield _Site("collective-permute", "send", instruction, instruction, shape, index, _end(scope, index))
        elif opcode == "async-start" and instruction.called:
            wrapped = Scope(scope.module, scope.module.computations[instruction.called[0]], parent=scope)
            for inner in wrapped.computation.instructions:
                if inner.opcode in KINDS:
                    shape = _logical(inner.opcode, inner, inner.shape, wrapped)
                    yield _Site(inner.opcode, "pair", inner, instruction, shape, index, _end(scope, index))
        elif opcode == "fusion":
            yield from _fused(scope, index, instruction, started)


def _fused(scope: Scope, index: int, fusion: Instruction, started: set[str]) -> Iterator[_Site]:
    """Collectives inside a fusion; `started`: of the asynchronous ones, only the fusion that starts it counts."""
    fused = scope.module.computations[fusion.called[0]]
    inner_scope = Scope(scope.module, fused, parent=scope, caller=fusion, kind="fusion")
    starts = "AsyncCollectiveStart" in _targets(fused)
    for inner in fused.instructions:
        if inner.opcode == "fusion":
            yield from _fused(inner_scope, index, inner, started)
        if inner.opcode not in KINDS:
            continue
        shape = _logical(inner.opcode, inner, inner.shape, inner_scope)
        if starts:
            end = _fused_end(scope, index, _key(inner))
            yield _Site(inner.opcode, "async fused", inner, fusion, shape, index, end)
        elif _key(inner) in started:
            continue
        elif fused.name.startswith("all-reduce-scatter"):
            yield _Site("reduce-scatter", "fused", inner, fusion, shape, index, index, _before_padding(fused, inner))
        else:
            yield _Site(inner.opcode, "fused", inner, fusion, shape, index, index)


def _before_padding(fused: Computation, collective: Instruction) -> tuple[str, ...]:
    """Shapes of the operands that the fusion pads first, so that all devices keep parts of one size; "" of others."""
    makers = [fused.by_name[operand] for operand in collective.operands]
    return tuple(str(fused.shape_of(maker.operands[0])) if maker.opcode == "pad" else "" for maker in makers)


def _fused_end(scope: Scope, start: int, key: str) -> int:
    """Position of the fusion with the AsyncCollectiveDone of the collective `key`."""
    schedule = scope.computation.instructions
    for index in range(start + 1, len(schedule)):
        if schedule[index].opcode != "fusion":
            continue
        fused = scope.module.computations[schedule[index].called[0]]
        repeats = any(inner.opcode in KINDS and _key(inner) == key for inner in fused.instructions)
        if repeats and "AsyncCollectiveDone" in _targets(fused):
            return index
    return len(schedule)


def _started(shape: Shape) -> Shape:
    """The result within the shape of a -start, which is (operands, results, ...)."""
    return shape if isinstance(shape, Array) or len(shape) < 2 else shape[1]


def _logical(kind: str, instruction: Instruction, result: Shape, scope: Scope) -> Shape:
    """The arrays whose bytes count for `kind`."""
    sizes = re.search(r"slice_sizes=\{(\{[\d,{}]*\})\}", instruction.attributes)
    if kind == "collective-permute" and sizes:  # TPU: only slices of the arrays travel
        dtype = next(leaves(result)).dtype
        parts = re.findall(r"\{([\d,]+)\}", sizes[1])
        return tuple(Array(dtype, tuple(int(dim) for dim in part.split(","))) for part in parts)
    if kind in ("all-gather", "ragged-all-to-all"):
        return result
    # The input is as large as the result, or it is what counts; and its shape is spelt alike in every version.
    return tuple(scope.computation.shape_of(operand) for operand in instruction.operands)


def _end(scope: Scope, start: int) -> int:
    """Position of the -done that belongs to the start at `start`, through -update; the schedule's end when outside."""
    schedule = scope.computation.instructions
    handle = schedule[start].name
    for index in range(start + 1, len(schedule)):
        later = schedule[index]
        if handle in later.operands and later.opcode.endswith("-update"):
            handle = later.name
        elif handle in later.operands and later.opcode.endswith("-done"):
            return index
    return len(schedule)


def _describe(scope: Scope, site: _Site, sites: list[_Site], mesh_shape: Mapping[str, int]) -> Collective:
    pairs = _SEND_PAIRS.search(site.inner.attributes)
    found: Span = span(f"source_target_pairs={pairs[1]}" if pairs else site.inner.attributes, mesh_shape)
    is_async = site.end > site.start and not _IS_SYNC.search(site.outer.attributes)
    dtypes = dict.fromkeys(leaf.dtype for leaf in leaves(site.shape))
    notes = [found.note] if found.note else []
    if (site.inner.attribute("to_apply") or "").endswith("_promoted"):
        notes.append("widened to f32 by the CPU compiler")
    origin = _origin(scope, site)
    if site.kind == "collective-permute" and found.shift in (1, -1) and origin.op_name.endswith("dot_general"):
        notes.append("a step of a collective matmul")
    return Collective(
        kind=site.kind,
        axes=found.axes,
        bytes=shape_bytes(site.shape),
        count=scope.runs,
        exact=not scope.branches and all(loop.trips is not None for loop in scope.loops),
        parts=_parts(site),
        dtype="+".join(dtypes),
        op_name=origin.op_name,
        source=scope.module.source(origin),
        is_async=is_async,
        overlap=_overlap(scope, site, sites) if is_async else None,
        loops=scope.loops,
        branches=scope.branches,
        group_size=found.size,
        form=site.form,
        name=site.outer.name,
        computation=scope.computation.name,
        shift=found.shift,
        note="; ".join(notes),
    )


def _origin(scope: Scope, site: _Site) -> Instruction:
    """The instruction that says where a collective comes from.

    Combined collectives lose their name: then it is the instruction that makes the first named operand, or the first
    that reads the result.
    """
    makers = (_maker(scope, operand) for operand in site.outer.operands)
    for instruction in (site.inner, site.outer, *makers):
        if instruction.op_name:
            return instruction
    handles = {site.outer.name}
    for later in scope.computation.instructions[site.start + 1 :]:
        if handles.intersection(later.operands):
            if later.op_name:
                return later
            handles.add(later.name)
    return site.outer


def _maker(scope: Scope, operand: str) -> Instruction:
    """What makes an operand, behind unnamed copies and bitcasts."""
    instruction = scope.computation.by_name[operand]
    while not instruction.op_name and instruction.opcode in ("copy", "bitcast", "copy-done", "copy-start"):
        instruction = scope.computation.by_name[instruction.operands[0]]
    return instruction


def _parts(site: _Site) -> tuple[Part, ...]:
    arrays = list(leaves(site.shape))
    before = site.unpadded or [""] * len(arrays)
    return tuple(
        Part(array.dtype, array.elements, array.bytes, unpadded) for array, unpadded in zip(arrays, before, strict=True)
    )


def _overlap(scope: Scope, site: _Site, sites: list[_Site]) -> Overlap:
    between = scope.computation.instructions[site.start + 1 : site.end]
    own = {other.outer.name for other in sites}
    working = [
        instruction
        for instruction in between
        if instruction.opcode not in _NO_WORK
        and instruction.name not in own
        and not instruction.opcode.endswith(("-start", "-done", "-update"))
    ]
    return Overlap(
        instructions=tuple(instruction.name for instruction in working),
        flops=sum(instruction_flops(scope, instruction) for instruction in working),
        collectives=tuple(
            other.outer.name
            for other in sites
            if other is not site and other.start < site.end and other.end > site.start
        ),
    )
