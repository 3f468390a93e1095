"""Pictures of a schedule: ticks across, stages down, for the terminal and as PNG."""

import string
import textwrap
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.text import Text

from jaxshard.parallel.schedule import Schedule, bubble_formula, bubble_fraction

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLES = {"F": "white on blue", "B": "black on green", "loss": "black on yellow", "bubble": "red", "": "dim"}
SHADES = {"fwd": ((0.62, 0.77, 0.93), (0.16, 0.38, 0.66)), "bwd": ((0.66, 0.86, 0.60), (0.16, 0.50, 0.22))}
BUBBLE = "#f0f0f0"
SMALLEST = 3
"""Points of a label that can still be read in print; cells too narrow for it go without."""


def describe(schedule: Schedule, forward: float = 1.0, backward: float = 3.0) -> str:
    """One line: sizes, halves, bubble, slots."""
    chunks = f" x {schedule.chunks} chunks" if schedule.chunks > 1 else ""
    inputs = "input" if schedule.saved_slots == 1 else "inputs"
    return (
        f"{schedule.name}: {schedule.stages} stages{chunks}, {schedule.microbatches} microbatches, "
        f"{schedule.forward_halves} F + {schedule.backward_halves} B halves, "
        f"bubble {bubble_fraction(schedule, forward, backward):.1%}, {schedule.saved_slots} saved {inputs}"
    )


def sentences(schedule: Schedule) -> list[str]:
    """What the drawing means, and its bubble: counted, and by formula."""
    S, M, V = schedule.stages, schedule.microbatches, schedule.chunks
    F, B = schedule.forward_halves, schedule.backward_halves
    letters = f"; the letters {string.ascii_letters[0]} to {string.ascii_letters[V - 1]} are a stage's {V} chunks"
    idle = S * (F + B) - 2 * S * V * M
    if M >= S:
        formula = f"{'(S-1)/(V*M+S-1)' if V > 1 else '(S-1)/(M+S-1)'} = {S - 1}/{V * M + S - 1}"
    else:  # then the way of one microbatch through all virtual stages is what counts
        formula = f"1 - V*M/(V*S+M-1) = {V * S + M - 1 - V * M}/{V * S + M - 1}"
        formula += f" (for fewer microbatches than stages; (S-1)/(V*M+S-1) would be {(S - 1) / (V * M + S - 1):.1%})"
    return [
        "A number is the microbatch, a dot a bubble" + (letters if 1 < V <= 26 else "") + ".",
        f"Bubble counted from the table: {idle} of {S * (F + B)} halves are idle, {bubble_fraction(schedule):.1%}.",
        f"Bubble by formula: {formula}, {bubble_formula(schedule.name, S, M, V):.1%}.",
        f"The table has {schedule.ticks} ticks, and the formula's denominator is {F}: a tick runs a forward half, a "
        f"backward half or both, {F} and {B} in all, and only those take time.",
    ]


def _label(schedule: Schedule, way: str, tick: int, stage: int) -> str:
    """Microbatch, and the letter of the chunk if there are several; "" where the stage is idle."""
    m = getattr(schedule, f"{way}_microbatch")[tick, stage]
    if m < 0:
        return ""
    chunk = int(getattr(schedule, f"{way}_chunk")[tick, stage])
    return f"{m}{string.ascii_letters[chunk % 52] if schedule.chunks > 1 else ''}"


def _shown(ticks: int, room: int) -> list[int | None]:
    """Ticks that fit into `room` columns: all of them, or the first and the last with None for those between."""
    if ticks <= room:
        return list(range(ticks))
    first = room // 2
    return [*range(first), None, *range(ticks - (room - 1 - first), ticks)]


def draw_text(schedule: Schedule, width: int = 80) -> Text:
    """The table for a terminal of `width` columns: two lines a stage, forward (F) and backward (B).

    A cell holds the microbatch (and the chunk as a letter), "." for a bubble, and nothing where that half is not run.
    It reads without colours too. Ticks in the middle that do not fit are left out.
    """
    cell = max(len(str(schedule.microbatches - 1)) + (schedule.chunks > 1), len(str(schedule.ticks - 1))) + 1
    head = len(f"stage {schedule.stages - 1} F")
    shown = _shown(schedule.ticks, max(3, (width - head) // cell))
    halves = {"fwd": np.asarray(schedule.fwd_live.any(1)), "bwd": np.asarray(schedule.bwd_live.any(1))}
    text = Text(no_wrap=True)
    text.append(textwrap.fill(describe(schedule), width, subsequent_indent="  ") + "\n")

    def line(name: str, cells: list[tuple[str, str]]) -> None:
        text.append(name.ljust(head))
        for label, kind in cells:
            text.append(label.rjust(cell), STYLES[kind])
        text.append("\n")

    line("tick", [("…" if t is None else str(t), "") for t in shown])
    for s in range(schedule.stages):
        for way, kind, name in (
            ("fwd", "F", f"stage {s}".ljust(head - 2) + " F"),
            ("bwd", "B", " " * (head - 1) + "B"),
        ):
            cells = []
            for t in shown:
                if t is None or not halves[way][t]:
                    cells.append(("…" if t is None else "", ""))
                else:
                    label = _label(schedule, way, t, s)
                    cells.append((label or ".", kind if label else "bubble"))
            line(name, cells)
    loss = schedule.loss_microbatch
    line("loss", [("…", "") if t is None else (str(loss[t]), "loss") if loss[t] >= 0 else ("", "") for t in shown])
    text.rstrip()
    return text


def draw_png(
    schedule: Schedule, path: str | Path, forward: float = 1.0, backward: float = 3.0, dots: int = 300
) -> None:
    """Writes the picture to `path`, `dots` to an inch: time across in forwards of one microbatch through a stage."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(11, 1.3 + 0.42 * schedule.stages), layout="constrained")
    axes = figure.add_subplot()
    end = _bars(axes, schedule, forward / schedule.chunks, backward / schedule.chunks)
    axes.set(
        xlim=(0, end), ylim=(schedule.stages - 0.5, -0.5), xlabel="time, in forwards of a microbatch through a stage"
    )
    axes.set_yticks(range(schedule.stages), [f"stage {s}" for s in range(schedule.stages)])
    axes.set_title(describe(schedule, forward, backward), fontsize=10, loc="left")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    darker = " (later chunks darker)" if schedule.chunks > 1 else ""
    patches = [
        Patch(color=shade("fwd", 0, 1), label=f"forward{darker}"),
        Patch(color=shade("bwd", 0, 1), label="backward"),
    ]
    patches.append(Patch(facecolor=BUBBLE, hatch="////", edgecolor="#c8c8c8", label="bubble"))
    figure.legend(handles=patches, loc="outside lower right", ncols=3, fontsize=8, frameon=False)
    figure.savefig(path, dpi=dots)


def shade(way: str, chunk: int, chunks: int) -> tuple[float, float, float]:
    """Blue for forward, green for backward; later chunks darker."""
    light, dark = SHADES[way]
    part = chunk / (chunks - 1) if chunks > 1 else 0.35
    red, green, blue = (a + (b - a) * part for a, b in zip(light, dark, strict=True))
    return red, green, blue


def _bars(axes: "Axes", schedule: Schedule, forward: float, backward: float) -> float:
    """Draws every half of every stage; returns the time at which the step ends."""
    halves = []  # (way, tick, width)
    for tick in range(schedule.ticks):
        if schedule.fwd_live[tick].any():
            halves.append(("fwd", tick, forward))
        if schedule.bwd_live[tick].any():
            halves.append(("bwd", tick, backward))
    edges = [0.0, *np.cumsum([width for *_, width in halves]).tolist()]
    inches = 9.8 / edges[-1]  # of a unit of time
    for s in range(schedule.stages):
        busy, colours, bubbles = [], [], []
        for (way, tick, width), (left, right) in zip(halves, pairwise(edges), strict=True):
            label = _label(schedule, way, tick, s)
            if not label:
                bubbles.append((left, width))
                continue
            chunk = int(getattr(schedule, f"{way}_chunk")[tick, s])
            busy.append((left, width))
            colours.append(shade(way, chunk, schedule.chunks))
            turned = 0.06 * len(label) > width * inches  # 0.06 inches a character of 6 points
            points = min(6, 72 * width * inches) if turned else 6
            if points >= SMALLEST:
                colour = "white" if 2 * chunk > schedule.chunks - 1 else "black"
                place = {"ha": "center", "va": "center", "rotation": 90 if turned else 0}
                axes.text((left + right) / 2, s, label, fontsize=points, color=colour, **place)
        axes.broken_barh(busy, (s - 0.42, 0.84), facecolors=colours, edgecolor="white", linewidth=0.5)
        if bubbles:
            axes.broken_barh(
                bubbles, (s - 0.42, 0.84), facecolor=BUBBLE, edgecolor="#c8c8c8", hatch="////", linewidth=0
            )
    return edges[-1]
