"""What a user sees: on a terminal, and in a pipe."""

import io
import math
from types import SimpleNamespace

import pytest

from jaxshard import console as module
from jaxshard.console import Console, duration, figure_text, sparkline


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def pipe():
    return io.StringIO()


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Terminal()


def test_a_table_in_a_pipe_is_plain_and_never_cut(pipe):
    Console(pipe).table("Weights [x]", ["path", "bytes"], [["a/[b]", 12345], ["x" * 300, 7], ["none", None]])
    lines = pipe.getvalue().splitlines()
    assert lines[0] == "Weights [x]" and lines[2].startswith("  a/[b] ") and lines[2].endswith(" 12,345")
    assert "x" * 300 in lines[3] and lines[4].endswith(" -")
    assert len({len(line) for line in lines[1:]}) == 1, "numbers are flush right"
    assert pipe.getvalue().isascii()


def test_a_table_on_a_terminal_is_framed(terminal):
    Console(terminal).table("Weights", ["path", "bytes"], [["a/[b]", 12345]])
    text = terminal.getvalue()
    assert "╭" in text and "a/[b]" in text and "12,345" in text and "\x1b[" in text


def test_a_command_is_copied_as_one_line(pipe, terminal):
    command = "python run.py " + "--an.option value " * 20
    for stream in (pipe, terminal):
        Console(stream).command(command)
        assert command in stream.getvalue()


@pytest.mark.parametrize("columns, fits", [("23", True), ("22", False)])
def test_a_table_has_room_or_breaks_cells(columns, fits, terminal, pipe, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    heads, row = ["path", "n"], ["ab cd efgh", 12_345]
    assert Console(terminal).has_room(heads, [row]) == fits and Console(pipe).has_room(heads, [row])
    Console(terminal).table("", heads, [row])
    assert ("ab cd efgh" in terminal.getvalue() and "12,345" in terminal.getvalue()) == fits


def test_a_row_too_short_is_a_mistake_of_the_programmer(pipe):
    with pytest.raises(AssertionError, match="every row needs 2 cells"):
        Console(pipe).table("T", ["a", "b"], [[1]])


def test_lines_are_taken_literally(pipe, terminal):
    for stream in (pipe, terminal):
        Console(stream).line("[bold]x[/bold] [1, 2] :smile:", style="green")
        assert "[bold]x[/bold] [1, 2] :smile:" in stream.getvalue()
    assert pipe.getvalue() == "[bold]x[/bold] [1, 2] :smile:\n"


def test_what_a_model_writes_stays_as_it_is_in_a_pipe_and_harmless_on_a_terminal(pipe, terminal):
    for stream in (pipe, terminal):
        Console(stream).line("a\tb\r\x1b[2Jc\x07")
    assert pipe.getvalue() == "a\tb\r\x1b[2Jc\x07\n"
    assert "\x1b[2J" not in terminal.getvalue() and "\ufffd[2Jc" in terminal.getvalue()


def test_warnings_go_to_stderr_in_a_pipe_and_to_the_terminal_otherwise(pipe, terminal, capsys):
    Console(pipe).warn("low")
    assert pipe.getvalue() == "" and capsys.readouterr().err == "warning: low\n"
    Console(terminal).warn("low")
    assert "low" in terminal.getvalue() and capsys.readouterr().err == ""


def test_progress_in_a_pipe_prints_every_nth_step_and_the_last(pipe, monkeypatch):
    times = iter(range(0, 1000, 2))
    # The console's own clock alone: other threads, of other tests' libraries, ask for the time too.
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(times)))
    with Console(pipe).progress(25, start=2, every=10) as bar:
        for step in range(3, 26):
            bar.update(step, loss=step / 10, tokens_per_second=1234.5, mfu=None)
    assert pipe.getvalue().splitlines() == [
        "step 10/25  loss 1.0000  1,234 tokens/s  0:30 left",
        "step 20/25  loss 2.0000  1,234 tokens/s  0:10 left",
        "step 25/25  loss 2.5000  1,234 tokens/s",
    ]


def test_progress_on_a_terminal_is_a_bar_with_figures(terminal):
    with Console(terminal).progress(4) as bar:
        for step in range(1, 5):
            bar.update(step, loss=5.0 - step, tokens_per_second=1234.5)
    text = terminal.getvalue()
    assert "first step" in text, "shown until the first step is done"
    assert "loss 1.0000" in text and "1,234 tokens/s" in text and "4/4" in text and "━" in text and "█▆▃▁" in text


def test_lines_during_progress_stay_above_the_bar(terminal):
    console = Console(terminal)
    with console.progress(2) as bar:
        bar.update(1, loss=1.0)
        console.line("evaluated")
        console.warn("careful")
        bar.update(2, loss=1.0)
    text = terminal.getvalue()
    assert text.index("evaluated") < text.rindex("2/2") and text.index("careful") < text.rindex("2/2")


def test_a_muted_console_says_nothing(pipe, terminal, capsys):
    for stream in (pipe, terminal):
        console = Console(stream)
        console.mute()
        console.line("x")
        console.command("x")
        console.warn("x")
        console.heading("x")
        console.table("T", ["a"], [[1]])
        with console.progress(1, every=1) as bar:
            bar.update(1, loss=1.0)
        assert stream.getvalue() == ""
    assert capsys.readouterr() == ("", "")


def test_figures():
    assert figure_text({"loss": 3.21012, "grad_norm": 0.5234, "lr": 3e-4}) == "loss 3.2101  grad_norm 0.523  lr 0.0003"
    assert (
        figure_text({"eval_loss": 1.0, "mfu": 0.4321, "skipped": 12345})
        == "eval_loss 1.0000  mfu 43.2%  skipped 12,345"
    )
    assert figure_text({"loss": math.nan, "mfu": None}) == "loss nan"


def test_sparkline():
    assert sparkline([]) == sparkline([1.0]) == ""
    assert sparkline([3, 2, 1]) == "█▅▁" or sparkline([3, 2, 1]) == "█▄▁"
    assert (
        sparkline([1, 1]) == "▁▁"
        and sparkline([math.nan, 1, math.inf, 2]) == " ▁ █"
        and sparkline([math.nan] * 2) == "  "
    )
    line = sparkline(list(range(100, 0, -1)))
    assert len(line) == 16 and line[0] == "█" and line[-1] == "▁" and sorted(line, reverse=True) == list(line)


@pytest.mark.parametrize(
    "seconds, text", [(0.2, "0:00"), (7, "0:07"), (754, "12:34"), (3723, "1:02:03"), (90061, "1 day 01:01:01")]
)
def test_duration(seconds, text):
    assert duration(seconds) == text
