"""The largest temporaries of a compiled program, from the compiler's own buffer assignment.

XLA writes it when asked to dump (option xla_dump_to), on CPU, GPU and TPU, for absent devices too:
`*-buffer-assignment.txt` says where each value lies, and `*-live-range.txt` from when to when it lives.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jaxshard.xla.hlo import Instruction, Module, Shape, parse_shape

DUMP_OPTIONS = {"xla_dump_hlo_as_text": True}
"""Compiler options beside xla_dump_to that make it write both files."""

_ALLOCATION = re.compile(r"^allocation (?P<number>\d+): size (?P<size>\d+)(?P<rest>.*)$")
_VALUE = re.compile(
    r"^ value: <\d+ (?P<name>\S+?)(?P<index>\{[\d,]*\})? (?:\(phi\) )?@\d+> "
    r"\(size=(?P<size>\d+),offset=(?P<offset>\d+)\): (?P<shape>.*)$"
)
_LIFE = re.compile(r"^ +(?P<key>\S+?\{[\d,]*\}):(?P<first>\d+)-(?P<last>\d+)$")


@dataclass(frozen=True)
class Temporary:
    """One buffer of the temporary heap that is alive when the heap is fullest."""

    name: str
    """HLO value: an instruction, with {i} for a part of a tuple."""
    shape: str
    bytes: int
    """Bytes in device memory, with the padding of its layout."""
    op_name: str
    source: str


@dataclass(frozen=True)
class BufferReport:
    """What the dump of one compilation says about device memory."""

    device_bytes: int
    """Bytes of all allocations in device memory: arguments, outputs, constants and the temporary heap."""
    heap_bytes: int
    """Size of the temporary heap."""
    temporaries: tuple[Temporary, ...]
    """Largest first, those alive when the heap is fullest."""


@dataclass(frozen=True)
class _Value:
    key: str
    size: int
    offset: int
    shape: Shape


def read_dump(folder: Path, module: Module, count: int = 10) -> BufferReport | None:
    """Reads the dump of one compilation; None when the compiler wrote no buffer assignment.

    Args:
        folder: what xla_dump_to pointed to.
        module: the compiled program, for names and sources.
        count: how many temporaries to return.
    """
    found = sorted(folder.glob("*-buffer-assignment.txt"), key=lambda path: path.stat().st_size)
    if not found:
        return None
    stem = found[-1].name.removesuffix("-buffer-assignment.txt")
    values, heap, total = _read_assignment(found[-1].read_text())
    live = folder / f"{stem}-live-range.txt"
    if live.exists():
        values = _alive_at_peak(values, _lives(live.read_text()))
    return BufferReport(total, heap, tuple(_largest(values, module, count)))


def _read_assignment(text: str) -> tuple[list[_Value], int, int]:
    """Values in the device heap, its bytes, bytes of all device allocations."""
    values, heap, total, in_heap = [], 0, 0, False
    for line in text.splitlines():
        allocation = _ALLOCATION.match(line)
        if allocation:
            device = ", color" not in allocation["rest"]
            in_heap = device and "preallocated-temp" in allocation["rest"]
            # Values inside of fusions and of what the host computes are no buffers; the total of XLA's own
            # memory-usage-report.txt counts them.
            kept = device and "thread-local" not in allocation["rest"]
            heap += int(allocation["size"]) if in_heap else 0
            total += int(allocation["size"]) if kept else 0
            continue
        value = _VALUE.match(line) if in_heap else None
        if value and not value["shape"].startswith("("):  # tuples are tables of pointers
            key = value["name"] + (value["index"] or "{}")
            shape = parse_shape(value["shape"])
            values.append(_Value(key, int(value["size"]), int(value["offset"]), shape))
    return values, heap, total


def _lives(text: str) -> dict[str, tuple[int, int]]:
    """First and last position in the schedule of each value."""
    found = (_LIFE.match(line) for line in text.splitlines())
    return {match["key"]: (int(match["first"]), int(match["last"])) for match in found if match}


def _alive_at_peak(values: list[_Value], lives: dict[str, tuple[int, int]]) -> list[_Value]:
    """The heap values that live at the position where they hold the most bytes.

    Values of the same place and size that live at the same time are one buffer.
    """
    changes = []
    for value in values:
        if value.key in lives:
            first, last = lives[value.key]
            changes += [(first, 1, value), (last + 1, 0, value)]
    changes.sort(key=lambda change: change[:2])
    users: dict[tuple[int, int], int] = {}
    used, most, peak = 0, -1, 0
    for position, begins, value in changes:
        place = (value.offset, value.size)
        before = users.get(place, 0)
        users[place] = before + (1 if begins else -1)
        used += value.size * ((users[place] > 0) - (before > 0))
        if used > most:
            most, peak = used, position
    return [value for value in values if value.key in lives and lives[value.key][0] <= peak <= lives[value.key][1]]


def _largest(values: list[_Value], module: Module, count: int) -> Iterator[Temporary]:
    by_name = {i.name: i for computation in module.computations.values() for i in computation.instructions}
    home = {i.name: c.name for c in module.computations.values() for i in c.instructions}
    loops = {i.attribute("body"): i for i in by_name.values() if i.opcode == "while"}
    taken: set[tuple[int, int]] = set()
    for value in sorted(values, key=lambda value: -value.size):
        if (value.offset, value.size) in taken:
            continue  # the same buffer under another name: a loop variable and what it is made from
        taken.add((value.offset, value.size))
        name, _, index = value.key.partition("{")
        instruction = by_name.get(name)
        maker = _made_by(module, instruction, index.rstrip("}"), home, loops) if instruction else None
        yield Temporary(
            name=value.key.removesuffix("{}"),
            shape=str(value.shape),
            bytes=value.size,
            op_name=maker.op_name if maker else "",
            source=module.source(maker) if maker else "",
        )
        if len(taken) == count:
            return


def _made_by(
    module: Module, instruction: Instruction, index: str, home: dict[str, str], loops: dict[str | None, Instruction]
) -> Instruction:
    """For a loop variable, what the body puts into it; else the instruction itself."""
    loop = instruction if instruction.opcode == "while" else None
    if instruction.opcode == "parameter":
        loop = loops.get(home[instruction.name])
    if loop is None or not index.isdigit():
        return instruction
    body = module.computations[loop.attribute("body") or ""]
    if body.root.opcode != "tuple":
        return loop
    made = body.by_name[body.root.operands[int(index)]]
    return made if made.op_name and made.opcode != "get-tuple-element" else loop
