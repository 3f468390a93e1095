"""Drawings of a layout as inline SVG: the mesh, the slices of a weight, bars of bytes. Pure text, free of jax."""

import html
import math
from collections.abc import Mapping, Sequence

COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#b07aa1", "#edc948", "#9c755f")
MOST = 16
"""Boxes drawn along one direction; what is more is written as a number."""


def _text(x: float, y: float, words: str, size: int = 12, anchor: str = "middle", colour: str = "currentColor") -> str:
    style = f'font-size="{size}" text-anchor="{anchor}" fill="{colour}"'
    return f'<text x="{x:g}" y="{y:g}" {style}>{html.escape(words)}</text>'


def _svg(width: float, height: float, parts: Sequence[str], label: str) -> str:
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" style="max-width:{width:g}px" role="img" '
        f'aria-label="{html.escape(label)}">{"".join(parts)}</svg>'
    )


def mesh_picture(sizes: Mapping[str, int]) -> str:
    """The devices of a mesh: one box each; model across, data down, a block for each stage and replica."""
    across, down = sizes.get("model", 1), sizes.get("data", 1)
    outer = [(axis, size) for axis, size in sizes.items() if axis not in ("model", "data")]
    blocks = math.prod(size for _, size in outer)
    shown_across, shown_down, shown_blocks = min(across, MOST), min(down, MOST), min(blocks, 4)
    box, gap = 34, 26
    width = max(360, 50 + shown_blocks * (shown_across * box + gap))
    height = 52 + shown_down * box + 20
    parts = [_text(8, 16, f"model (tp) = {across} across, data (dp) = {down} down", anchor="start")]
    for block in range(shown_blocks):
        left = 40 + block * (shown_across * box + gap)
        names, rest = [], block
        for axis, size in reversed(outer):
            if size > 1:
                names.append(f"{axis} {rest % size}")
            rest //= size
        parts.append(_text(left + shown_across * box / 2, 36, ", ".join(reversed(names))))
        for row in range(shown_down):
            for column in range(shown_across):
                number = (block * down + row) * across + column
                x, y = left + column * box, 44 + row * box
                colour = COLOURS[column % len(COLOURS)]
                parts.append(
                    f'<rect x="{x}" y="{y}" width="{box - 3}" height="{box - 3}" rx="4" fill="{colour}" '
                    f'fill-opacity="{0.45 + 0.5 * (row % 2):g}"/>'
                )
                parts.append(_text(x + box / 2 - 1, y + box / 2 + 3, str(number), 11, colour="#fff"))
    more = (across - shown_across, down - shown_down, blocks - shown_blocks)
    if any(more):
        parts.append(_text(8, height - 4, f"drawn in part: {across} x {down} x {blocks} devices in all", 11, "start"))
    return _svg(width, height, parts, "device mesh")


def slices_picture(shape: Sequence[int], names: Sequence[str], cuts: Sequence[Sequence[tuple[str, int]]]) -> str:
    """Which device holds which slice of a weight.

    Args:
        shape: of the whole weight.
        names: of its dims.
        cuts: for each dim the (axis, size) that cut it, outermost first.
    """
    counts = [math.prod(size for _, size in cut) for cut in cuts]
    drawn = sorted(range(len(shape)), key=lambda dim: -counts[dim])[:2] or [0]
    down = min(drawn)
    across = max(drawn)
    if len(shape) == 1:
        down = -1
    rows = min(counts[down], MOST) if down >= 0 else 1
    columns = min(counts[across], MOST)
    left, top, width, height = 92, 26, 224, 84
    parts = [_text(left + width / 2, 16, _dim(shape, names, counts, across), 11)]
    if down >= 0:
        parts.append(_text(left - 6, top + height / 2 + 4, _dim(shape, names, counts, down), 11, "end"))
    for row in range(rows):
        for column in range(columns):
            x, y = left + column * width / columns, top + row * height / rows
            colour = COLOURS[(row * columns + column) % len(COLOURS)]
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{width / columns - 1.5:.1f}" height="{height / rows - 1.5:.1f}" '
                f'fill="{colour}"/>'
            )
            if width / columns > 40 and height / rows > 12:
                where = [*_at(cuts[down] if down >= 0 else (), row), *_at(cuts[across], column)]
                words = " ".join(where) or "all devices"
                parts.append(_text(x + width / columns / 2, y + height / rows / 2 + 4, words, 10, colour="#fff"))
    return _svg(left + width + 8, top + height + 8, parts, "slices of the weight")


def _dim(shape: Sequence[int], names: Sequence[str], counts: Sequence[int], dim: int) -> str:
    pieces = f" in {counts[dim]}" if counts[dim] > 1 else ""
    return f"{names[dim]} {shape[dim]:,}{pieces}"


def _at(cut: Sequence[tuple[str, int]], index: int) -> list[str]:
    words = []
    for axis, size in reversed(cut):
        words.append(f"{axis}{index % size}")
        index //= size
    return list(reversed(words))


def bars(rows: Sequence[tuple[str, Sequence[tuple[str, float]]]], unit: str, scale: float) -> str:
    """Horizontal stacked bars.

    Args:
        rows: (label, parts of (name, value)); a name has one colour everywhere.
        unit: behind the numbers.
        scale: values are divided by this.
    """
    most = max((sum(value for _, value in parts) for _, parts in rows), default=0) or 1
    names = list(dict.fromkeys(name for _, parts in rows for name, value in parts if value))
    left, width, step = 110, 330, 30
    height = len(rows) * step + 22 * (-(-len(names) // 3)) + 14
    found = []
    for index, (label, parts) in enumerate(rows):
        x, y = float(left), index * step
        found.append(_text(left - 8, y + 17, label, 12, "end"))
        for name, value in parts:
            size = width * value / most
            colour = COLOURS[names.index(name) % len(COLOURS)] if value else ""
            if value:
                found.append(
                    f'<rect x="{x:.1f}" y="{y + 3}" width="{max(size, 0.5):.1f}" height="20" fill="{colour}"/>'
                )
            x += size
        total = sum(value for _, value in parts) / scale
        found.append(_text(x + 6, y + 17, f"{total:,.2f} {unit}", 11, "start"))
    for index, name in enumerate(names):
        x, y = 8 + (index % 3) * 170, len(rows) * step + 16 + 22 * (index // 3)
        found.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{COLOURS[index % len(COLOURS)]}"/>')
        found.append(_text(x + 18, y, name, 11, "start"))
    return _svg(left + width + 100, height, found, "bars of bytes")
