"""`explain --schedule`: the pipeline in the terminal and as PNG, its bubble counted and by formula."""

import io
import json
from fractions import Fraction

import pytest
import rich.console

from jaxshard.commands import cli
from jaxshard.commands.explain_schedule import facts, sentences
from jaxshard.console import Console
from jaxshard.parallel.schedule import make
from jaxshard.views.schedule_draw import draw_text


def run(capsys, line: str) -> tuple[int, str, str]:
    code = cli.run(["explain", "--schedule", *line.split()])
    return code, *capsys.readouterr()


def test_the_terminal_shows_the_table_of_the_run(capsys):
    options = "--mesh pp=2,dp=2 --model.n_layers 4 --parallel.virtual_stages 2 --parallel.microbatches 4"
    code, out, _ = run(capsys, options)
    assert code == 0
    rows = [line.split(" F ")[1].split() for line in out.splitlines() if line.startswith("stage")]
    units = ["0a", "1a", "0b", "1b", "2a", "3a", "2b", "3b"]
    assert rows == [[*units, "."], [".", *units]]
    assert "letters a to b are a stage's 2 chunks" in out
    assert "counted from the table: 4 of 36 halves are idle, 11.1%" in out
    assert "by formula: (S-1)/(V*M+S-1) = 1/9, 11.1%" in out
    assert "12 ticks, and the formula's denominator is 9" in out


def test_the_default_schedule_and_microbatches_are_those_of_training(capsys):
    code, out, _ = run(capsys, "--mesh pp=4 --model.n_layers 4 --json")
    result = json.loads(out)
    assert code == 0 and (result["schedule"], result["stages"], result["microbatches"]) == ("1f1b", 4, 8)
    assert result["bubble_counted"] == pytest.approx(3 / 11) == pytest.approx(result["bubble_formula"])


@pytest.mark.parametrize(("name", "V"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4)])
def test_the_sentences_count_and_compute_the_same_fraction(name, V):
    for S, M in [(2, 2), (4, 8), (4, 9), (4, 2), (3, 1)]:
        table = make(name, S, M, V)
        counted, formula = sentences(table)[1:3]
        idle, halves = (int(word) for word in counted.split(": ")[1].split() if word.isdigit())
        assert idle == halves - table.fwd_live.sum() - table.bwd_live.sum()
        fraction = formula.split(" = ")[1].split()[0].rstrip(",")
        assert Fraction(idle, halves) == Fraction(fraction), (S, M)
        assert facts(table)["bubble_counted"] == pytest.approx(float(Fraction(fraction)))


def test_colours_tell_forward_backward_and_bubble_apart():
    console = Console(file := io.StringIO())
    console._rich = rich.console.Console(file=file, force_terminal=True, color_system="standard", width=80)
    console.drawing(draw_text(make("1f1b", 2, 2), console.width))
    blue, green, red = "\x1b[37;44m 0", "\x1b[30;42m 0", "\x1b[31m ."
    assert all(code in file.getvalue() for code in (blue, green, red))


def test_the_picture_is_written(capsys, tmp_path):
    code, out, _ = run(capsys, f"--mesh pp=2 --parallel.microbatches 4 --png {tmp_path / 'pictures'}")
    file = tmp_path / "pictures" / "pipeline.png"
    assert code == 0 and file.read_bytes().startswith(b"\x89PNG") and str(file) in out


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--mesh dp=4", "mesh dp=4 has no pipeline to draw; split the layers over stages with --mesh pp=2,dp=2"),
        ("--mesh pp=2 --lock a.json", "--schedule compiles nothing, and so --lock beside it has no meaning"),
        ("--mesh pp=2 --report a.html", "--schedule compiles nothing, and so --report"),
        ("--mesh pp=3 --model.n_layers 4", "4 layers on 3 stages"),
        ("--mesh pp=2,dp=2 --parallel.microbatches 3", "parallel.microbatches = 3 does not divide"),
        ("--mesh pp=2 --png /proc/none", "cannot be written"),
        ("--mesh pp=2,dp=2 --target h100:8", "target h100:8 has 8: try --target h100:4 or --mesh pp=2,dp=4"),
    ],
)
def test_bad_input_is_one_line(capsys, line, said):
    code, _, error = run(capsys, line)
    assert code == 2 and said in error and error.count("\n") == 1


def test_a_target_gives_the_devices_of_an_open_axis(capsys):
    code, out, _ = run(capsys, "--mesh pp=4,dp=-1 --model.n_layers 4 --target h100:16 --json")
    assert code == 0 and json.loads(out)["microbatches"] == 8
