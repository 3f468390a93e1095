"""What each array of a collective travels for, read from the names that the program gives its parts (`jaxshard.names`).

A name stack such as `jit(train_step)/transpose(jvp())/while/body/.../mlp/blocks.mlp.up/weight_grad/.../dot_general`
says: the backward pass, within a loop, the gradient of blocks.mlp.up. Nothing is guessed from shapes.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from jaxshard import names
from jaxshard.analysis.facts import WeightFact
from jaxshard.analysis.reasons import SCOPES, Phase, phase_of
from jaxshard.parallel.axes import BATCH_AXES
from jaxshard.xla.collectives import KINDS, Collective, Part
from jaxshard.xla.hlo import Computation, Instruction, Module, leaves, parse_shape, shape_bytes

_MARKS = {value for key, value in vars(names).items() if key.isupper()}
_PASSES = ("bitcast", "copy", "reshape", "transpose", "convert", "copy-done", "copy-start")
_LOOPS = ("while", "cond")
_REACH = 200
"""Instructions looked at, before an array's own name is given up for what it is made from."""


@dataclass(frozen=True)
class Name:
    """What a name stack says."""

    phase: Phase
    """outside: in neither of the passes."""
    marks: tuple[str, ...]
    """Purposes of `jaxshard.names`, outermost first."""
    path: str
    """The weight, or ""."""
    scope: str
    """One of SCOPES, or ""."""
    dims: str
    """Behind a layout mark, the names of the dims."""
    operation: str
    """Last part: the primitive."""

    @property
    def speaks(self) -> bool:
        """Whether it says what something is for; attention and MLP alone, or the name of a loop, say only where."""
        said = self.marks or self.path or self.scope in ("embedding", "loss")
        return bool(said) and self.operation not in _LOOPS


@lru_cache(maxsize=65536)
def read(op_name: str, paths: frozenset[str]) -> Name:
    """Reads a name stack; `paths` are those of the model's weights."""
    phase = phase_of(op_name)
    argument = re.match(r"state\.\w+((?:\[\\?'\w+\\?'\])+)$", op_name)
    parts = [".".join(re.findall(r"\w+", argument[1]))] if argument else [p for p in re.split(r"[/():]", op_name) if p]
    last = lambda known: next((part for part in reversed(parts) if part in known), "")
    marks = tuple(part for part in parts if part in _MARKS)
    dims = parts[parts.index(names.LAYOUT) + 1] if names.LAYOUT in parts[:-1] else ""
    return Name(phase, marks, last(paths), last(SCOPES), dims, parts[-1] if parts else "")


def family(name: Name, kind: str, axes: Sequence[str], weights: Mapping[str, WeightFact]) -> str:
    """The purpose, as a key of `FAMILIES`; "" where the names give none.

    Args:
        name: as read.
        kind, axes: of the collective. A sum of products is over the axes that the products are split over; a weight
            that a sum makes known, as TPUs do with short ones, is over those that it is stored on.
        weights: by path.
    """
    mark, of_batch, weight = set(name.marks), set(axes) <= set(BATCH_AXES), weights.get(name.path)
    gradient = "vector" if weight and weight.bounded else "gradient"
    if mark & {names.GRAD_NORM, names.METRICS}:
        return "bookkeeping"
    for one, found in _PLAIN.items():
        if one in mark:
            return found
    in_step = kind == "collective-permute" and name.operation == "dot_general" and names.REDUCE not in mark
    if in_step and weight and name.scope != "loss":
        return _of_step(name, of_batch, weight)
    if mark & {names.WEIGHT_GRAD, names.REDUCE} or (weight and weight.vector and name.phase == "backward"):
        return gradient
    if name.scope == "loss":
        return "loss-input" if names.INPUT_GRAD in mark else "loss"
    if "kv_heads" in name.dims:
        return "kv"
    if names.LAYOUT in mark and kind == "all-gather":
        return "sequence"
    if names.OPTIMIZER in mark:
        return "update" if name.path else "optimizer"  # a new parameter, or what makes its direction
    if name.path and name.operation == name.path:
        return "gather"  # an argument of the program, gathered without a word
    if weight and weight.bounded and of_batch and kind == "all-reduce" and name.phase != "backward":
        return "gather"  # TPUs make a short vector known by a sum of parts among zeros, where it is used
    if name.path.startswith("embedding.") or name.scope == "embedding":
        return "sequence" if name.phase == "backward" else "embedding"
    if kind == "all-gather" and name.scope:
        return "sequence"
    if name.path or name.scope in ("attention", "mlp", "final_norm"):
        return "column" if name.phase == "backward" else "row"
    return ""


def _of_step(name: Name, of_batch: bool, weight: WeightFact) -> str:
    """A collective matmul, in permutes beside the product: of parts of what it reads, or of what it makes."""
    if weight.bounded and names.WEIGHT_GRAD in name.marks:
        return "vector"
    if of_batch:
        return "gradient" if names.WEIGHT_GRAD in name.marks else "gather"
    if names.WEIGHT_GRAD in name.marks:
        return "sequence"
    backward = names.INPUT_GRAD in name.marks
    return ("column" if backward else "row") if backward is not weight.ends_stream else "sequence"


_PLAIN = {
    names.SEND: "send",
    names.STAGE_VALUE: "stage",
    names.KV_HEADS: "kv",
    names.GATHER: "gather",
    names.UPDATE: "update",
}


@dataclass(frozen=True)
class Piece:
    """One array of a collective, or one of several that were put end to end into it."""

    name: Name
    kind: str
    """all-gather of a sum in which every device adds its own part among zeros; else that of the collective."""
    dtype: str
    elements: int
    bytes: int
    padding: int = 0
    """Bytes of it that stand for nothing: added so that it divides."""

    def share(self, name: Name, size: int, of: int) -> "Piece":
        """The piece of this name that `size` of `of` elements are."""
        elements, bytes, padding = (n * size // of for n in (self.elements, self.bytes, self.padding))
        return replace(self, name=name, elements=elements, bytes=bytes, padding=padding)


class _Node(NamedTuple):
    """An array within a computation; of a fused one, with the fusion that it is part of."""

    computation: Computation
    name: str
    outer: "_Node | None" = None

    @property
    def made(self) -> Instruction:
        return self.computation.by_name[self.name]


@dataclass(frozen=True)
class Reader:
    """Reads the collectives of one compiled program; `paths` are those of the model's weights."""

    module: Module
    paths: frozenset[str]

    def pieces(self, found: Collective) -> list[Piece]:
        """The arrays of a collective, each with the name that says most: its own, or that of what it is made from."""
        computation = self.module.computations[found.computation]
        operands = computation.by_name[found.name].operands
        options = merged(found.op_name, len(found.parts))
        result = []
        for index, part in enumerate(found.parts):
            own = read(options[index] if options else found.op_name, self.paths)
            whole = Piece(own, found.kind, part.dtype, part.elements, part.bytes, _padding(part))
            if len(operands) != len(found.parts):
                result.append(whole)
                continue
            node = _Node(computation, operands[index])
            mine = self._among_zeros(node) if found.kind == "all-reduce" else None
            if mine:
                result.append(replace(whole, name=self._trace(mine) or own, kind="all-gather"))
                continue
            joined = self._joined(node)
            sizes = [sum(leaf.elements for leaf in leaves(each.made.shape)) for each in joined]
            alone = len(joined) == 1 and (bool(options) or len(found.parts) == 1)
            for each, size in zip(joined, sizes, strict=True):
                name = own if alone and own.speaks else _better(own, self._trace(each))
                result.append(whole.share(name, size, max(1, sum(sizes))))
        return result

    def of_value(self, value: str) -> Name | None:
        """The name that says most of a value: an instruction, or with {i} a part of the tuple that it makes.

        Of what a loop carries along it is the name of what the loop's body puts there; so it is of zeros that a loop
        starts with.
        """
        name, _, index = value.rstrip("}").partition("{")
        home = self._homes.get(name)
        if home is None or not (index.isdigit() or not index):
            return None
        at = _Node(home, name)
        if not index:
            within: Iterable[_Node] = [at]
        elif at.made.opcode == "parameter" and home.name in self._loops:
            where, loop = self._loops[home.name]
            within = self._element(_Node(where, loop.name), int(index))
        else:
            within = self._element(at, int(index))
        reads = (each for each in home.instructions if each.opcode == "get-tuple-element" and each.operands == (name,))
        parts = {each.name for each in reads if str(each.index) == index}
        traced = map(self._trace, (*within, *self._started_with(home, parts or {name})))
        return next((found for found in traced if found), None)

    def _started_with(self, home: Computation, names: set[str]) -> Iterator[_Node]:
        """What loops put in the place of values that they start with."""
        for start in home.instructions:
            for index, operand in enumerate(start.operands if start.opcode == "tuple" else ()):
                for loop in home.instructions if operand in names else ():
                    if loop.opcode == "while" and loop.operands == (start.name,):
                        yield from self._element(_Node(home, loop.name), index)

    def _maker(self, at: _Node) -> _Node:
        """What makes an array, behind copies and the like and within fusions."""
        while True:
            if at.made.opcode in _PASSES and at.made.operands:
                at = at._replace(name=at.made.operands[0])
            elif at.made.opcode == "fusion" and at.made.called:
                fused = self.module.computations[at.made.called[0]]
                at = _Node(fused, fused.root.name, at)
            elif at.made.opcode == "parameter" and at.outer:
                at = at.outer._replace(name=at.outer.made.operands[at.made.index])
            else:
                return at

    def _among_zeros(self, node: _Node) -> _Node | None:
        """The part that a device writes into zeros, where an array is made so."""
        at = self._maker(node)
        if at.made.opcode != "dynamic-update-slice":
            return None
        below = self._maker(at._replace(name=at.made.operands[0]))
        if below.made.opcode == "broadcast":
            below = self._maker(below._replace(name=below.made.operands[0]))
        is_zero = below.made.opcode == "constant" and re.fullmatch(r"-?0(\.0*)?", below.made.literal)
        return at._replace(name=at.made.operands[1]) if is_zero else None

    def _joined(self, node: _Node) -> list[_Node]:
        """The arrays that a concatenation, alone or in a fusion, puts together into this one; else itself."""
        at = self._maker(node)
        if at.made.opcode != "concatenate":
            return [node]
        return [at._replace(name=operand) for operand in at.made.operands]

    def _trace(self, node: _Node) -> Name | None:
        """The first name that speaks of what an array is made from, nearest first; through loops and fusions.

        A name with a scope ends the search.
        """
        waiting, seen = [node], set()
        while waiting and len(seen) < _REACH:
            at = waiting.pop(0)
            if (at.computation.name, at.name) in seen:
                continue
            seen.add((at.computation.name, at.name))
            said = read(at.made.op_name, self.paths)
            if not _is_several(at):
                if said.speaks:
                    return said
                if said.scope and said.operation not in _LOOPS:  # a product of activations: what it reads says nothing
                    return said
            waiting += self._sources(at)
        return None

    def _sources(self, at: _Node) -> Iterator[_Node]:
        """What an array is made from."""
        made = at.made
        if made.opcode == "parameter" and at.outer:
            yield at.outer._replace(name=at.outer.made.operands[made.index])
        elif made.opcode == "fusion" and made.called:
            fused = self.module.computations[made.called[0]]
            yield _Node(fused, fused.root.name, at)
        elif made.opcode == "get-tuple-element":
            yield from self._element(at._replace(name=made.operands[0]), made.index)
        else:
            yield from (at._replace(name=operand) for operand in made.operands)

    def _element(self, source: _Node, index: int) -> Iterator[_Node]:
        """What one element of a tuple is made from: in a loop's body, by its last run; into it, before the first."""
        made = source.made
        inside = self.module.computations.get(made.attribute("body") or (made.called or ("",))[0])
        if made.opcode == "tuple":
            yield source._replace(name=made.operands[index])
        elif made.opcode.endswith("-done"):
            yield from self._element(source._replace(name=made.operands[0]), index)
        elif made.opcode.removesuffix("-start") in KINDS and index < len(made.operands):
            yield source._replace(name=made.operands[index])
        elif made.opcode == "conditional":
            branches = (self.module.computations[name] for name in made.called)
            yield from (_Node(each, each.root.operands[index]) for each in branches if each.root.opcode == "tuple")
        elif made.opcode in ("while", "fusion") and inside and inside.root.opcode == "tuple":
            yield _Node(inside, inside.root.operands[index], source if made.opcode == "fusion" else None)
        elif made.opcode == "parameter" and source.computation.name in self._loops:
            where, loop = self._loops[source.computation.name]
            start = where.by_name[loop.operands[0]]
            if start.opcode == "tuple":
                yield _Node(where, start.operands[index])
        else:
            yield source

    @cached_property
    def _homes(self) -> dict[str, Computation]:
        """The computation that an instruction stands in, by its name."""
        return {each.name: home for home in self.module.computations.values() for each in home.instructions}

    @cached_property
    def _loops(self) -> dict[str, tuple[Computation, Instruction]]:
        """The loop that runs a body, and where it stands, by the body's name."""
        return {
            instruction.attribute("body") or "": (computation, instruction)
            for computation in self.module.computations.values()
            for instruction in computation.instructions
            if instruction.opcode == "while"
        }


def _padding(part: Part) -> int:
    """Bytes of an array that it was padded with for the collective."""
    return part.bytes - shape_bytes(parse_shape(part.unpadded)) if part.unpadded else 0


def _is_several(at: _Node) -> bool:
    """Whether it bears one name for all that something makes; what is within says more."""
    element = at.made.opcode == "get-tuple-element" and at._replace(name=at.made.operands[0]).made.opcode != "parameter"
    return element or at.made.opcode in ("fusion", "while")


def _better(own: Name, made: Name | None) -> Name:
    """Of a combined call, which bears the name of one of its arrays, the name of the array at hand.

    What is gathered for use or after an update is made by the optimizer, or read: only the path is its own.
    """
    if made is None or (own.speaks and not made.speaks):
        return own
    keeps = {names.GATHER, names.UPDATE}.intersection(own.marks)
    return replace(own, path=made.path or own.path) if keeps else made


def merged(op_name: str, count: int) -> list[str]:
    """The names that a compiler merges where it combines calls: "prefix/(first:second)"."""
    found = re.search(r"^((?:.*?/)?)\(((?:[^:]*:)+[^:]*)\)$", op_name)
    options = found[2].split(":") if found else []
    return [found[1] + option for option in options] if found and len(options) == count else []
