"""An explanation as one HTML page: no network, no scripts, readable on a phone."""

import html
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax

from jaxshard.analysis.explanation import Explanation, listed
from jaxshard.analysis.ledger import Row, bytes_by_axis
from jaxshard.analysis.state_bytes import state_bytes
from jaxshard.errors import InputError
from jaxshard.parallel.axes import axes_text
from jaxshard.training.describe import size_text
from jaxshard.training.program import Program
from jaxshard.views.pictures import Piece, bars, mesh_picture, pipeline_picture, slices_picture, write_png
from jaxshard.views.schedule_draw import sentences
from jaxshard.views.tables import buffer_table, donation, given_up, too_large

_STYLE = """
:root{color-scheme:light dark}
body{font:16px/1.5 system-ui,sans-serif;margin:0 auto;max-width:82rem;padding:1rem;overflow-wrap:anywhere}
p,li{max-width:60rem}
h1{font-size:1.5rem}h2{font-size:1.2rem;margin-top:2rem;border-bottom:1px solid #8886}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:.85rem}
th,td{text-align:left;padding:.3rem .45rem;border-bottom:1px solid #8884;vertical-align:top;overflow-wrap:normal}
.n{text-align:right;white-space:nowrap}svg{width:100%;height:auto;font-family:system-ui,sans-serif}
.good{color:#2a8a3e;font-weight:600}.bad{color:#c6362c;font-weight:600}
.cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(20rem,100%),1fr));gap:1rem}
.cards figure{margin:0;border:1px solid #8884;border-radius:.5rem;padding:.5rem}
figcaption{font-size:.8rem;overflow-wrap:anywhere}
.long{overflow-x:auto}.long svg{min-width:var(--least)}.swipe{display:none;font-size:.8rem;margin:0;opacity:.75}
summary{margin:.5rem 0;cursor:pointer}
@media(max-width:48rem){.swipe{display:block}ul{padding-left:1.2rem}
.wide tr:first-child,td:empty,.no{display:none}.wide table,.wide tbody{display:block}
.wide tr+tr{display:flex;flex-wrap:wrap;gap:0 .9rem;padding:.4rem 0;border-bottom:1px solid #8884}
.wide td{border:0;padding:0;order:2;white-space:normal;text-align:left;overflow-wrap:anywhere}
.wide td::before{content:attr(data-name) " ";opacity:.7}
.wide td:first-child{order:0;flex-basis:100%;font-weight:600}.wide td.key{order:1;font-weight:600}}
@media(prefers-color-scheme:dark){.good{color:#5fc477}.bad{color:#ff8a80}}
"""
PHONE = 340
"""Units of a picture that a phone shows at their size."""
_ZERO = (
    "<p>As figure 1 of the ZeRO paper (Rajbhandari et al. 2020, arXiv 1910.02054), for this model, precision and mesh: "
    "each stage splits one more part of the state over dp.</p>"
)


def write_report(found: Explanation, file: Path) -> None:
    """Writes the page.

    Raises:
        InputError: the file cannot be written.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(page(found), encoding="utf-8")
    except OSError as error:
        raise InputError(f"--report {file}: cannot be written ({error.strerror}); name another file") from None


def write_pictures(found: Explanation, folder: Path) -> list[Path]:
    """Writes the page's pictures as PNG files for print, and returns them.

    Raises:
        InputError: the folder cannot be written.
    """
    drawn = pictures(found) | {f"slices-{name}": svg for name, svg in slices(found.program).items()}
    files = [folder / f"{name}.png" for name in drawn]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for svg, file in zip(drawn.values(), files, strict=True):
            write_png(svg, file)
    except OSError as error:
        raise InputError(f"--png {folder}: cannot be written ({error.strerror}); name another folder") from None
    return files


def page(found: Explanation) -> str:
    """The page as text."""
    zero = "" if found.zero is None else f", ZeRO-{found.zero}"
    title = f"{found.target}, mesh {found.mesh}{zero}"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body><h1>{html.escape(title)}</h1>"
        f"<p>Compiled by {html.escape(found.compiler)}, jax {jax.__version__}.</p>{''.join(_sections(found))}"
        "</body></html>\n"
    )


def pictures(found: Explanation) -> dict[str, str]:
    """The drawings as SVG, by name; those of the train step only where it is one."""
    name_of = lambda axis: axes_text([axis], found.own)
    drawn = {"mesh": mesh_picture({name_of(axis): size for axis, size in found.sizes.items()})}
    totals = sorted(bytes_by_axis(found.rows).items(), key=lambda item: -item[1])
    if totals:
        rows = [(axes_text(name.split("+"), found.own), [("bytes", size)]) for name, size in totals]
        drawn["axes"] = bars(rows, *_unit(totals[0][1]))
    memory = found.memory
    parts = [
        ("arguments", memory.arguments),
        ("outputs", max(0, memory.outputs - memory.aliased)),
        ("temporaries", memory.temporaries),
    ]
    drawn["memory"] = bars([("device", parts), ("host", [("host", memory.host)])], *_unit(memory.peak))
    if found.program is not None:
        drawn["zero"] = _zero_bars(found.program)
        if pipeline := found.program.recipe.pipeline:
            drawn["pipeline"] = pipeline_picture(pipeline.schedule)
    return drawn


def _sections(found: Explanation) -> Iterator[str]:
    drawn = {name: _long(svg) for name, svg in pictures(found).items()}
    program = found.program
    yield _section("Verdict", _verdict(found))
    yield _section("Mesh", drawn["mesh"])
    yield _section("What travels, and why", _summary(found.rows, found.own) if found.rows else "<p>Nothing.</p>")
    if "axes" in drawn:
        yield _section(f"Bytes by axes, of one {'call' if found.facts is None else 'step'}", drawn["axes"])
    yield _section("Memory of one device", drawn["memory"] + _memory(found))
    if program is not None:
        yield _section("State of one device under ZeRO 0 to 3", drawn["zero"] + _ZERO)
        if program.recipe.pipeline:
            lines = "".join(f"<li>{html.escape(line)}</li>" for line in sentences(program.recipe.pipeline.schedule)[1:])
            yield _section("Pipeline", f"{drawn['pipeline']}<ul>{lines}</ul>")
        yield _section("Which device holds which slice", _weights(program))


def _section(title: str, body: str) -> str:
    return f"<section><h2>{html.escape(title)}</h2>{body}</section>"


def _verdict(found: Explanation) -> str:
    compared = found.check
    if compared is None:
        return f"<p>Not compared: {html.escape(found.not_compared)}.</p>"
    items = [("known", text, "") for text in compared.rewrites]
    items += [("not predicted", text, "") for text in compared.unpredicted]
    for word, differences in (("missing", compared.missing), ("unexpected", compared.unexpected)):
        items += [
            (word, f"{size_text(d.bytes)} over {axes_text(d.axes)}: {d.reason} {d.source}", "bad") for d in differences
        ]
    items += [("against the rules", text, "bad") for text in compared.undone]
    if not compared.missing and not compared.unexpected and not compared.undone:
        text = "Found = expected: nothing missing, nothing unexpected."
    elif found.ok:
        text = "No unexpected traffic that matters."
    elif compared.failures or not compared.undone:
        text = "There is traffic that no rule asks for, or state held whole that the rules split."
    else:
        text = "Weights are held whole that ZeRO-3 splits."
    lines = "".join(f'<li><span class="{css}">{word}</span>: {html.escape(words)}</li>' for word, words, css in items)
    expected = [(e.reason, e.kind, axes_text(e.axes), size_text(e.bytes), f"{e.count:,}") for e in compared.expected]
    table = _table(("expected", "kind", "axes", "bytes", "calls"), expected, numbers=(3, 4))
    details = f"<details><summary>Expected, in closed form</summary>{table}</details>"
    return f'<p class="{"good" if found.ok else "bad"}">{text}</p><ul>{lines}</ul>{details}'


def _summary(rows: Sequence[Row], own: bool) -> str:
    """The ledger added up by reason, and behind it each collective."""
    sums: dict[tuple[str, str, str], tuple[int, int]] = {}
    for row in rows:
        key = (row.reason, row.kind, axes_text(row.axes, own))
        calls, size = sums.get(key, (0, 0))
        sums[key] = (calls + row.count, size + row.total)
    cells = [
        (*key, f"{calls:,}", size_text(size)) for key, (calls, size) in sorted(sums.items(), key=lambda i: -i[1][1])
    ]
    table = _table(("reason", "kind", "axes", "calls", "all calls"), cells, numbers=(3, 4), keys=(4,))
    return f"{table}<details><summary>Each collective ({len(rows)})</summary>{_ledger(rows, own)}</details>"


def _ledger(rows: Sequence[Row], own: bool) -> str:
    cells = [
        (
            row.reason + (f" ({row.note})" if row.note else ""),
            row.kind,
            axes_text(row.axes, own),
            size_text(row.bytes),
            f"{row.count:,}",
            size_text(row.total),
            (row.overlap or "nothing") if row.is_async else "",
            f"{listed(row.parameters)} {row.source}".strip(),
        )
        for row in sorted(rows, key=lambda row: -row.total)
    ]
    heads = ("reason", "kind", "axes", "bytes", "calls", "all calls", "runs meanwhile", "source")
    return _table(heads, cells, numbers=(3, 4, 5), keys=(5,))


def _memory(found: Explanation) -> str:
    (_, *columns), cells = buffer_table(found, narrow=False)
    heads = ("largest temporaries", *columns)
    whole = [(leaf.path, size_text(leaf.bytes), leaf.why) for leaf in found.replicated]
    wrong = [] if found.fits else [too_large(found)]
    wrong += [given_up(warning) for warning in found.warnings]
    lines = "".join(f'<p class="bad">{html.escape(line)}</p>' for line in wrong)
    head = "held in copies" if found.own else "whole against the rules"
    replicated = _table((head, "bytes", "why"), whole, numbers=(1,)) if whole else ""
    replicated += f"<p>{html.escape(donation(found.undonated))}</p>" if found.undonated else ""
    return lines + (_table(heads, cells, numbers=(1,)) if cells else "") + replicated


def _zero_bars(program: Program) -> str:
    """As figure 1 of the ZeRO paper (Rajbhandari et al. 2020), for this model and mesh."""
    rows = []
    for zero in range(4):
        config = program.config.with_parallel(zero=zero)
        held = state_bytes(config, program.model.arch, program.layout.shape)
        parts = [
            ("parameters", held.parameters),
            ("gradients", held.gradients),
            ("masters", held.master),
            ("optimizer", held.optimizer),
        ]
        rows.append((f"ZeRO-{zero}" + (" (this)" if zero == program.config.zero else ""), parts))
    return bars(rows, *_unit(max(sum(size for _, size in parts) for _, parts in rows)))


def slices(program: Program | None) -> dict[str, str]:
    """Weight -> drawing of its slices, parameters as they are stored; devices are numbered as in the mesh."""
    if program is None:
        return {}
    number = {device: index for index, device in enumerate(program.layout.mesh.devices.flat)}
    weights = jax.tree_util.tree_leaves_with_path(program.model.weights, is_leaf=lambda x: hasattr(x, "axes"))
    drawn = {}
    for (path, row), sharding in zip(weights, jax.tree.leaves(program.layout.parameters), strict=True):
        holders: dict[Piece, list[int]] = {}
        for device, index in sharding.devices_indices_map(row.shape).items():
            piece = tuple(cut.indices(dim)[:2] for cut, dim in zip(index, row.shape, strict=True))
            holders.setdefault(piece, []).append(number[device])
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        drawn[name] = slices_picture(row.shape, [axis or "dim" for axis in row.axes], holders)
    return drawn


def _weights(program: Program) -> str:
    drawn = slices(program)
    weights = jax.tree.leaves(program.model.weights, is_leaf=lambda x: hasattr(x, "axes"))
    cards = []
    for (name, svg), row, sharding in zip(
        drawn.items(), weights, jax.tree.leaves(program.layout.parameters), strict=True
    ):
        cuts = zip(row.axes, sharding.spec, strict=False)
        over = ", ".join(
            f"{dim} over {axes_text([axis] if isinstance(axis, str) else axis)}" for dim, axis in cuts if axis
        )
        caption = f"<b>{html.escape(name)}</b><br>{html.escape(over or 'whole on every device')}"
        cards.append(f"<figure>{svg}<figcaption>{caption}</figcaption></figure>")
    return (
        "<p>Parameters as they are stored; numbers are devices, as in the mesh above.</p>"
        f'<div class="cards">{"".join(cards)}</div>'
    )


def _long(svg: str) -> str:
    """A drawing that scrolls, and says so, where a phone is narrower than its texts allow."""
    wide = int(re.search(r"--least:(\d+)px", svg)[1]) > PHONE  # type: ignore[index]
    hint = '<p class="swipe">Swipe the picture sideways \u2192</p>' if wide else ""
    return f'{hint}<div class="long">{svg}</div>'


def _table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = (), keys: Sequence[int] = ()
) -> str:
    """A table; on a phone a card for each row: its first cell, then those of the columns `keys`, then the others."""
    css = [" ".join(["n"] * (i in numbers) + ["key"] * (i in keys)) for i in range(len(heads))]
    head = "".join(f'<th class="{kind}">{html.escape(name)}</th>' for kind, name in zip(css, heads, strict=True))
    names = [html.escape(name) for name in (heads[0] if heads[0] == "plan" else "", *heads[1:])]
    empty = lambda text: " no" if text == "-" else ""
    cell = lambda i, text: f'<td class="{css[i]}{empty(text)}" data-name="{names[i]}">{html.escape(text)}</td>'
    body = "".join(f"<tr>{''.join(cell(i, text) for i, text in enumerate(row))}</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _unit(most: float) -> tuple[str, float]:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if most >= size:
            return unit, size
    return "B", 1
