"""Plans as one HTML page: memory of each, memory against time, and the timeline of a step. No network, no scripts."""

import html
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxshard.analysis.memory import gib
from jaxshard.analysis.roofline import seconds_text
from jaxshard.analysis.timeline import NAMES, Block, Timeline
from jaxshard.errors import InputError
from jaxshard.planner.advice import PARTS
from jaxshard.planner.planner import Plan
from jaxshard.planner.ranking import Scored, Search
from jaxshard.views.pictures import COLOURS, _svg, _text, bars
from jaxshard.views.plan_tables import COLUMNS, rows, speed_note, time_lines, title
from jaxshard.views.report import _STYLE, _long, _section, _table, _unit

SHORT_PARTS = PARTS | {"data_comm": "exposed, over dp", "elementwise": "memory-bound", "bubble": "bubble"}
"""Names that fit into a legend."""
LEFT, WIDTH, HEIGHT = 92, 560, 300
"""Of a picture: what stands left of the drawing, and the drawing."""


def write_report(found: Search, plans: Sequence[Plan], notes: Sequence[str], file: Path) -> None:
    """Writes the page.

    Raises:
        InputError: the file cannot be written.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(page(found, plans, notes), encoding="utf-8")
    except OSError as error:
        raise InputError(f"--report {file}: cannot be written ({error.strerror}); name another file") from None


def page(found: Search, plans: Sequence[Plan], notes: Sequence[str]) -> str:
    """The page as text."""
    head = html.escape(title(found))
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{head}</title><style>{_STYLE}</style><h1>{head}</h1>{''.join(_sections(found, plans, notes))}</html>\n"
    )


def _sections(found: Search, plans: Sequence[Plan], notes: Sequence[str]) -> Iterator[str]:
    yield f'<pre style="white-space:pre-wrap">{html.escape(plans[0].command)}</pre>'
    yield _section("Why the first", _items([*plans[0].reasons, *notes]))
    yield _section("Plans", _plans(found, plans))
    yield _section("Memory of one device at the peak", _memory(found, plans))
    if found.timed:
        yield _section("Memory against time", frontier(found.fitting, [plan.scored for plan in plans], found.limit))
        yield _section("Where the time goes, from shapes", _parts(plans))
    compiled = [(number, plan) for number, plan in enumerate(plans, 1) if plan.timeline]
    if compiled:
        yield _section("Where the time goes, from the compiled schedule", _items(time_lines(list(plans))))
    for number, plan in compiled:
        assert plan.timeline
        yield _section(
            f"Timeline of plan {number}: {plan.scored.candidate.shape}", _long(timeline_picture(plan.timeline))
        )


def _plans(found: Search, plans: Sequence[Plan]) -> str:
    """The table, without the columns that are empty in every row."""
    cells = [[str(cell) for cell in row] for row in rows(found, list(plans))]
    kept = [i for i in range(len(COLUMNS)) if {row[i] for row in cells} - {"-", "none"}]
    heads = [COLUMNS[i] or "plan" for i in kept]
    numbers = [place for place, i in enumerate(kept) if i >= COLUMNS.index("state")]
    keys = [heads.index(name) for name in ("mesh", "total", "s/step", "compiled s", "MFU") if name in heads]
    note = html.escape(speed_note(list(plans)))
    return _table(heads, [[row[i] for i in kept] for row in cells], numbers, keys) + (f"<p>{note}</p>" if note else "")


def _items(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in lines) + "</ul>"


def _memory(found: Search, plans: Sequence[Plan]) -> str:
    drawn = []
    for number, plan in enumerate(plans, 1):
        sizes = plan.scored.memory.by_class()
        parts = [(name, float(size)) for name, size in sizes.items() if name not in ("host", "total")]
        drawn.append((f"plan {number}", parts))
        if plan.compiled_peak:
            drawn.append(("by the compiler", [("peak by the compiler", float(plan.compiled_peak))]))
    picture = bars(drawn, *_unit(max(sum(size for _, size in parts) for _, parts in drawn)))
    may = f"<p>A plan may take {gib(found.limit)}.</p>" if found.limit < float("inf") else ""
    host = max(plan.scored.memory.host for plan in plans)
    beside = f"<p>Beside it up to {gib(host)} of host memory for each device.</p>" if host else ""
    return may + picture + beside


def _parts(plans: Sequence[Plan]) -> str:
    shown = [
        (f"plan {number}", [(SHORT_PARTS[field], plan.scored.parts[field]) for field in SHORT_PARTS])
        for number, plan in enumerate(plans, 1)
    ]
    return bars(shown, "s", 1.0)


def frontier(fitting: Sequence[Scored], plans: Sequence[Scored], limit: float) -> str:
    """Layouts that fit as points; a line through those of which none is both faster and smaller; plans numbered."""
    most_time = min(max(s.seconds for s in fitting), 4 * min(s.seconds for s in fitting))
    most_time = max(most_time, *(s.seconds for s in plans))
    shown = [s for s in fitting if s.seconds <= most_time]
    most = limit if limit < float("inf") else max(s.memory.total for s in (*shown, *plans))
    first = 0.9 * min(s.seconds for s in fitting)
    x = lambda s: LEFT + WIDTH * (s.seconds - first) / (most_time - first)
    y = lambda s: 16 + HEIGHT * (1 - s.memory.total / most)
    parts = [
        f'<path d="M{LEFT},16V{16 + HEIGHT}H{LEFT + WIDTH}" fill="none" stroke="currentColor"/>',
        _text(LEFT - 6, 22, gib(most), 11, "end"),
        _text(LEFT - 6, 16 + HEIGHT, "0", 11, "end"),
        _text(LEFT, HEIGHT + 34, seconds_text(first), 11, "start"),
        _text(LEFT + WIDTH, HEIGHT + 34, f"{seconds_text(most_time)} a step", 11, "end"),
    ]
    parts += [f'<circle cx="{x(s):.1f}" cy="{y(s):.1f}" r="2" fill="{COLOURS[0]}" fill-opacity="0.5"/>' for s in shown]
    best = _undominated(shown)
    line = " ".join(f"{x(s):.1f},{y(s):.1f}" for s in best)
    parts.append(f'<polyline points="{line}" fill="none" stroke="{COLOURS[3]}" stroke-width="1.5"/>')
    for number, s in enumerate(plans, 1):
        parts.append(f'<circle cx="{x(s):.1f}" cy="{y(s):.1f}" r="7" fill="{COLOURS[1]}"/>')
        parts.append(_text(x(s), y(s) + 3, str(number), 9, colour="#fff"))
    return _long(_svg(LEFT + WIDTH + 20, HEIGHT + 44, parts, "memory against time")) + (
        "<p>Each point is a layout that fits; no layout left of the line takes less memory and less time.</p>"
    )


def _undominated(layouts: Sequence[Scored]) -> list[Scored]:
    """Layouts of which no other is faster and takes less memory, fastest first."""
    kept: list[Scored] = []
    for scored in sorted(layouts, key=lambda s: (s.seconds, s.memory.total)):
        if not kept or scored.memory.total < kept[-1].memory.total:
            kept.append(scored)
    return kept


def timeline_picture(found: Timeline) -> str:
    """One run of the step, and one run of each loop in it that matters: computation above, network below."""
    shown = [b for b in found.blocks if b.name == "step" or b.runs * b.seconds > 0.02 * found.seconds]
    loops = {block.name for block in found.blocks}
    totals: dict[str, float] = {}
    for block in shown:
        for span in block.spans:
            if span.kind not in loops:
                totals[span.kind] = totals.get(span.kind, 0.0) + block.runs * (span.end - span.start)
    kinds = sorted(totals, key=lambda kind: (kind not in NAMES, -totals[kind]))
    colours = {kind: COLOURS[index % len(COLOURS)] for index, kind in enumerate(kinds)}
    called = _called(found.blocks)
    names = NAMES | called
    parts: list[str] = []
    for index, block in enumerate(shown):
        parts += _block(block, 8 + 84 * index, colours, names, called[block.name])
    legend = 8 + 84 * len(shown) + 12
    for index, kind in enumerate(kinds):
        across, down = 8 + (index % 3) * 215, legend + 20 * (index // 3)
        parts.append(f'<rect x="{across}" y="{down - 10}" width="12" height="12" fill="{colours[kind]}"/>')
        parts.append(_text(across + 18, down, names.get(kind, kind), 11, "start"))
    return _svg(LEFT + WIDTH + 20, legend + 20 * (-(-len(kinds) // 3)), parts, "timeline of a step")


def _called(blocks: Sequence[Block]) -> dict[str, str]:
    """Name of each block -> what it is, numbered where several are the same."""
    words = [block.what for block in blocks]
    number = lambda i: f" {words[: i + 1].count(words[i])}" if words.count(words[i]) > 1 else ""
    return {block.name: f"{block.what}{number(i)}" for i, block in enumerate(blocks)}


def _block(block: Block, top: float, colours: dict[str, str], names: dict[str, str], what: str) -> Iterator[str]:
    runs = f", one of {block.runs:,} runs" if block.runs > 1 else ""
    yield _text(8, top + 10, f"{what}{runs}: {seconds_text(block.seconds)}", 12, "start")
    scale = WIDTH / max(block.seconds, 1e-12)
    for lane, down in (("computation", 18), ("network", 42)):
        yield _text(LEFT - 6, top + down + 14, lane, 11, "end")
        for span in block.spans:
            if span.lane != lane:
                continue
            left, width = LEFT + span.start * scale, max(0.4, (span.end - span.start) * scale)
            colour = colours.get(span.kind, "#8886")
            name = names.get(span.kind, span.kind)
            words = html.escape(f"{name}: {seconds_text(span.end - span.start)}")
            yield (
                f'<rect x="{left:.1f}" y="{top + down}" width="{width:.1f}" height="20" fill="{colour}">'
                f"<title>{words}</title></rect>"
            )
            if width > 70 and span.kind not in colours:
                yield _text(left + width / 2, top + down + 14, name, 10)
