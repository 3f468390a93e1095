"""A plan in words and tables on the console."""

from jaxshard.analysis.memory import gib
from jaxshard.analysis.roofline import seconds_text
from jaxshard.config import Config
from jaxshard.console import Console
from jaxshard.models.presets import Architecture
from jaxshard.planner.planner import Plan
from jaxshard.planner.ranking import Search

COLUMNS = (
    *("", "mesh", "zero", "remat", "acc", "microbatches", "offload", "state", "gradients", "activations", "buffers"),
    *("total", "compiled", "s/step", "compiled s", "tokens/s", "MFU"),
)

ABOUT = "~"
"""Before a speed that is only from shapes, where others in the table are of compiled schedules."""


def model_name(config: Config, arch: Architecture) -> str:
    """The preset, or family and size."""
    return config.model.preset or f"{arch.family}, {arch.parameters:,} parameters"


def title(found: Search) -> str:
    """What was searched, in one line."""
    config = found.config
    return (
        f"Plans for {model_name(config, found.arch)} on {found.target.name}: {len(found.order):,} layouts, "
        f"{config.train.global_batch} x {config.data.seq_len} tokens a step"
    )


def rows(found: Search, plans: list[Plan]) -> list[tuple[object, ...]]:
    """A row of `COLUMNS` for each plan; tokens/s and MFU are of the compiled schedule where there is one, and marked
    where there is none beside others that have one."""
    tokens = found.config.train.global_batch * found.config.data.seq_len
    mixed = bool(speed_note(plans))
    return [
        (number, *_row(plan, tokens, ABOUT if mixed and not plan.timeline else ""))
        for number, plan in enumerate(plans, 1)
    ]


def speed_note(plans: list[Plan]) -> str:
    """What the mark in the table says; empty where all speeds are of one kind."""
    if len({plan.timeline is None for plan in plans}) < 2 or not all(plan.seconds for plan in plans):
        return ""
    factors = sorted(p.expected / p.seconds for p in plans if p.expected and p.seconds and not p.timeline)
    times = f"{factors[0]:.2f}" + (f" to {factors[-1]:.2f}" if f"{factors[0]:.2f}" != f"{factors[-1]:.2f}" else "")
    return (
        f"{ABOUT} not compiled: tokens/s, MFU and place in the order from s/step times {times}, which is what layouts "
        "of the same kind took when they were compiled; of the other plans from the compiled schedule."
    )


def _row(plan: Plan, tokens: int, mark: str) -> tuple[object, ...]:
    c, memory = plan.scored.candidate, plan.scored.memory
    seconds = plan.expected
    chunks = f" x{c.virtual_stages}" if c.virtual_stages else ""
    return (
        str(c.shape) + (" sp" if c.sequence_parallel else ""),
        c.zero,
        c.remat,
        c.accumulation,
        f"{c.microbatches} {c.schedule}{chunks}" if c.microbatches else "-",
        c.offload,
        gib(memory.parameters + memory.master + memory.optimizer),
        gib(memory.gradients),
        gib(memory.activations + memory.logits),
        gib(memory.buffers),
        gib(memory.total),
        gib(plan.compiled_peak) if plan.compiled_peak else "-",
        _seconds(plan.seconds) if plan.seconds else "-",
        _seconds(plan.timeline.seconds) if plan.timeline else "-",
        f"{mark}{tokens / seconds:,.0f}" if seconds else "-",
        f"{mark}{100 * plan.mfu * plan.seconds / seconds:.0f} %" if plan.mfu and plan.seconds and seconds else "-",
    )


def _stacked(row: tuple[object, ...]) -> tuple[object, ...]:
    """A row for a narrow terminal: its figures below each other, with their names."""
    named = dict(zip(COLUMNS, map(str, row), strict=True))
    lines = lambda *names: "\n".join(f"{name} {named[name]}" for name in names if named[name] != "-")
    layout = "\n".join((named["mesh"], lines("zero", "remat", "acc", "microbatches", "offload")))
    memory = lines("total", "compiled", "state", "gradients", "activations", "buffers")
    return named[""], layout, memory, lines("s/step", "compiled s", "tokens/s", "MFU")


def _seconds(seconds: float) -> str:
    """In seconds; what is short has its unit beside it."""
    return f"{seconds:.2f}" if seconds >= 0.1 else seconds_text(seconds)


def time_lines(plans: list[Plan]) -> list[str]:
    """For each plan that was compiled: both predictions, where the time goes, and what is exposed."""
    lines = []
    for number, plan in enumerate(plans, 1):
        if plan.timeline is None or plan.seconds is None:
            continue
        found = plan.timeline
        parts = ", ".join(f"{name} {seconds_text(seconds)}" for name, seconds in found.largest(5))
        hidden = sum(found.hidden.values())
        again = found.again > 0.01 * found.seconds
        lines.append(
            f"{number}: {seconds_text(plan.seconds)} from shapes, {seconds_text(found.seconds)} from the compiled "
            f"schedule: {parts}. Collectives: {seconds_text(found.exposed)} exposed, {seconds_text(hidden)} hidden."
            + (f" {seconds_text(found.again)} recompute what the compiler found no memory to keep." if again else "")
        )
    return lines


def show(console: Console, found: Search, plans: list[Plan], notes: list[str]) -> None:
    """Prints the table, the reasons of the first plan, notes, and its command."""
    columns, cells = COLUMNS, rows(found, plans)
    if not console.has_room(columns, cells):
        columns, cells = ("", "layout", "memory", "time"), [_stacked(row) for row in cells]
    console.table(title(found), columns, cells)
    if note := speed_note(plans):
        console.line(note)
    console.heading("Why the first")
    for reason in plans[0].reasons:
        console.line(f"- {reason}")
    lines = time_lines(plans)
    if lines:
        console.heading("Where the time of the compiled plans goes")
    for line in lines:
        console.line(f"- {line}")
    for note in notes:
        console.line(note)
    console.heading("Run it")
    console.command(plans[0].command)
