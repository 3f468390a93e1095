"""Who talks to whom in a collective: replica groups in every notation of XLA, as axes of the mesh.

Numbers in the groups are positions in the flattened mesh (row-major, outermost axis first), because jax hands the
mesh's devices to the compiler in that order. Notations (openxla/xla, xla/hlo/ir/replica_group.cc and mesh_and_axis.cc):

- lists        `{{0,1},{2,3}}`; `{}` is one group of all
- iota         `[4,2]<=[2,4]T(1,0)`: numbers 0..7 shaped (2,4), transposed, cut into 4 groups of 2
- mesh axes    `mesh['a'=2,'b'=4] {'b'}`, also `@mesh<a=2,b=4> {b}`; `'a':(2)4` is the sub-axis of size 4 of `a` that
  has 2 blocks outside it; `device_ids=([4,2]T(1,0))` or `device_ids=(3,1,0,2)` says which numbers the mesh holds
- pairs        `source_target_pairs={{0,1},{1,0}}` of a permute
"""

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

_INTS = r"[\d,]+"
_DEVICE_IDS = rf"device_ids=\((?:\[{_INTS}\](?:T\({_INTS}\))?|{_INTS})\)"
_GROUPS = re.compile(
    rf"replica_groups=(\{{\}}|\{{\{{.*?\}}\}}|\[{_INTS}\]<=\[{_INTS}\](?:T\({_INTS}\))?"
    rf"|@?mesh[\[<][^\]>]*[\]>](?:, {_DEVICE_IDS})? ?\{{[^}}]*\}})"
)
_PAIRS = re.compile(r"source_target_pairs=(\{\{.*?\}\}|\{\})")
_SUB_AXIS = re.compile(r"^'?(?P<name>[^':]+)'?(?::\((?P<before>\d+)\)(?P<size>\d+))?$")

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Span:
    """The mesh axes that a collective runs over."""

    axes: tuple[str, ...]
    """In mesh order; empty: no communication, or groups that no set of axes describes (see note)."""
    size: int
    """Devices in one group; for a permute, positions along the axes."""
    note: str = ""
    """Empty when the groups are exactly the axes; else what differs."""
    shift: int | None = None
    """A permute that moves every block the same way along one axis: by how many places (-1: towards index 0)."""


def group_text(attributes: str) -> tuple[str, bool] | None:
    """The notation found in an instruction's attributes, and whether it is source-target pairs."""
    match = _GROUPS.search(attributes)
    if match:
        return match[1], False
    match = _PAIRS.search(attributes)
    return (match[1], True) if match else None


@lru_cache(maxsize=4096)
def parse_groups(text: str, devices: int) -> Groups:
    """Reads one notation into groups of device numbers; `devices` is what `{}` stands for.

    Raises:
        ValueError: the notation is not known.
    """
    if re.fullmatch(r"\{(\{\})?\}", text):
        return (tuple(range(devices)),)
    if text.startswith("{"):
        return tuple(_ints(part) for part in re.findall(r"\{([\d,]*)\}", text))
    if text.startswith("["):
        shape, _, source = text.partition("<=")
        numbers = _iota(source)
        groups, size = _ints(shape)
        return _rows(numbers.reshape(groups, size))
    if "mesh" in text[:5]:
        return _mesh_groups(text)
    raise ValueError(f"replica groups in a notation that is not known: {text[:120]}")


def span_of_groups(groups: Groups, mesh_shape: Mapping[str, int]) -> Span:
    """Names the axes of `mesh_shape` (outermost first) along which the members of each group differ."""
    names, sizes = tuple(mesh_shape), tuple(mesh_shape.values())
    size = max((len(group) for group in groups), default=1)
    if max((max(group, default=0) for group in groups), default=0) >= math.prod(sizes):
        return Span((), size, f"groups name devices beyond the mesh of {math.prod(sizes)}")
    varying = set()
    for group in groups:
        coordinates = np.unravel_index(np.array(group, dtype=int), sizes)
        varying |= {axis for axis, along in enumerate(coordinates) if len(set(along.tolist())) > 1}
    axes = tuple(names[axis] for axis in sorted(varying))
    whole = math.prod(sizes[axis] for axis in varying)
    if all(len(group) == whole for group in groups):
        return Span(axes, whole)
    lengths = sorted({len(group) for group in groups})
    if len(lengths) == 1 and len(axes) == 1:
        return Span(axes, size, f"parts of {axes[0]}: {size} of its {whole}")
    return Span(axes, size, f"groups of {' and '.join(map(str, lengths))} within {' x '.join(axes)} = {whole}")


def span_of_pairs(pairs: Groups, mesh_shape: Mapping[str, int]) -> Span:
    """Names the axes along which any source differs from its target."""
    names, sizes = tuple(mesh_shape), tuple(mesh_shape.values())
    moving = [pair for pair in pairs if len(pair) == 2 and pair[0] != pair[1]]
    if not moving:
        return Span((), 1)
    numbers = np.array(moving, dtype=int)
    if numbers.max() >= math.prod(sizes):
        return Span((), len(pairs), f"pairs name devices beyond the mesh of {math.prod(sizes)}")
    coordinates = np.unravel_index(numbers, sizes)
    varying = [axis for axis, along in enumerate(coordinates) if (along[:, 0] != along[:, 1]).any()]
    axes, size, shift = tuple(names[axis] for axis in varying), math.prod(sizes[axis] for axis in varying), None
    if len(varying) == 1:
        along = coordinates[varying[0]]
        moves = set(((along[:, 1] - along[:, 0]) % size).tolist())
        if len(moves) == 1:
            move = moves.pop()
            shift = move if 2 * move <= size else move - size
    return Span(axes, size, shift=shift)


def span(attributes: str, mesh_shape: Mapping[str, int]) -> Span:
    """The axes of a collective from its attributes; without groups it runs over all devices."""
    return _span(group_text(attributes), tuple(mesh_shape.items()))


@lru_cache(maxsize=4096)
def _span(found: tuple[str, bool] | None, mesh_items: tuple[tuple[str, int], ...]) -> Span:
    mesh_shape = dict(mesh_items)
    text, pairs = found or ("{}", False)
    groups = parse_groups(text, math.prod(mesh_shape.values()))
    return span_of_pairs(groups, mesh_shape) if pairs else span_of_groups(groups, mesh_shape)


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text))


def _rows(numbers: np.ndarray) -> Groups:
    return tuple(tuple(row) for row in numbers.tolist())


def _iota(text: str) -> np.ndarray:
    """`[2,4]T(1,0)`: 0..7 in shape (2, 4), transposed."""
    shape, _, order = text.partition("T")
    numbers = np.arange(math.prod(_ints(shape))).reshape(_ints(shape))
    return numbers.transpose(_ints(order)) if order else numbers


def _mesh_groups(text: str) -> Groups:
    """`mesh['a'=2,'b'=4], device_ids=(...) {'b':(2)2}`."""
    head, _, axes_text = text.rpartition("{")
    mesh_text = re.search(r"[\[<](.*?)[\]>]", head)
    assert mesh_text, text
    sizes = {}
    for part in mesh_text[1].split(","):
        name, _, size = part.partition("=")
        sizes[name.strip("' ")] = int(size)
    ids = re.search(r"device_ids=\((.*)\)", head)
    numbers = np.arange(math.prod(sizes.values()))
    if ids:
        numbers = _iota(ids[1]) if ids[1].startswith("[") else np.array(_ints(ids[1]))
    wanted = [_SUB_AXIS.match(part.strip()) for part in axes_text.rstrip("} ").split(",") if part.strip()]
    return _rows(_group_axes(numbers.reshape(-1), sizes, [match for match in wanted if match]))


def _group_axes(numbers: np.ndarray, sizes: dict[str, int], wanted: list[re.Match[str]]) -> np.ndarray:
    """Splits every axis at the borders of its sub-axes, then moves the wanted pieces last: [groups, size].

    Wanted pieces never overlap, so that each is one dim of the split grid.
    """
    shape: list[int] = []
    place: dict[tuple[str, int], int] = {}  # (axis, blocks outside the piece) -> dim
    for name, size in sizes.items():
        edges = {1, size}
        for match in wanted:
            if match["name"] == name and match["size"]:
                before = int(match["before"])
                edges |= {before, before * int(match["size"])}
        for low, high in itertools.pairwise(sorted(edges)):
            place[name, low] = len(shape)
            shape.append(high // low)
    last = [place[match["name"], int(match["before"] or 1)] for match in wanted if sizes[match["name"]] > 1]
    first = [dim for dim in range(len(shape)) if dim not in last]
    members = math.prod(shape[dim] for dim in last)
    return numbers.reshape(shape).transpose(first + last).reshape(-1, members)
