"""Reads the text of a compiled XLA program: computations, instructions, shapes and where they came from.

The text is what `jax.stages.Compiled.as_text()` returns, on CPU, GPU and TPU. Format: openxla.org/xla, "HLO text", and
the printer in openxla/xla, xla/hlo/ir/hlo_instruction.cc.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

_BITS = {"pred": 8, "token": 0, "opaque": 0, "c64": 64, "c128": 128}
_HEADER = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(")
_INSTRUCTION = re.compile(r"^ +(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = ")
_OPCODE = re.compile(r" ?(?P<opcode>[a-z][\w\-]*)\(")
_NAME = re.compile(r"%([\w.\-]+)")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](\{[^{}]*\})?")
_SPACE = re.compile(r"S\((\d+)\)")
_FRAME_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
HOST_SPACE = 5
"""Memory space number of pinned host memory in layouts (`S(5)`); 0 is device memory."""


@dataclass(frozen=True)
class Array:
    """One array of a shape: its element type, dims and memory space (0 device memory, 1 on-chip, 5 pinned host)."""

    dtype: str
    dims: tuple[int, ...]
    space: int = 0

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Bytes without padding."""
        return -(-self.elements * element_bits(self.dtype) // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


Shape = Array | tuple["Shape", ...]


def element_bits(dtype: str) -> int:
    """Bits of one element of an HLO type: 32 for f32 and s32, 8 for f8e4m3fn, 4 for s4."""
    if dtype in _BITS:
        return _BITS[dtype]
    digits = re.match(r"[a-z]+(\d+)", dtype)
    return int(digits[1]) if digits else 0


@lru_cache(maxsize=65536)
def parse_shape(text: str) -> Shape:
    """Reads `bf16[8,128]{1,0:T(8,128)S(1)}` or a nested tuple `(f32[], (s32[2]{0}))`."""
    text = text.strip()
    if not text.startswith("("):
        match = _ARRAY.match(text)
        if not match:
            return Array(text, ())
        dims = tuple(int(dim.lstrip("<=")) for dim in match[2].split(",") if dim)
        space = _SPACE.search(match[3] or "")
        return Array(match[1], dims, int(space[1]) if space else 0)
    return tuple(parse_shape(part) for part in split_top(text[1 : text.rindex(")")]) if part.strip())


def split_top(text: str) -> list[str]:
    """Splits at commas that stand outside every bracket; comments `/*index=5*/` are dropped."""
    parts, depth, start = [], 0, 0
    text = re.sub(r"/\*.*?\*/", "", text)
    for index, char in enumerate(text):
        if char in "({[":
            depth += 1
        elif char in ")}]":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start:index])
            start = index + 1
    return [*parts, text[start:]]


def leaves(shape: Shape) -> Iterator[Array]:
    """The arrays of a shape, in order."""
    if isinstance(shape, Array):
        yield shape
    else:
        for part in shape:
            yield from leaves(part)


def shape_bytes(shape: Shape) -> int:
    """Bytes of all arrays of a shape, without padding."""
    return sum(leaf.bytes for leaf in leaves(shape))


@dataclass(frozen=True)
class Instruction:
    """One line of a computation: `%name = shape opcode(operands), attributes`."""

    name: str
    opcode: str
    shape_text: str
    operands: tuple[str, ...]
    literal: str
    """Text between the parentheses (value of a constant, number of a parameter)."""
    attributes: str
    root: bool

    @property
    def shape(self) -> Shape:
        return parse_shape(self.shape_text)

    def attribute(self, key: str) -> str | None:
        """Value of a simple attribute: a name, a number, or what stands between quotes."""
        match = re.search(rf'(?:^|[ ,{{]){key}=(?:%?([\w.\-]+)|"([^"]*)")', self.attributes)
        return (match[1] if match[1] is not None else match[2]) if match else None

    @property
    def index(self) -> int:
        """Which element a get-tuple-element takes, or which argument a parameter is."""
        if self.opcode == "parameter":
            return int(self.literal)
        return int(self.attribute("index") or 0)

    @property
    def op_name(self) -> str:
        """jax's name stack for this operation, or ""."""
        match = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return match[1] if match else ""

    @property
    def called(self) -> tuple[str, ...]:
        """Computations named by any attribute: fusion, call, while, conditional, async wrapper, reducer."""
        found = []
        keys = (
            "calls|to_apply|body|condition|branch_computations|called_computations|true_computation|false_computation"
        )
        for match in re.finditer(rf"\b(?:{keys})=(\{{[^}}]*\}}|%?[\w.\-]+)", self.attributes):
            found += _NAME.findall(match[1]) or [match[1].strip("{} ")]
        return tuple(name for name in found if name)


@dataclass(frozen=True)
class Computation:
    """A list of instructions; in a scheduled module, in the order in which they run."""

    name: str
    instructions: tuple[Instruction, ...]
    by_name: dict[str, Instruction] = field(repr=False, compare=False)

    @property
    def root(self) -> Instruction:
        return next((i for i in reversed(self.instructions) if i.root), self.instructions[-1])

    def shape_of(self, operand: str) -> Shape:
        """Shape of an operand by its name."""
        return self.by_name[operand].shape


@dataclass(frozen=True)
class Module:
    """A whole program."""

    name: str
    computations: dict[str, Computation] = field(repr=False)
    entry: Computation
    partitions: int
    scheduled: bool
    frames: dict[int, str] = field(repr=False)
    """stack_frame_id -> "file:line"."""

    def source(self, instruction: Instruction) -> str:
        """ "file:line" of the innermost Python frame, or ""."""
        match = re.search(r"stack_frame_id=(\d+)", instruction.attributes)
        if match:
            return self.frames.get(int(match[1]), "")
        file = re.search(r'source_file="([^"]*)"', instruction.attributes)
        line = re.search(r"source_line=(\d+)", instruction.attributes)
        return f"{file[1]}:{line[1] if line else 0}" if file else ""


def parse(text: str) -> Module:
    """Reads the text of one module.

    Raises:
        ValueError: no ENTRY computation, so this is not HLO text.
    """
    lines = text.splitlines()
    computations: dict[str, Computation] = {}
    entry = current = None
    body: list[Instruction] = []
    for line in lines:
        if current is None:
            header = _HEADER.match(line)
            if header and line.rstrip().endswith("{"):
                current, is_entry, body = header["name"], header["entry"], []
                entry = current if is_entry else entry
        elif line.startswith("}"):
            computations[current] = Computation(current, tuple(body), {i.name: i for i in body})
            current = None
        else:
            instruction = _parse_instruction(line)
            if instruction:
                body.append(instruction)
    if entry is None or entry not in computations:
        raise ValueError("not the text of an HLO module: it has no ENTRY computation")
    head = next((line for line in lines if line.startswith("HloModule")), "HloModule unknown")
    partitions = re.search(r"num_partitions=(\d+)", head)
    return Module(
        name=head.split()[1].rstrip(","),
        computations=computations,
        entry=computations[entry],
        partitions=int(partitions[1]) if partitions else 1,
        scheduled="is_scheduled=true" in head,
        frames=_parse_frames(lines),
    )


def _parse_instruction(line: str) -> Instruction | None:
    match = _INSTRUCTION.match(line)
    if not match:
        return None
    rest = line[match.end() :]
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.find(" ")
    opcode = _OPCODE.match(rest, end)
    if not opcode:
        return None
    close = _closing(rest, opcode.end() - 1)
    inner = rest[opcode.end() : close]
    return Instruction(
        name=match["name"],
        opcode=opcode["opcode"],
        shape_text=rest[:end],
        operands=() if opcode["opcode"] in ("constant", "parameter", "iota") else _operands(inner),
        literal=inner if len(inner) < 64 else inner[:64],
        attributes=rest[close + 1 :].lstrip(", "),
        root=match["root"] is not None,
    )


def _operands(inner: str) -> tuple[str, ...]:
    """Operand names; printers differ in whether they put a % and the shape before each."""
    if "%" in inner:
        return tuple(_NAME.findall(inner))
    return tuple(part.split()[-1] for part in split_top(inner) if part.strip())


def _closing(text: str, start: int) -> int:
    """Index of the parenthesis that closes the one at `start`, skipping quoted strings."""
    depth, quoted = 0, False
    for match in re.finditer(r'\\.|["()]', text[start:]):
        char = match[0]
        if char == '"':
            quoted = not quoted
        elif quoted or char[0] == "\\":
            continue
        else:
            depth += 1 if char == "(" else -1
            if depth == 0:
                return start + match.start()
    return len(text)


def _parse_frames(lines: list[str]) -> dict[int, str]:
    """The tables after the module line: file names, functions, locations, frames."""
    tables: dict[str, dict[int, str]] = {name: {} for name in _FRAME_TABLES}
    current = None
    for line in lines:
        if line in tables:
            current = tables[line]
        elif line.startswith(("%", "ENTRY")):
            break
        elif current is not None and (row := re.match(r"^(\d+) (.+)$", line)):
            current[int(row[1])] = row[2]
    frames = {}
    for number, row in tables["StackFrames"].items():
        location = tables["FileLocations"].get(_number(row, "file_location_id"), "")
        file = tables["FileNames"].get(_number(location, "file_name_id"), "").strip('"')
        if file:
            frames[number] = f"{file}:{_number(location, 'line')}"
    return frames


def _number(row: str, key: str) -> int:
    match = re.search(rf"\b{key}=(\d+)", row)
    return int(match[1]) if match else 0
