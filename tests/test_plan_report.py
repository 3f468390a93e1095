"""`plan --report`: the page and its pictures."""

import re
from types import SimpleNamespace

import pytest

from jaxshard.analysis.timeline import Block, Span, Timeline
from jaxshard.commands import cli
from jaxshard.planner import confirm, exploration, planner
from jaxshard.views.plan_report import _called, _undominated, timeline_picture

GIB = 2**30
LLAMA = ("--model.preset", "llama3-8b", "--train.global_batch", "64", "--data.seq_len", "8192", "--target", "h100:8")

LOOP = Block(
    *("while.1", "loop of the <forward> pass", 32, 0.01),
    (Span("computation", "matmul", 0.0, 0.008), Span("network", "collectives over dp", 0.002, 0.01)),
)
STEP = Block(
    "step", "step", 1, 0.4, (Span("computation", "while.1", 0.0, 0.32), Span("computation", "memory", 0.32, 0.4))
)
FOUND = Timeline({"matmuls": 0.3, "collectives over dp": 0.1}, {"collectives over dp": 0.05}, (STEP, LOOP))


@pytest.fixture
def compiled(monkeypatch):
    """A compiler that takes every plan, with a timeline."""
    memory = SimpleNamespace(peak=60 * GIB)
    monkeypatch.setattr(planner, "compiler_missing", lambda target: None)
    monkeypatch.setattr(exploration, "TRIES", 1)
    monkeypatch.setattr(confirm, "compile_step", lambda *args: SimpleNamespace(result=SimpleNamespace(memory=memory)))
    monkeypatch.setattr(confirm, "timeline", lambda result, mesh: FOUND)


def test_the_page_holds_everything_and_needs_nothing(compiled, tmp_path, capsys):
    file = tmp_path / "new" / "plan.html"
    assert cli.run(["plan", *LLAMA, "--confirm", "2", "--report", str(file)]) == 0
    out = capsys.readouterr().out
    assert f"report: {file}" in out
    assert "from shapes, 400 ms from the compiled schedule: matmuls 300 ms, collectives over dp 100 ms" in out
    page = file.read_text()
    for title in (
        *("Why the first", "Plans", "Memory of one device at the peak", "Memory against time"),
        *("Where the time goes, from shapes", "Where the time goes, from the compiled schedule", "Timeline of plan 2"),
    ):
        assert f"<h2>{title}" in page
    assert "Timeline of plan 3" not in page
    assert "python run.py --model.preset llama3-8b" in page
    assert page.count("peak by the compiler") == 1
    assert page.count("by the compiler</text>") == 3  # two bars and the legend
    assert not re.search(r"https?://|<script|src=|@import", page)
    assert "loop of the &lt;forward&gt; pass, one of 32 runs: 10 ms" in page
    assert "<forward>" not in page
    assert page.count("Swipe the picture") == 3  # frontier and timelines, which keep their size on a phone
    assert "~ not compiled: tokens/s" in page and 'key" data-name="s/step"' in page
    assert 'data-name="offload"' not in page  # the same for every plan


def test_without_a_compiler_there_is_no_timeline_and_no_speed_no_frontier(tmp_path, capsys):
    file = tmp_path / "plan.html"
    assert cli.run(["plan", *LLAMA, "--confirm", "0", "--report", str(file)]) == 0
    page = file.read_text()
    assert "Memory against time" in page
    assert "Timeline" not in page
    words = ["--model.preset", "toy-1m", "--target", "cpu:8", "--confirm", "0", "--report", str(file)]
    assert cli.run(["plan", *words]) == 0
    assert "Memory against time" not in file.read_text()


def test_a_file_that_cannot_be_written_is_bad_input(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert cli.run(["plan", *LLAMA, "--confirm", "0", "--report", str(tmp_path / "file" / "plan.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_the_frontier_holds_what_nothing_beats():
    layout = lambda seconds, total: SimpleNamespace(seconds=seconds, memory=SimpleNamespace(total=total))
    fast, small, worse, middle = layout(1.0, 9), layout(3.0, 1), layout(2.5, 9), layout(2.0, 5)
    assert _undominated([worse, small, middle, fast]) == [fast, middle, small]  # type: ignore[list-item]


def test_loops_of_one_name_are_numbered():
    loops = [Block(f"while.{n}", "loop", n, 0.1, ()) for n in (1, 2)]
    assert list(_called((STEP, *loops)).values()) == ["step", "loop 1", "loop 2"]
    drawn = timeline_picture(Timeline(FOUND.parts, {}, (STEP, *loops)))
    assert "loop 1: 100 ms" in drawn and "loop 2, one of 2 runs: 100 ms" in drawn


def test_a_timeline_is_drawn_to_scale():
    drawn = timeline_picture(FOUND)
    widths = {words: float(width) for width, words in re.findall(r'width="([\d.]+)" [^>]*><title>([^:<]*):', drawn)}
    assert widths["loop of the &lt;forward&gt; pass"] == pytest.approx(4 * widths["memory-bound kernels"])
    assert widths["matmuls"] == widths["collectives over dp"]
