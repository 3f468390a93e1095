"""What the program says: tables, lines and a live progress bar on a terminal; plain lines in a pipe. Free of jax."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from rich import box
from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Column, Table
from rich.text import Text

_BARS = "▁▂▃▄▅▆▇█"
_CONTROLS = {code: "\ufffd" for code in (*range(32), 127) if chr(code) not in "\t\n"}
_RATES = {"tokens_per_second": "tokens/s"}
_UNITS = {"mfu": "%"}


class Console:
    """Writes to one stream, pleasantly when it is a terminal. Warnings go to stderr when it is not.

    `file` is stdout by default; the command line gives stderr instead when stdout is kept for JSON.
    """

    def __init__(self, file: TextIO | None = None):
        self._file = file or sys.stdout
        self._rich = RichConsole(file=self._file, highlight=False, emoji=False)
        self._muted = False

    @property
    def interactive(self) -> bool:
        """True on a terminal."""
        return self._rich.is_terminal

    @property
    def muted(self) -> bool:
        """True after `mute`."""
        return self._muted

    def mute(self) -> None:
        """From now on says nothing: for all processes of a distributed run but the first."""
        self._muted = True

    def line(self, text: str = "", style: str = "") -> None:
        """Prints a line; `style` is a rich style such as "bold" or "green", seen on a terminal only."""
        # A model's output may hold any character: on a terminal none of them may move the cursor.
        self._print(Text(text.translate(_CONTROLS), style=style) if self.interactive else text)

    def command(self, text: str) -> None:
        """Prints a line to be copied: on a narrow terminal it goes on, without a break that would be copied too."""
        if self.interactive and not self._muted:
            self._rich.print(Text(text.translate(_CONTROLS)), soft_wrap=True)
        else:
            self._print(text)

    @property
    def width(self) -> int:
        """Columns of the terminal; 80 in a pipe."""
        return self._rich.width if self.interactive else 80

    def drawing(self, text: Text) -> None:
        """Prints what is drawn in characters, in its colours on a terminal."""
        self._print(text if self.interactive else "\n".join(line.rstrip() for line in text.plain.splitlines()))

    def heading(self, text: str) -> None:
        """Prints the title of what follows."""
        self.line()
        self.line(text, style="bold cyan")

    def warn(self, text: str) -> None:
        """Prints a warning, on stderr unless a terminal shows both."""
        if self.interactive:
            self._print(Text.assemble(("warning: ", "bold yellow"), text))
        elif not self._muted:
            print(f"warning: {text}", file=sys.stderr, flush=True)

    def has_room(self, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> bool:
        """Whether `table` would break no cell of these: in a pipe it breaks none."""
        lines = [columns, *([_cell(value) for value in row] for row in rows)]
        needed = sum(max(len(line[index]) for line in lines) + 3 for index in range(len(columns))) + 1
        return not self.interactive or needed <= self.width

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Prints a table; columns that hold nothing but numbers and their units are set flush right."""
        cells = [[_cell(value) for value in row] for row in rows]
        assert all(len(row) == len(columns) for row in cells), f"{title}: every row needs {len(columns)} cells"
        right = [bool(cells) and all(_numeric(row[index]) for row in cells) for index in range(len(columns))]
        if not self.interactive:
            self._print(_plain_table(title, columns, cells, right))
            return
        table = Table(title=Text(title), title_justify="left", title_style="bold cyan", box=box.ROUNDED)
        for column, is_right in zip(columns, right, strict=True):
            table.add_column(Text(column), justify="right" if is_right else "left", overflow="fold")
        for row in cells:
            table.add_row(*map(Text, row))
        self._print(table)

    @contextmanager
    def progress(
        self, total: int, *, start: int = 0, every: int = 10, what: str = "step"
    ) -> Iterator["LiveProgress | PlainProgress"]:
        """Shows the progress of a loop from step `start` to `total`; call `update` after each step.

        In a pipe every `every`-th step and the last one print a line.
        """
        if self._muted or not self.interactive:
            yield PlainProgress(self, total, start, every, what)
            return
        with _bar(self._rich, total) as bar:
            yield LiveProgress(bar, total, start, what)

    def _print(self, what: object) -> None:
        if self._muted:
            return
        if self.interactive:
            self._rich.print(what)
        else:  # as it is: rich would turn tabs into spaces
            print(what, file=self._file, flush=True)


class LiveProgress:
    """The bar of a terminal: step, figures, a line of the loss's history, time spent and time left."""

    def __init__(self, bar: Progress, total: int, start: int, what: str):
        self._bar, self._total, self._losses = bar, total, list[float]()
        self._clock = _Clock(total, start)
        self._task = bar.add_task(what, total=total, completed=start, figures="first step", history="", left="")

    def update(self, step: int, **figures: float | None) -> None:
        """Moves the bar to `step` (done); figures such as loss=3.2, tokens_per_second=1e5 are shown by name."""
        loss, left = figures.get("loss"), self._clock.left(step)
        self._losses += [] if loss is None else [loss]
        self._bar.update(
            self._task,
            completed=step,
            figures=figure_text(figures),
            history=sparkline(self._losses),
            left=f"{left} left" if left and step < self._total else "",
        )


class PlainProgress:
    """The same in a pipe: one line for every `every`-th step."""

    def __init__(self, console: Console, total: int, start: int, every: int, what: str):
        self._console, self._total, self._every, self._what = console, total, every, what
        self._clock = _Clock(total, start)

    def update(self, step: int, **figures: float | None) -> None:
        """Prints a line when it is time for one."""
        left = self._clock.left(step)
        if step % self._every == 0 or step == self._total:
            text = f"{self._what} {step}/{self._total}  {figure_text(figures)}"
            self._console.line(f"{text}  {left} left" if left and step < self._total else text)


class _Clock:
    """Time left, from the pace since the first update: compilation, which comes before it, does not count."""

    def __init__(self, total: int, start: int):
        self._total, self._first = total, start
        self._since: float | None = None

    def left(self, step: int) -> str:
        now = time.monotonic()
        if self._since is None:
            self._first, self._since = step, now
            return ""
        return duration((now - self._since) / max(step - self._first, 1) * max(self._total - step, 0))


def figure_text(figures: dict[str, float | None]) -> str:
    """Returns "loss 3.2101  grad_norm 0.52  12,345 tokens/s"; figures that are None are left out."""
    parts = []
    for name, value in figures.items():
        if value is None:
            continue
        if name in _RATES:
            parts.append(f"{value:,.0f} {_RATES[name]}")
        elif name in _UNITS:
            parts.append(f"{name} {100 * value:.1f}{_UNITS[name]}")
        elif name.endswith("loss"):
            parts.append(f"{name} {value:.4f}")
        else:
            parts.append(f"{name} {value:,}" if isinstance(value, int) else f"{name} {value:.3g}")
    return "  ".join(parts)


def sparkline(values: Sequence[float], width: int = 16) -> str:
    """Returns the course of the values as a row of small bars: "█▆▄▃▂▁"; values that are not finite are blanks."""
    if len(values) < 2:
        return ""
    width = min(width, len(values))
    picked = [values[(index + 1) * len(values) // width - 1] for index in range(width)]
    finite = [value for value in picked if abs(value) < float("inf")]
    if not finite:
        return " " * width
    low, high = min(finite), max(finite)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] if abs(value) < float("inf") else " " for value in picked)


def duration(seconds: float) -> str:
    """Returns "0:07", "12:34", "1:02:03" or "2 days 01:02:03"."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} day{'s' if days > 1 else ''} {hour:02}:{minute:02}:{second:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


def _bar(console: RichConsole, total: int) -> Progress:
    """Columns for the width of the terminal: on a narrow one the history goes first, and figures are cut last."""
    columns = [
        SpinnerColumn(),
        TextColumn("{task.description}"),
        MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=2 * len(str(total)) + 1)),
        BarColumn(bar_width=None, complete_style="cyan", finished_style="green"),
        TextColumn("{task.fields[figures]}", markup=False, table_column=Column(no_wrap=True)),
        TextColumn("[dim]{task.fields[left]}", table_column=Column(no_wrap=True)),
    ]
    if console.width >= 100:
        columns.insert(5, TextColumn("[cyan]{task.fields[history]}", table_column=Column(no_wrap=True)))
    return Progress(*columns, console=console, expand=True, refresh_per_second=4)


def _cell(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _numeric(cell: str) -> bool:
    """True for "1,024", "22.35 GiB", "12 %" and "-", which are set flush right."""
    number, _, unit = cell.partition(" ")
    return cell == "-" or (number.replace(",", "").replace(".", "").lstrip("-").isdigit() and len(unit) <= 4)


def _plain_table(title: str, columns: Sequence[str], rows: list[list[str]], right: list[bool]) -> str:
    lines = [list(columns), *rows]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    text = [title] if title else []
    for line in lines:
        cells = zip(line, widths, right, strict=True)
        text.append("  " + "  ".join(c.rjust(width) if r else c.ljust(width) for c, width, r in cells).rstrip())
    return "\n".join(text)
