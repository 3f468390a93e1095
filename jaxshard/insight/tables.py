"""Explanations on the console."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxshard.console import Console
from jaxshard.insight.ledger import Row, bytes_by_axis
from jaxshard.parallel.mesh import SHORT
from jaxshard.training.describe import size_text

if TYPE_CHECKING:
    from jaxshard.insight.check import Difference
    from jaxshard.insight.compile import SpmdWarning
    from jaxshard.insight.explain import Explanation


def axes_text(axes: Sequence[str]) -> str:
    """ "dp+tp" as --mesh names them, or "-"."""
    return "+".join(SHORT.get(axis, axis) for axis in axes) or "-"


def show(found: "Explanation", console: Console) -> None:
    """Prints everything that was found, the judgement last."""
    zero = "" if found.zero is None else f", ZeRO-{found.zero}"
    console.line(f"{found.target}, mesh {found.mesh}{zero}, compiled by {found.compiler}")
    book = [row for row in found.rows if row.family == "bookkeeping"]
    rows = [row for row in found.rows if row.family != "bookkeeping"]
    console.table(
        "Collectives of one step (bytes: the full logical result of one call, on one device)",
        ("kind", "axes", "bytes", "calls", "reason", "source", "runs meanwhile"),
        [_cells(row, brief=not console.interactive) for row in sorted(rows, key=lambda row: -row.total)],
    )
    if book:
        total = sum(row.total for row in book)
        console.line(f"bookkeeping: {len(book)} collectives of {size_text(total)} in all (loss, norms, counts)")
    totals = bytes_by_axis(found.rows)
    console.table(
        "Bytes by axes",
        ("axes", "bytes a step"),
        [(axes_text(name.split("+")), size_text(size)) for name, size in totals.items()],
    )
    _show_memory(found, console)
    for leaf in found.replicated:
        console.line(f"stays whole against the rules: {leaf.path} ({size_text(leaf.bytes)}): {leaf.why}")
    for warning in found.warnings:
        console.line(given_up(warning), style="yellow")
    _show_check(found, console)


def given_up(warning: "SpmdWarning") -> str:
    """What an "involuntary full rematerialization" means."""
    return (
        f"the partitioner gives up on {warning.operation or warning.op_name}: it gathers the whole array on every "
        f"device to go from sharding {warning.before} to {warning.after}; constrain the array before or after it"
    )


def too_large(found: "Explanation") -> str:
    """What to do about a program that a device has no room for."""
    return (
        f"does not fit: {size_text(found.memory.peak)} are needed on a device, and {size_text(found.usable)} may be "
        "used; try --train.remat full, a higher --zero, more --train.accumulation, or the command plan"
    )


def _cells(row: Row, brief: bool) -> tuple[str, ...]:
    """One line of the ledger; brief in a pipe, where no cell is folded."""
    bound = f"up to {row.count}" if "only when taken" in row.note else f"{row.count} or more"
    calls = str(row.count) if row.exact else bound
    meanwhile = row.overlap or "nothing" if row.is_async else "-"
    reason = f"{row.reason}; {row.note}" if row.note else row.reason
    weights = _first_weights(row.parameters) if brief else row.parameters
    source = f"{weights} ({row.source})" if weights and row.source else weights or row.source
    return row.kind, axes_text(row.axes), size_text(row.bytes), calls, reason, source, meanwhile


def _first_weights(names: str, width: int = 60) -> str:
    """As many names of weights as fit, and how many are left: "a or b, c and 2 more" -> "a … and 4 more"."""
    listed, _, rest = names.partition(" and ")
    each = re.split(", | or ", listed)
    more = len(each) + int(rest.split()[0] if rest else 0)
    fits = max([n for n in range(1, len(each) + 1) if len(", ".join(each[:n])) <= width], default=1)
    return names if len(names) <= width else f"{', '.join(each[:fits])} … and {more - fits} more"


def _show_memory(found: "Explanation", console: Console) -> None:
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
    if found.buffers:
        console.table(
            "Largest temporaries when memory is fullest",
            ("shape", "bytes", "what", "shrunk by", "source"),
            [(b.shape, size_text(b.bytes), b.what, b.advice, b.source) for b in found.buffers],
        )


def _show_check(found: "Explanation", console: Console) -> None:
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
        matters = item.bytes > compared.threshold
        console.line(f"unexpected: {_difference(item)}", style="red" if matters else "yellow")
    if not compared.missing and not compared.unexpected:
        rest = " in all that is predicted" if compared.unpredicted else ""
        console.line(f"found = expected: nothing missing, nothing unexpected{rest}", style="green")
    elif not compared.failures:
        console.line(f"no unexpected traffic above {size_text(compared.threshold)}", style="green")


def _difference(item: "Difference") -> str:
    source = f", {item.source}" if item.source else ""
    return f"{size_text(item.bytes)} over {axes_text(item.axes)}: {item.reason}{source}"


def show_differences(
    files: Sequence[str],
    figures: list[tuple[str, float, float]],
    reasons: list[tuple[str, int, int]],
    console: Console,
) -> None:
    """Prints what differs between two explanations."""
    if not figures and not reasons:
        console.line(f"{files[0]} and {files[1]}: no difference")
        return
    for title, rows in (("Figures that differ", figures), ("Bytes a step that differ, by reason", reasons)):
        if rows:
            cells = [(name, f"{a:,.0f}", f"{b:,.0f}", _change(a, b)) for name, a, b in rows]
            console.table(title, ("what", files[0], files[1], "change"), cells)


def _change(before: float, after: float) -> str:
    return f"{100 * (after / before - 1):+.1f} %" if before else "new"
