"""Drawings of a layout as inline SVG: the mesh, the slices of a weight, the pipeline, bars of bytes. Free of jax.

They hold rectangles and texts only, which `write_png` can read back.
"""

import html
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

import numpy as np

from jaxshard.parallel.schedule import Schedule
from jaxshard.views.schedule_draw import shade

COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#b07aa1", "#edc948", "#9c755f")
MOST = 16
"""Boxes drawn along one direction; what is more is written as a number."""
MOST_HALVES = 160
"""Halves of ticks drawn of a pipeline."""
_BYTES = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
IDLE = "#88888844"
"""Bubbles: seen on white and on black."""


def _text(x: float, y: float, words: str, size: int = 12, anchor: str = "middle", colour: str = "currentColor") -> str:
    style = f'font-size="{size}" text-anchor="{anchor}" fill="{colour}"'
    return f'<text x="{x:g}" y="{y:g}" {style}>{html.escape(words)}</text>'


def _svg(width: float, height: float, parts: Sequence[str], label: str) -> str:
    least = width if width > 400 else 0.85 * width  # where it may scroll, texts stay large enough
    style = f"max-width:{width:g}px;--least:{least:.0f}px"
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" style="{style}" role="img" '
        f'aria-label="{html.escape(label)}">{"".join(parts)}</svg>'
    )


def _ink(fill: str) -> str:
    """Black or white, whichever is read better on a colour such as "#4e79a7" (luminance as WCAG 2 defines it)."""
    linear = [((int(fill[i : i + 2], 16) / 255 + 0.055) / 1.055) ** 2.4 for i in (1, 3, 5)]
    return "#000000" if np.dot(linear, (0.2126, 0.7152, 0.0722)) > 0.179 else "#ffffff"


def _box(x: float, y: float, width: float, height: float, fill: str, title: str = "") -> str:
    inner = f"><title>{html.escape(title)}</title></rect>" if title else "/>"
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}"{inner}'


def _label(x: float, y: float, width: float, choices: Sequence[str], fill: str) -> str:
    """The first of the texts that fits into a box of this colour and width, centred; nothing where none does."""
    words = next((words for words in choices if 5.8 * len(words) < width), "")
    return _text(x, y, words, 10, colour=_ink(fill)) if words else ""


def mesh_picture(sizes: Mapping[str, int]) -> str:
    """The devices of a mesh: one box each; the last axis across, the one before down, a block for each of the others.

    Args:
        sizes: by axis, outermost first.
    """
    names = list(sizes)
    across, down = sizes[names[-1]], sizes[names[-2]] if len(names) > 1 else 1
    outer = [(axis, sizes[axis]) for axis in names[:-2]]
    blocks = math.prod(size for _, size in outer)
    shown_across, shown_down, shown_blocks = min(across, MOST), min(down, MOST), min(blocks, 4)
    box, gap = 34, 26
    width = max(360, 50 + shown_blocks * (shown_across * box + gap))
    more = (shown_across, shown_down, shown_blocks) != (across, down, blocks)
    height = 48 + shown_down * box + 20 * more
    head = f"{names[-1]} = {across} across" + (f", {names[-2]} = {down} down" if len(names) > 1 else "")
    parts = [_text(8, 16, head, anchor="start")]
    for block in range(shown_blocks):
        left = 40 + block * (shown_across * box + gap)
        at = np.unravel_index(block, [size for _, size in outer]) if outer else ()
        words = ", ".join(f"{axis} {i}" for (axis, size), i in zip(outer, at, strict=True) if size > 1)
        parts.append(_text(left + shown_across * box / 2, 36, words))
        for row, column in np.ndindex(shown_down, shown_across):
            number = (block * down + row) * across + column
            x, y, fill = left + column * box, 44 + row * box, COLOURS[column % len(COLOURS)]
            parts += [_box(x, y, box - 3, box - 3, fill), _label(x + 15.5, y + 20, box, [str(number)], fill)]
    if more:
        parts.append(_text(8, height - 4, f"drawn in part: {across} x {down} x {blocks} devices in all", 11, "start"))
    return _svg(width, height, parts, "device mesh")


Piece = tuple[tuple[int, int], ...]
"""(start, stop) in each dim of an array."""


def slices_picture(shape: Sequence[int], names: Sequence[str], holders: Mapping[Piece, Sequence[int]]) -> str:
    """Which device holds which slice of a weight: the two dims that are cut most as a grid, one grid for each piece of
    a third.

    Args:
        shape: of the whole weight.
        names: of its dims.
        holders: slice -> numbers of the devices that hold it.
    """
    pieces = [sorted({piece[dim] for piece in holders}) for dim in range(len(shape))]
    order = sorted(range(len(shape)), key=lambda dim: -len(pieces[dim]))
    down, across = sorted(order[:2]) if len(shape) > 1 else (-1, 0)
    grids = list(itertools.product(*(pieces[dim] for dim in order[2:])))
    rows, columns = pieces[down][:MOST] if down >= 0 else [(0, 1)], pieces[across][:MOST]
    beside = _dim(shape, names, pieces, down) if down >= 0 else []
    left, width, height = 92, 224, 84 if len(grids) == 1 else 64
    w, h = width / len(columns), height / len(rows)
    parts = [_text(left + width / 2, 16, " ".join(_dim(shape, names, pieces, across)), 11)]
    for number, grid in enumerate(grids[:4]):
        top, fixed = 26 + number * (height + 8), dict(zip(order[2:], grid, strict=True))
        lines = beside + [f"{names[d]} {a}:{b}" for d, (a, b) in fixed.items() if len(pieces[d]) > 1]
        for line, words in enumerate(lines):
            parts.append(_text(left - 6, top + height / 2 + 4 + 13 * (line - (len(lines) - 1) / 2), words, 10, "end"))
        for (row, r), (column, c) in itertools.product(enumerate(rows), enumerate(columns)):
            at = fixed | {down: r, across: c}
            fill = COLOURS[((number * len(rows) + row) * len(columns) + column) % len(COLOURS)]
            piece = tuple(at[dim] for dim in range(len(shape)))
            parts.append(_slice(left + column * w, top + row * h, w, h, fill, shape, piece, holders))
    tall = 26 + min(len(grids), 4) * (height + 8)
    if len(grids) > 4:
        parts.append(_text(left, tall + 6, f"and {len(grids) - 4} more", 10, "start"))
    return _svg(left + width + 8, tall + 14 * (len(grids) > 4), parts, "slices of the weight")


def _slice(
    x: float,
    y: float,
    width: float,
    height: float,
    fill: str,
    shape: Sequence[int],
    piece: Piece,
    holders: Mapping[Piece, Sequence[int]],
) -> str:
    """The box of one slice, with as many of its devices as there is room for."""
    devices = holders[piece]
    where = ", ".join("all" if i == (0, n) else f"{i[0]}:{i[1]}" for i, n in zip(piece, shape, strict=True))
    title = f"[{where}]: device{'s' * (len(devices) > 1)} {_numbers(devices, 64)}"
    choices = [_numbers(devices, most) for most in (8, 4, 2)]
    choices = [f"all {len(devices)} devices", *choices] if len(holders) == 1 else choices
    label = _label(x + width / 2, y + height / 2 + 3.5, width, choices, fill) if height > 10 else ""
    return _box(x, y, width - 1.5, height - 1.5, fill, title) + label


def _dim(
    shape: Sequence[int], names: Sequence[str], pieces: Sequence[Sequence[tuple[int, int]]], dim: int
) -> list[str]:
    """Lines beside a dim: its name, its size and pieces, and how many of them are drawn."""
    count = len(pieces[dim])
    size = f"{shape[dim]:,}" + (f" in {count}" if count > 1 else "")
    return [names[dim], size, *([f"({MOST} drawn)"] if count > MOST else [])]


def _numbers(devices: Sequence[int], most: int) -> str:
    """Returns "0, 2, 4", or "0, 2 … 14" where there are more than `most`."""
    words = [str(device) for device in sorted(devices)]
    return ", ".join(words) if len(words) <= most else f"{', '.join(words[: most // 2])} … {words[-1]}"


def pipeline_picture(schedule: Schedule, forward: float = 1.0, backward: float = 3.0) -> str:
    """The pipeline: time across, stages down. Of a long one the beginning and the end.

    Args:
        schedule: the table.
        forward, backward: seconds of a half, in any unit.
    """
    halves = [
        (way, tick, cost)
        for tick in range(schedule.ticks)
        for way, cost in (("fwd", forward), ("bwd", backward))
        if getattr(schedule, f"{way}_live")[tick].any()
    ]
    cut = len(halves) > MOST_HALVES
    if cut:
        halves = [*halves[: MOST_HALVES // 2], ("gap", 0, backward), *halves[-MOST_HALVES // 2 :]]
    left, width, step = 62, 700, 26
    scale = width / sum(cost for *_, cost in halves)
    parts = [_text(left - 8, s * step + 18, f"stage {s}", 11, "end") for s in range(schedule.stages)]
    x = float(left)
    for way, tick, cost in halves:
        if way != "gap":
            parts += [_half(schedule, way, tick, s, x, s * step + 2, cost * scale) for s in range(schedule.stages)]
        x += cost * scale
    y = schedule.stages * step + 18
    later = ", later chunks darker" if schedule.chunks > 1 else ""
    legend = ((_shade("fwd", 0, 1), f"forward{later}"), (_shade("bwd", 0, 1), f"backward{later}"), (IDLE, "bubble"))
    for index, (colour, words) in enumerate(legend):
        at = left + index * 210
        parts += [_box(at, y - 10, 12, 12, colour), _text(at + 18, y, words, 11, "start")]
    if cut:
        parts.append(_text(left + width, y, "middle left out", 11, "end"))
    return _svg(left + width + 8, y + 8, parts, "pipeline: time across, stages down")


def _shade(way: str, chunk: int, chunks: int) -> str:
    return "#" + "".join(f"{round(255 * part):02x}" for part in shade(way, chunk, chunks))


def _half(schedule: Schedule, way: str, tick: int, stage: int, x: float, y: float, width: float) -> str:
    """One half of a tick at one stage."""
    microbatch = int(getattr(schedule, f"{way}_microbatch")[tick, stage])
    if microbatch < 0:
        return _box(x, y, width - 0.6, 22, IDLE, "bubble")
    chunk = int(getattr(schedule, f"{way}_chunk")[tick, stage])
    fill = _shade(way, chunk, schedule.chunks)
    kind = {"fwd": "forward", "bwd": "backward"}[way]
    title = f"{kind} of microbatch {microbatch}" + (f", chunk {chunk}" if schedule.chunks > 1 else "")
    return _box(x, y, width - 0.6, 22, fill, title) + _label(x + width / 2, y + 15, width, [str(microbatch)], fill)


def _amount(value: float, unit: str, scale: float) -> str:
    """Returns "12.30 MiB"; bytes that would be less than 0.01 of the unit in a smaller one."""
    if value and value / scale < 0.01 and unit in _BYTES:
        unit, scale = next(((name, size) for name, size in _BYTES.items() if value >= size), ("B", 1))
    return f"{value / scale:,.2f} {unit}" if unit != "B" else f"{value:,.0f} B"


def bars(rows: Sequence[tuple[str, Sequence[tuple[str, float]]]], unit: str, scale: float) -> str:
    """Horizontal stacked bars, as narrow as a phone; the label and the sum of each stand above it.

    Args:
        rows: (label, parts of (name, value)); a name has one colour everywhere.
        unit: behind the numbers.
        scale: values are divided by this.
    """
    most = max((sum(value for _, value in parts) for _, parts in rows), default=0) or 1
    names = list(dict.fromkeys(name for _, parts in rows for name, value in parts if value))
    width, step = 344, 38
    height = len(rows) * step + 22 * (-(-len(names) // 2)) + 8
    found = []
    for index, (label, parts) in enumerate(rows):
        x, y = 4.0, index * step
        found.append(_text(4, y + 14, label, 12, "start"))
        found.append(_text(4 + width, y + 14, _amount(sum(value for _, value in parts), unit, scale), 12, "end"))
        for name, value in parts:
            size = width * value / most
            colour = COLOURS[names.index(name) % len(COLOURS)] if value else ""
            if value:
                found.append(
                    f'<rect x="{x:.1f}" y="{y + 19}" width="{max(size, 0.5):.1f}" height="14" fill="{colour}"/>'
                )
            x += size
    for index, name in enumerate(names):
        x, y = 4 + (index % 2) * 172, len(rows) * step + 16 + 22 * (index // 2)
        found.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{COLOURS[index % len(COLOURS)]}"/>')
        found.append(_text(x + 18, y, name, 11, "start"))
    return _svg(width + 8, height, found, "bars")


def write_png(svg: str, file: Path, dots: int = 300) -> None:
    """Writes one of these drawings as a PNG for print, black on white, with `dots` to an inch of 100 units."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    root = ElementTree.fromstring(svg)
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    figure = Figure(figsize=(width / 100, height / 100))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()
    for item in root:
        get = item.attrib.get
        x, y = float(get("x", 0)), float(get("y", 0))
        if item.tag == "rect":
            size = float(get("width", 0)), float(get("height", 0))
            axes.add_patch(Rectangle((x, y), *size, facecolor=get("fill"), linewidth=0))
        elif item.tag == "text":
            colour = get("fill", "currentColor").replace("currentColor", "black")
            side = {"start": "left", "middle": "center", "end": "right"}[get("text-anchor", "start")]
            points = float(get("font-size", 12)) * 0.72  # a unit is a hundredth of an inch, a point a 72nd
            axes.text(x, y, (item.text or "").replace("$", r"\$"), fontsize=points, color=colour, ha=side)
    figure.savefig(file, dpi=dots)
