"""An explanation as one HTML page: no network, no scripts, readable on a phone."""

import html
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import jax
from jax.sharding import PartitionSpec

from jaxshard.errors import InputError
from jaxshard.insight.ledger import Row, bytes_by_axis
from jaxshard.insight.pictures import bars, mesh_picture, slices_picture
from jaxshard.insight.state_bytes import state_bytes
from jaxshard.insight.tables import axes_text
from jaxshard.parallel.mesh import AXES, SHORT
from jaxshard.training.describe import size_text
from jaxshard.training.program import Program

if TYPE_CHECKING:
    from jaxshard.insight.explain import Explanation

_STYLE = """
:root{color-scheme:light dark}
body{font:16px/1.5 system-ui,sans-serif;margin:0 auto;max-width:72rem;padding:1rem}
h1{font-size:1.5rem}h2{font-size:1.2rem;margin-top:2rem;border-bottom:1px solid #8886}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:.85rem}
th,td{text-align:left;padding:.3rem .6rem;border-bottom:1px solid #8884;vertical-align:top}
td.n{text-align:right;white-space:nowrap}svg{width:100%;height:auto;font-family:system-ui,sans-serif}
.good{color:#2a8a3e;font-weight:600}.bad{color:#c6362c;font-weight:600}
.cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(17rem,1fr));gap:1rem}
.cards figure{margin:0;border:1px solid #8884;border-radius:.5rem;padding:.5rem}
figcaption{font-size:.8rem;overflow-wrap:anywhere}
"""


def write_report(found: "Explanation", file: Path) -> None:
    """Writes the page.

    Raises:
        InputError: the file cannot be written.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(page(found), encoding="utf-8")
    except OSError as error:
        raise InputError(f"--report {file}: cannot be written ({error.strerror}); name another file") from None


def page(found: "Explanation") -> str:
    """The page as text."""
    zero = "" if found.zero is None else f", ZeRO-{found.zero}"
    title = f"{found.target}, mesh {found.mesh}{zero}"
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style><h1>{html.escape(title)}</h1>"
        f"<p>Compiled by {html.escape(found.compiler)}, jax {jax.__version__}.</p>{''.join(_sections(found))}</html>\n"
    )


def _sections(found: "Explanation") -> Iterator[str]:
    yield _section("Verdict", _verdict(found))
    program = found.program
    if program is not None:
        yield _section("Mesh", mesh_picture(dict(zip(AXES, program.layout.shape.sizes, strict=True))))
    yield _section("What travels, and why", _ledger(found.rows))
    totals = sorted(bytes_by_axis(found.rows).items(), key=lambda item: -item[1])
    rows = [(axes_text(name.split("+")), [("bytes a step", size)]) for name, size in totals]
    yield _section("Bytes a step by axes", bars(rows, *_unit(max((size for _, size in totals), default=1))))
    yield _section("Memory of one device", _memory(found))
    if program is not None:
        yield _section("Memory of the state under ZeRO 0 to 3", _zero_bars(program))
        yield _section("Which device holds which slice", _weights(program))


def _section(title: str, body: str) -> str:
    return f"<h2>{html.escape(title)}</h2>{body}"


def _verdict(found: "Explanation") -> str:
    compared = found.check
    if compared is None:
        return f"<p>Not compared: {html.escape(found.not_compared)}.</p>"
    items = [("known", text, "") for text in (*compared.rewrites, *compared.unpredicted)]
    for word, differences in (("missing", compared.missing), ("unexpected", compared.unexpected)):
        items += [
            (word, f"{size_text(d.bytes)} over {axes_text(d.axes)}: {d.reason} {d.source}", "bad") for d in differences
        ]
    if not compared.missing and not compared.unexpected:
        text = "Found = expected: nothing missing, nothing unexpected."
    elif found.ok:
        text = "No unexpected traffic that matters."
    else:
        text = "There is traffic that no rule asks for."
    lines = "".join(f'<li><span class="{css}">{word}</span>: {html.escape(words)}</li>' for word, words, css in items)
    expected = [(e.reason, e.kind, axes_text(e.axes), size_text(e.bytes), f"{e.count:,}") for e in compared.expected]
    table = _table(("expected", "kind", "axes", "bytes", "calls"), expected, numbers=(3, 4))
    details = f"<details><summary>Expected, in closed form</summary>{table}</details>"
    return f'<p class="{"good" if found.ok else "bad"}">{text}</p><ul>{lines}</ul>{details}'


def _ledger(rows: Sequence[Row]) -> str:
    cells = [
        (
            row.reason + (f" ({row.note})" if row.note else ""),
            row.kind,
            axes_text(row.axes),
            size_text(row.bytes),
            f"{row.count:,}",
            size_text(row.total),
            (row.overlap or "nothing") if row.is_async else "",
            f"{row.parameters} {row.source}".strip(),
        )
        for row in sorted(rows, key=lambda row: -row.total)
    ]
    heads = ("reason", "kind", "axes", "bytes", "calls", "a step", "runs meanwhile", "source")
    return _table(heads, cells, numbers=(3, 4, 5))


def _memory(found: "Explanation") -> str:
    memory = found.memory
    parts = [
        ("arguments", memory.arguments),
        ("outputs", max(0, memory.outputs - memory.aliased)),
        ("temporaries", memory.temporaries),
    ]
    drawn = bars([("device", parts), ("host", [("host", memory.host)])], *_unit(memory.peak))
    cells = [(b.shape, size_text(b.bytes), b.what, b.advice, b.source) for b in found.buffers]
    heads = ("largest temporaries", "bytes", "what", "shrunk by", "source")
    whole = [(leaf.path, size_text(leaf.bytes), leaf.why) for leaf in found.replicated]
    replicated = _table(("whole against the rules", "bytes", "why"), whole, numbers=(1,)) if whole else ""
    return drawn + (_table(heads, cells, numbers=(1,)) if cells else "") + replicated


def _zero_bars(program: Program) -> str:
    """As figure 1 of the ZeRO paper (Rajbhandari et al. 2020), for this model and mesh."""
    rows = []
    for zero in range(4):
        config = replace(program.config, zero=zero)
        held = state_bytes(config, program.model.arch, program.layout.shape)
        parts = [
            ("parameters", held.parameters),
            ("gradients", held.gradients),
            ("masters", held.master),
            ("optimizer", held.optimizer),
        ]
        rows.append((f"ZeRO-{zero}" + (" (this)" if zero == program.config.zero else ""), parts))
    return bars(rows, *_unit(max(sum(size for _, size in parts) for _, parts in rows)))


def _weights(program: Program) -> str:
    rows = jax.tree_util.tree_leaves_with_path(program.model.weights, is_leaf=lambda x: hasattr(x, "axes"))
    specs = jax.tree.leaves(program.layout.specs, is_leaf=lambda x: hasattr(x, "optimizer"))
    cards = []
    for (path, row), spec in zip(rows, specs, strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        names = [axis or "dim" for axis in row.axes]
        cuts = _cuts(spec.parameters, len(row.shape), program)
        ways = math.prod(size for cut in cuts for _, size in cut)
        words = f"{name}: {' x '.join(f'{dim:,}' for dim in row.shape)}, in {ways} slice{'s' if ways > 1 else ''}"
        picture = slices_picture(row.shape, names, cuts)
        cards.append(f"<figure>{picture}<figcaption>{html.escape(words)}</figcaption></figure>")
    return f'<p>Parameters as they are stored.</p><div class="cards">{"".join(cards)}</div>'


def _cuts(spec: PartitionSpec, dims: int, program: Program) -> list[list[tuple[str, int]]]:
    entries = [*spec, *[None] * (dims - len(spec))]
    groups = [() if entry is None else (entry,) if isinstance(entry, str) else tuple(entry) for entry in entries]
    return [[(SHORT[axis], getattr(program.layout.shape, axis)) for axis in axes] for axes in groups]


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in heads)
    cell = lambda index, text: f"<td{' class=n' if index in numbers else ''}>{html.escape(text)}</td>"
    body = "".join(f"<tr>{''.join(cell(i, text) for i, text in enumerate(row))}</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _unit(most: float) -> tuple[str, float]:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if most >= size:
            return unit, size
    return "B", 1
