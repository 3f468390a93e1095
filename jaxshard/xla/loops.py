"""What a compiled program runs, and how often: scopes (entry, loop bodies, branches, calls) and trip counts.

GPU and CPU programs carry a known trip count; TPU programs do not, and there it is derived from the loop's condition,
its step and its first value, through the tuples that carry constants into nested loops.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from jaxshard.xla.hlo import Computation, Instruction, Module

_KNOWN_TRIPS = re.compile(r'"?known_trip_count"?: ?\{"?n"?: ?"?(\d+)')
_SAME_VALUE = {"copy", "bitcast", "convert", "reshape", "copy-start", "copy-done", "optimization-barrier"}
_CALLS = {"call", "async-start", "custom-call"}


@dataclass(frozen=True)
class Loop:
    """One while loop around an instruction."""

    name: str
    trips: int | None
    """Times that it runs for each run of what encloses it; None: decided while running."""


@dataclass(frozen=True)
class Scope:
    """One computation as it is reached from the entry: through which loops, branches and calls."""

    module: Module = field(repr=False)
    computation: Computation = field(repr=False)
    loops: tuple[Loop, ...] = ()
    branches: tuple[str, ...] = ()
    """Conditionals around it, each as "name branch k of n"."""
    parent: "Scope | None" = field(default=None, repr=False)
    caller: Instruction | None = field(default=None, repr=False)
    kind: str = "entry"
    """entry, body, condition, branch, call or fusion."""

    @property
    def runs(self) -> int:
        """Runs of this computation in one run of the program; loops with unknown trips count once."""
        runs = 1
        for loop in self.loops:
            runs *= 1 if loop.trips is None else loop.trips
        return runs


def scopes(module: Module) -> Iterator[Scope]:
    """Every computation that the program executes (not fused computations and reducers), outermost first."""
    waiting = [Scope(module, module.entry)]
    while waiting:
        scope = waiting.pop(0)
        yield scope
        for instruction in scope.computation.instructions:
            waiting.extend(inner_scopes(scope, instruction))


def inner_scopes(scope: Scope, instruction: Instruction) -> list[Scope]:
    """The scopes that one instruction opens: body and condition of a while, branches, called computations."""
    module, computations = scope.module, scope.module.computations
    if instruction.opcode == "while":
        body, condition = instruction.attribute("body"), instruction.attribute("condition")
        trips = trip_count(scope, instruction)
        found = []
        for kind, name, extra in (("condition", condition, 1), ("body", body, 0)):
            if name in computations:
                loop = Loop(instruction.name, None if trips is None else trips + extra)
                loops = (*scope.loops, loop)
                found.append(Scope(module, computations[name], loops, scope.branches, scope, instruction, kind))
        return found
    if instruction.opcode == "conditional":
        names = [name for name in instruction.called if name in computations]
        return [
            Scope(
                module,
                computations[name],
                scope.loops,
                (*scope.branches, f"{instruction.name} branch {index + 1} of {len(names)}"),
                scope,
                instruction,
                "branch",
            )
            for index, name in enumerate(names)
        ]
    if instruction.opcode in _CALLS:
        return [
            Scope(module, computations[name], scope.loops, scope.branches, scope, instruction, "call")
            for name in instruction.called
            if name in computations
        ]
    return []


def trip_count(scope: Scope, loop: Instruction) -> int | None:
    """How often the body of `loop` runs, or None when that is decided while running."""
    known = _KNOWN_TRIPS.search(loop.attributes)
    if known:
        return int(known[1])
    computations = scope.module.computations
    condition, body = (
        computations.get(loop.attribute("condition") or ""),
        computations.get(loop.attribute("body") or ""),
    )
    if condition is None or body is None:
        return None
    inside = Scope(scope.module, condition, parent=scope, caller=loop, kind="condition")
    where, compare = _trace(inside, condition.root.name)
    if compare.opcode != "compare" or len(compare.operands) != 2:
        return None
    left, right = (_trace(where, operand) for operand in compare.operands)
    direction = compare.attribute("direction") or ""
    if _carried(right, loop) is not None:
        left, right = right, left
        direction = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE"}.get(direction, direction)
    index = _carried(left, loop)
    if index is None:
        return None
    bound = _value(*right)
    first = _element_value(scope, loop.operands[0], index)
    step = _step(Scope(scope.module, body, parent=scope, caller=loop, kind="body"), loop, index)
    if bound is None or first is None or not step:
        return None
    return _count(first, bound, step, direction)


def _count(first: int, bound: int, step: int, direction: str) -> int | None:
    distance = bound - first
    if direction in ("LE", "GE"):
        distance += 1 if step > 0 else -1
    if direction in (("LT", "LE") if step > 0 else ("GT", "GE")):
        return max(0, -(-distance // step))
    if direction == "NE" and distance % step == 0 and distance // step >= 0:
        return distance // step
    return None


def _trace(scope: Scope, name: str) -> tuple[Scope, Instruction]:
    """Follows a value through copies, tuples, fusions and unchanged loop variables to where it is made."""
    while True:
        instruction = scope.computation.by_name[name]
        if instruction.opcode in _SAME_VALUE and instruction.operands:
            name = instruction.operands[0]
        elif instruction.opcode == "parameter" and scope.kind in ("fusion", "call") and scope.caller and scope.parent:
            name, scope = scope.caller.operands[instruction.index], scope.parent
        elif instruction.opcode == "fusion" and instruction.called:
            fused = scope.module.computations[instruction.called[0]]
            scope = Scope(scope.module, fused, parent=scope, caller=instruction, kind="fusion")
            name = fused.root.name
        elif instruction.opcode == "get-tuple-element":
            found = _element(scope, instruction.operands[0], instruction.index)
            if found is None:
                return scope, instruction
            scope, name = found
        else:
            return scope, instruction


def _element(scope: Scope, name: str, index: int) -> tuple[Scope, str] | None:
    """Where element `index` of a tuple is made, when that can be followed."""
    where, made = _trace(scope, name)
    if made.opcode == "tuple":
        return where, made.operands[index]
    if made.opcode == "parameter" and where.kind in ("body", "condition") and where.caller and where.parent:
        if _unchanged(where.module, where.caller, index):
            return _element(where.parent, where.caller.operands[0], index)
    elif made.opcode == "while" and _unchanged(where.module, made, index):
        return _element(where, made.operands[0], index)
    return None


def _unchanged(module: Module, loop: Instruction, index: int) -> bool:
    """Whether a loop hands element `index` of its tuple on as it was."""
    body = module.computations[loop.attribute("body") or ""]
    if body.root.opcode != "tuple":
        return False
    made = body.by_name[body.root.operands[index]]
    while made.opcode in _SAME_VALUE:
        made = body.by_name[made.operands[0]]
    if made.opcode != "get-tuple-element" or made.index != index:
        return False
    return body.by_name[made.operands[0]].opcode == "parameter"


def _carried(made: tuple[Scope, Instruction], loop: Instruction) -> int | None:
    """Index of the loop variable that a traced value is, or None."""
    scope, instruction = made
    if instruction.opcode != "get-tuple-element" or scope.caller is not loop:
        return None
    source = scope.computation.by_name[instruction.operands[0]]
    return instruction.index if source.opcode == "parameter" else None


def _value(scope: Scope, instruction: Instruction) -> int | None:
    """A whole number, when it does not depend on data."""
    if instruction.opcode == "constant":
        return int(instruction.literal) if re.fullmatch(r"-?\d+", instruction.literal) else None
    if instruction.opcode in ("add", "subtract", "multiply"):
        left, right = (_value(*_trace(scope, operand)) for operand in instruction.operands)
        if left is None or right is None:
            return None
        return {"add": left + right, "subtract": left - right, "multiply": left * right}[instruction.opcode]
    return None


def _element_value(scope: Scope, name: str, index: int) -> int | None:
    found = _element(scope, name, index)
    return _value(*_trace(*found)) if found else None


def _step(body: Scope, loop: Instruction, index: int) -> int | None:
    """What one run of the body adds to loop variable `index`."""
    root = body.computation.root
    if root.opcode != "tuple":
        return None
    scope, made = _trace(body, root.operands[index])
    if made.opcode not in ("add", "subtract"):
        return None
    left, right = (_trace(scope, operand) for operand in made.operands)
    if made.opcode == "add" and _carried(right, loop) == index:
        left, right = right, left
    if _carried(left, loop) != index:
        return None
    step = _value(*right)
    return None if step is None else step if made.opcode == "add" else -step
