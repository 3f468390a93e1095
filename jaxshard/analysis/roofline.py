"""Seconds of single instructions of a compiled program: arithmetic and bytes against what the chip reaches.

The efficiencies are those of the analytic model (`efficiency.py`, `kernels.Rates`, `links.py`): one set of constants.
What an instruction reads and writes is counted as XLA's own cost analysis does: of an operand that is only sliced the
slices, of a result that is updated in place the update (openxla/xla, HloCostAnalysis).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from jaxshard.analysis.dropping import integers
from jaxshard.analysis.efficiency import XLA, Constants
from jaxshard.analysis.kernels import Rates, machine
from jaxshard.analysis.links import Group, all_reduce, reduce_scatter, send
from jaxshard.xla.collectives import KINDS, Collective
from jaxshard.xla.flops import plain_flops
from jaxshard.xla.hardware import Target
from jaxshard.xla.hlo import HOST_SPACE, Array, Computation, Instruction, Module, Shape, leaves

FREE = {
    *("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "partition-id", "replica-id"),
    *("optimization-barrier", "add-dependency", "domain", "recv"),
}
"""Instructions that move no bytes."""
_FREE_CALLS = {"AllocateBuffer", "AsyncCollectiveStart", "AsyncCollectiveDone"}
FUSIONS = ("fusion", "fusion-start")
"""A fusion that is split into start and done is a copy beside the computation (GPU, jax 0.12)."""
_SAME = {"bitcast", "reshape", "convert", "copy", "transpose"}
_SLICES = {"dynamic-slice", "slice", "gather"}
_INTEGER = {"add", "subtract", "multiply", "xor", "or", "and"}
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
"""Opcode -> operand that holds what is written into operand 0."""


@dataclass(frozen=True)
class Cost:
    """What one run of an instruction takes."""

    kind: str
    """matmul, attention, memory or host."""
    seconds: float


@dataclass(frozen=True)
class Roofline:
    """A target as single instructions see it."""

    rates: Rates
    mesh: Mapping[str, int]
    """Axis -> size, outermost first."""

    def instruction(self, module: Module, computation: Computation, instruction: Instruction) -> Cost | None:
        """The cost of an instruction that is no collective and calls no schedule of its own; None: nothing."""
        if instruction.opcode in FREE or instruction.opcode.endswith(("-done", "-update")):
            return None
        target = instruction.attribute("custom_call_target") or ""
        if instruction.opcode == "custom-call" and target in _FREE_CALLS:
            return None
        if target.startswith("__cudnn$fmha"):
            return Cost("attention", self._fused_attention(module, computation, instruction))
        device, host = traffic(module, computation, instruction)
        moving = device / self.rates.memory
        products = sum(float(self._product(*found)) for found in _products(module, computation, instruction))
        if products:
            return Cost("matmul", max(products, moving + self.rates.gap))
        if host:
            return Cost("host", host / max(self.rates.hw.host, 1.0) + self.rates.gap)
        drawing = integers(self.rates, _instructions(module, instruction))
        return Cost("memory", max(moving, drawing) + self.rates.gap) if device else None

    def _product(self, m: float, k: float, n: float, batch: float, width: int) -> float:
        return replace(self.rates, width=width).matmul(m, k, n, batch)

    def _fused_attention(self, module: Module, computation: Computation, call: Instruction) -> float:
        """As `Rates.attention`: causal masks halve the work, products run at the share `flash`."""
        flops = plain_flops(module, computation, call)
        flops *= 0.5 if "CAUSAL" in call.attributes else 1.0
        return flops / (self.rates.peak * self.rates.c.flash) + self.rates.gap

    def collective(self, found: Collective) -> float:
        """Seconds of one call of a collective, by its bytes, axes and network."""
        group, apart = self._group(found)
        payload, net, c, software = found.bytes, self.rates.hw.net, self.rates.c, self.rates.software
        if group.size <= 1:
            return 0.0
        if found.kind == "collective-permute":
            return float(send(payload, apart >= net.node, net, c, software))
        cost = all_reduce if found.kind == "all-reduce" else reduce_scatter
        return float(cost(group, payload, net, c, software))

    def _group(self, found: Collective) -> tuple[Group, int]:
        """The members of the first group, and how far apart its first and last device are in the mesh."""
        ids, stride = [0], 1
        for axis in reversed(list(self.mesh)):
            if axis in found.axes:
                ids = [one + index * stride for index in range(self.mesh[axis]) for one in ids]
            stride *= self.mesh[axis]
        if not found.axes:
            ids = list(range(found.group_size))
        ids = sorted(ids)[: found.group_size] if found.kind != "collective-permute" else ids
        node = self.rates.hw.net.node
        return Group(len(ids), sum(one < node for one in ids)), max(ids)


def roofline(target: Target, mesh: Mapping[str, int]) -> Roofline:
    """Of a target whose speed is known.

    Raises:
        InputError: it is not (a CPU).
    """
    return Roofline(Rates(machine(target), Constants(), XLA, 2), mesh)


def traffic(module: Module, computation: Computation, instruction: Instruction) -> tuple[float, float]:
    """Bytes that an instruction moves to and from (device memory, host memory); on-chip memory costs nothing."""
    sizes = {0: 0.0, HOST_SPACE: 0.0}
    for position, name in enumerate(instruction.operands):
        share = _share(module, computation, instruction, position)
        for array in leaves(computation.shape_of(name)):
            sizes[array.space] = sizes.get(array.space, 0.0) + share * array.bytes
    for array, count in _written(module, computation, instruction):
        sizes[array.space] = sizes.get(array.space, 0.0) + count
    return sizes[0], sizes[HOST_SPACE]


def _share(module: Module, computation: Computation, user: Instruction, position: int) -> float:
    """Share of operand `position` that an instruction reads."""
    operand = computation.shape_of(user.operands[position])
    if user.opcode in KINDS or user.opcode in FREE - {"tuple", "bitcast"}:
        return 0.0
    if user.opcode in _SLICES and position == 0:
        return min(1.0, _elements(user.shape) / max(1, _elements(operand)))
    if user.opcode in _UPDATES and position == 0:
        return 0.0
    if user.opcode in FUSIONS and user.called:
        fused = module.computations[user.called[0]]
        inner = next((i for i in fused.instructions if i.opcode == "parameter" and i.index == position), None)
        return _read(module, fused, inner) if inner else 1.0
    if user.opcode in _SAME and not user.root:
        return _read(module, computation, user)
    return 1.0


def _read(module: Module, computation: Computation, value: Instruction) -> float:
    """Share of a value within a fusion that its users read."""
    users = [i for i in computation.instructions if value.name in i.operands]
    shares = (_share(module, computation, user, user.operands.index(value.name)) for user in users)
    return min(1.0, sum(shares)) if users else 1.0


def _written(module: Module, computation: Computation, instruction: Instruction) -> list[tuple[Array, float]]:
    """The arrays of a result, each with the bytes that are written."""
    shape = instruction.shape
    if instruction.opcode == "fusion-start" and isinstance(shape, tuple):
        shape = shape[1]  # (operands, result, context)
    if instruction.opcode in FUSIONS and instruction.called:
        fused = module.computations[instruction.called[0]]
        roots = [fused.root]
        if fused.root.opcode == "tuple":
            roots = [fused.by_name[name] for name in fused.root.operands]
        arrays = list(leaves(shape))
        if len(arrays) == len(roots):
            return [(array, _new(module, fused, root, array)) for array, root in zip(arrays, roots, strict=True)]
    return [(array, _new(module, computation, instruction, array)) for array in leaves(shape)]


def _new(module: Module, computation: Computation, made: Instruction, array: Array) -> float:
    """Bytes of an array that are new: all of it, or what is written into it in place."""
    while (
        made.opcode in _SAME and made.operands and computation.by_name[made.operands[0]].opcode in (*_SAME, *_UPDATES)
    ):
        made = computation.by_name[made.operands[0]]
    if made.opcode in _UPDATES:
        update = computation.shape_of(made.operands[_UPDATES[made.opcode]])
        times = 2 if made.opcode == "scatter" else 1  # what is added to is read first
        return times * array.bytes * min(1.0, _elements(update) / max(1, array.elements))
    if made.opcode == "fusion" and made.called and isinstance(made.shape, Array):
        fused = module.computations[made.called[0]]
        return _new(module, fused, fused.root, array)
    if made.opcode in KINDS or made.opcode in FREE - {"bitcast", "constant"}:
        return 0.0
    return float(array.bytes)


def _instructions(module: Module, instruction: Instruction) -> int:
    """Integer instructions of a fusion: what its random bits take. Two shifts and an or, a rotation, are one."""
    if instruction.opcode not in FUSIONS or not instruction.called:
        return 0
    inner = module.computations[instruction.called[0]].instructions
    return sum(
        found.shape.elements
        for found in inner
        if found.opcode in _INTEGER and isinstance(found.shape, Array) and found.shape.dtype == "u32"
    )


def _elements(shape: Shape) -> int:
    return sum(array.elements for array in leaves(shape))


def _products(module: Module, computation: Computation, instruction: Instruction) -> list[tuple]:
    """(m, k, n, batch, bytes of a number) of every product [batch, m, k] x [batch, k, n] that an instruction computes.

    The sizes follow from those of the arrays: with 2 b m k n FLOPs and b m k, b k n and b m n elements, k, n, m and b
    are quotients, whatever notation the compiler chose (dot, library call, convolution).
    """
    if instruction.opcode == "fusion" and instruction.called:
        fused = module.computations[instruction.called[0]]
        return [found for inner in fused.instructions for found in _products(module, fused, inner)]
    if instruction.opcode not in ("dot", "convolution", "custom-call"):
        return []
    flops = plain_flops(module, computation, instruction)
    if not flops:
        return []
    left, right = (next(leaves(computation.shape_of(name))) for name in instruction.operands[:2])
    result = next(leaves(instruction.shape))
    k, n, m = (flops / 2 / max(1, array.elements) for array in (result, left, right))
    batch = max(1.0, left.elements / max(1.0, m * k))
    return [(m, k, n, batch, 4 if left.dtype in ("f32", "f64") and right.dtype in ("f32", "f64") else 2)]


def seconds_text(seconds: float) -> str:
    """Seconds for people: "1.23 s", "45.6 ms", "7.8 us"; "not known" where they are not finite."""
    if not math.isfinite(seconds):
        return "not known"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
