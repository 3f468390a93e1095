"""Explanations on the console."""

from collections.abc import Sequence
from dataclasses import replace

from jaxshard.analysis.compare import Difference
from jaxshard.analysis.explanation import Explanation, listed
from jaxshard.analysis.ledger import Row, bytes_by_axis
from jaxshard.analysis.lock import Differences
from jaxshard.analysis.own_arrays import Undonated
from jaxshard.console import Console
from jaxshard.parallel.axes import axes_text, in_short
from jaxshard.training.describe import size_text
from jaxshard.xla.compile import SpmdWarning
from jaxshard.xla.pool import MOST, setting

WIDE = 120
"""Columns that a terminal needs to show each figure in a column of its own."""

LISTED = 10
"""Arrays that are named one by one; the rest is counted."""


def show(found: Explanation, console: Console) -> None:
    """Prints everything that was found, the judgement last."""
    zero = "" if found.zero is None else f", ZeRO-{found.zero}"
    console.line(f"{found.target}, mesh {found.mesh}{zero}, compiled by {found.compiler}")
    _show_ledger(found, console)
    _show_memory(found, console)
    _show_replicated(found, console)
    if found.undonated:
        console.line(donation(found.undonated))
    for warning in found.warnings:
        console.line(given_up(warning), style="yellow")
    _show_check(found, console)


def _show_replicated(found: Explanation, console: Console) -> None:
    what = "held in copies" if found.own else "stays whole against the rules"
    shown = found.replicated[:LISTED] if found.own else found.replicated
    for leaf in shown:
        console.line(f"{what}: {leaf.path} ({size_text(leaf.bytes)}): {leaf.why}")
    rest = found.replicated[len(shown) :]
    if rest:
        console.line(f"{what}: {len(rest)} more, {size_text(sum(leaf.bytes for leaf in rest))} in all")


def donation(found: Sequence[Undonated]) -> str:
    """What donating these arguments would save, and how."""
    names = [f"{leaf.path} (like {leaf.like})" for leaf in found[:LISTED]]
    more = f" and {len(found) - LISTED} more" if len(found) > LISTED else ""
    numbers = sorted({leaf.number for leaf in found})
    which = str(numbers[0]) if len(numbers) == 1 else f"({', '.join(map(str, numbers))})"
    size = size_text(sum(leaf.bytes for leaf in found))
    return (
        f"not donated: {', '.join(names)}{more} could lend outputs their memory, {size} a device: "
        f"jax.jit(..., donate_argnums={which}), where the caller does not use them afterwards"
    )


def _show_ledger(found: Explanation, console: Console) -> None:
    if not found.rows:
        console.line("no collectives: nothing travels between devices")
        return
    once = "step" if found.facts else "call"
    # In a function that is not known no array is beneath notice.
    hidden = "bookkeeping" if found.facts else None
    book = [row for row in found.rows if row.family == hidden]
    rows = [row for row in found.rows if row.family != hidden]
    narrow = _is_narrow(console)
    cells = [_cells(group, found.own, brief=narrow or not console.interactive) for group in _groups(rows)]
    heads = ("kind", "axes", "bytes", "calls", "reason", "source", "runs meanwhile")
    if narrow:
        heads = ("kind, axes", "bytes, calls", "reason, source, what runs meanwhile")
        cells = [_stacked(*each) for each in cells]
    title = f"Collectives of one {once} (bytes: the full logical result of a collective, on one device)"
    console.table(title, heads, cells)
    if book:
        total = sum(row.total for row in book)
        console.line(f"bookkeeping: {len(book)} collectives of {size_text(total)} in all (loss, norms, counts)")
    totals = bytes_by_axis(found.rows)
    console.table(
        "Bytes by axes",
        ("axes", f"bytes a {once}"),
        [(axes_text(name.split("+"), found.own), size_text(size)) for name, size in totals.items()],
    )


def _is_narrow(console: Console) -> bool:
    """Whether words would be broken to pieces in a table of many columns."""
    return console.interactive and console.width < WIDE


def given_up(warning: SpmdWarning) -> str:
    """What an "involuntary full rematerialization" means."""
    return (
        f"the partitioner gives up on {warning.operation or warning.op_name}: it gathers the whole array on every "
        f"device to go from sharding {warning.before} to {warning.after}; constrain the array before or after it"
    )


def too_large(found: Explanation) -> str:
    """What to do about a program that a device has no room for."""
    return (
        f"does not fit: {size_text(found.memory.peak)} are needed on a device, and {size_text(found.usable)} may be "
        "used; try --parallel.remat full, a higher --zero, more --parallel.accumulation, or the command plan"
    )


def _groups(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows of which all is equal but the instruction together, largest first.

    Those of an optimizer's arithmetic, which may be many, also where they differ in bytes, calls and line.
    """
    groups: dict[object, list[Row]] = {}
    for row in sorted(rows, key=lambda row: -row.total):
        alike = (row.kind, row.axes, row.reason, row.note, row.source.partition(":")[0])
        groups.setdefault(alike if row.family == "optimizer" else replace(row, name=""), []).append(row)
    return sorted(groups.values(), key=lambda group: -sum(row.total for row in group))


def _cells(group: Sequence[Row], own: bool, brief: bool) -> tuple[str, ...]:
    """One line of the ledger; brief where lines are short, or in a pipe, where no cell is folded."""
    row = group[0]
    size = " to ".join(dict.fromkeys(size_text(bound([row.bytes for row in group])) for bound in (min, max)))
    count = sum(row.count for row in group)
    vague = f"up to {count}" if "only when taken" in row.note else f"{count} or more"
    calls = str(count) if all(row.exact for row in group) else vague
    meanwhile = row.overlap or "nothing" if row.is_async else "-"
    reason = f"{row.reason}; {row.note}" if row.note else row.reason
    axes = axes_text(row.axes, own)
    if len(group) > 1 and row.family == "optimizer":
        return row.kind, axes, size, calls, reason, row.source.partition(":")[0], "each its own (--json)"
    weights = _first_weights(row.parameters) if brief else listed(row.parameters)
    source = f"{weights} ({row.source})" if weights and row.source else weights or row.source
    return row.kind, axes, size, calls, reason, source, meanwhile


def _stacked(kind: str, axes: str, size: str, calls: str, reason: str, source: str, meanwhile: str) -> tuple[str, ...]:
    """A line of the ledger for a narrow terminal."""
    more = [source] * bool(source) + [f"meanwhile: {meanwhile}"] * (meanwhile != "-")
    size = size.replace(" to ", "\nto ")
    return f"{kind}\n{axes}", f"{size}\nx {calls}", "\n".join([reason, *more])


def _first_weights(names: Sequence[str], width: int = 60) -> str:
    """As many names of weights as fit, and how many are left: "a, b … and 4 more"."""
    fits = max([n for n in range(1, len(names) + 1) if len(", ".join(names[:n])) <= width], default=1)
    more = f" … and {len(names) - fits} more" if len(names) > fits else ""
    return ", ".join(names[:fits]) + more


def _show_memory(found: Explanation, console: Console) -> None:
    memory = found.memory
    console.table(
        "Memory of one device",
        ("arguments", "outputs", "in place", "temporaries", "peak", "host"),
        [
            tuple(
                size_text(size)
                for size in (
                    memory.arguments,
                    memory.outputs,
                    memory.aliased,
                    memory.temporaries,
                    memory.peak,
                    memory.host,
                )
            )
        ],
    )
    if not found.fits:
        console.line(too_large(found), style="red")
    elif asked := setting(found.platform, round(found.usable / MOST), memory.peak):
        console.line(f"This is more than jax takes of a GPU by itself: run it with {asked.strip()}")
    if found.buffers:
        console.table("Largest temporaries when memory is fullest", *buffer_table(found, _is_narrow(console)))


def buffer_table(found: Explanation, narrow: bool) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns and cells; without advice where none is known."""
    if narrow:
        shrunk = lambda advice: [f"shrunk by {advice}"] * bool(advice)
        cells = [
            (f"{b.shape}\n{size_text(b.bytes)}", "\n".join([b.what or "-", *shrunk(b.advice), b.source]).rstrip("\n"))
            for b in found.buffers
        ]
        return ("shape, bytes", "what, source"), cells
    rows = [(b.shape, size_text(b.bytes), b.what or "-", b.advice, b.source) for b in found.buffers]
    if found.facts:
        return ("shape", "bytes", "what", "shrunk by", "source"), rows
    return ("shape", "bytes", "what", "source"), [(*row[:3], row[4]) for row in rows]


def _show_check(found: Explanation, console: Console) -> None:
    if found.check is None:
        console.line(f"not compared with expectations: {found.not_compared}")
        return
    compared = found.check
    total = sum(row.total for row in compared.expected)
    console.line(f"expected in closed form: {size_text(total)} a step in {len(compared.expected)} kinds")
    for text in compared.rewrites:
        console.line(f"known: {text}")
    for text in compared.unpredicted:
        console.line(f"not predicted: {text}", style="yellow")
    for item in compared.missing:
        console.line(f"missing: {_difference(item)}", style="yellow")
    for item in compared.unexpected:
        console.line(f"unexpected: {_difference(item)}", style="red" if compared.failures else "yellow")
    for sentence in compared.undone:
        console.line(sentence, style="red")
    unexpected = size_text(sum(item.bytes for item in compared.unexpected))
    if not compared.missing and not compared.unexpected and not compared.undone:
        rest = " in all that is predicted" if compared.unpredicted else ""
        console.line(f"found = expected: nothing missing, nothing unexpected{rest}", style="green")
    elif compared.failures:
        console.line(f"unexpected in all: {unexpected}, above {size_text(compared.threshold)}", style="red")
    else:
        limit = size_text(compared.threshold)
        console.line(f"no unexpected traffic above {limit} (in all: {unexpected})", style="green")


def _difference(item: Difference) -> str:
    source = f", {item.source}" if item.source else ""
    return f"{size_text(item.bytes)} over {axes_text(item.axes)}: {item.reason}{source}"


def show_differences(files: Sequence[str], found: Differences, console: Console) -> None:
    """Prints what differs between two explanations."""
    if not found.all:
        console.line(f"{files[0]} and {files[1]}: no difference")
        return
    if found.about:
        console.table("What is compared", ("what", *files), found.about)
    for title, rows in (("Figures that differ", found.figures), ("Bytes a step that differ, by reason", found.reasons)):
        if rows:
            cells = [(in_short(name, found.own), f"{a:,.0f}", f"{b:,.0f}", _change(a, b)) for name, a, b in rows]
            console.table(title, ("what", *files, "change"), cells)


def _change(before: float, after: float) -> str:
    return f"{100 * (after / before - 1):+.1f} %" if before else "new"
