"""Pipeline schedules: every table is proved twice; bubble, memory and phases are as the formulas say."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxshard.errors import InputError
from jaxshard.parallel import schedule as sch
from jaxshard.parallel.schedule import COLUMNS, make
from jaxshard.parallel.schedule_check import expected, simulate, validate
from jaxshard.views.schedule_draw import draw_png, draw_text

KINDS = [("gpipe", 1), ("1f1b", 1), ("interleaved", 1), ("interleaved", 2), ("interleaved", 4)]
SIZES = [(S, M) for S in (1, 2, 3, 4, 5, 8) for M in (1, 2, 3, 4, 5, 7, 8, 9, 13, 16)]


@pytest.mark.parametrize(("name", "V"), KINDS)
def test_every_table_passes_both_proofs(name, V):
    for S, M in SIZES:
        table = make(name, S, M, V)
        validate(table)
        assert simulate(table) == expected(S, M, V), (S, M)


@pytest.mark.parametrize(("name", "V"), KINDS)
def test_no_half_is_wasted_and_the_bubble_is_the_formula(name, V):
    for S, M in SIZES:
        table = make(name, S, M, V)
        assert table.forward_halves == table.backward_halves == V * max(M, S) + min(M, S) - 1
        counted = sch.bubble_fraction(table)
        assert counted == pytest.approx(sch.bubble_formula(name, S, M, V))
        assert sch.step_cost(table) * (1 - counted) == pytest.approx(4 * M)
        if M >= S:
            assert counted == pytest.approx((S - 1) / (V * M + S - 1))


def test_memory_is_what_the_docs_say():
    for S, M in SIZES:
        assert make("gpipe", S, M).saved_slots == M
        assert make("1f1b", S, M).saved_slots == min(M, 2 * S - 1)
        for V in (1, 2, 4):
            table = make("interleaved", S, M, V)
            assert table.fwd_slots == table.bwd_slots
            if M % S == 0:
                assert table.saved_slots == min(V * M, (V + 1) * S - 1)
                assert table.fwd_slots == 1
            else:
                assert table.saved_slots <= V * M
                assert table.fwd_slots <= max(1, -(-M // max(1, M // S)) - S + 1)


def test_memory_and_phases_do_not_grow_with_microbatches():
    for name, V in KINDS[1:]:
        small, large = make(name, 4, 8, V), make(name, 4, 64, V)
        assert small.saved_slots == large.saved_slots
        assert [p.kind for p in small.phases] == [p.kind for p in large.phases]


def test_one_f_one_b_is_the_closed_form():
    S, M = 4, 9
    table = make("1f1b", S, M)
    t, s = np.indices((table.ticks, S))
    for found, m in ((table.fwd_microbatch, t - s), (table.bwd_microbatch, t - 2 * (S - 1) + s)):
        np.testing.assert_array_equal(found, np.where((m >= 0) & (m < M), m, -1))
    np.testing.assert_array_equal(table.loss_microbatch[S - 1 : M + S - 1], np.arange(M))


def test_interleaved_with_one_chunk_is_one_f_one_b():
    for S, M in SIZES:
        one, other = make("1f1b", S, M), make("interleaved", S, M, 1)
        assert all(np.array_equal(getattr(one, name), getattr(other, name)) for name in COLUMNS)


@pytest.mark.parametrize(("name", "V"), KINDS)
def test_phases_tile_the_table_and_rows_are_safe_to_index(name, V):
    for S, M in SIZES:
        table = make(name, S, M, V)
        assert len(table.phases) <= 4
        assert [p.start for p in table.phases] == [0, *(p.stop for p in table.phases[:-1])]
        assert table.phases[-1].stop == table.ticks
        assert V > 1 or all(p.loss != "sometimes" for p in table.phases)
        losses = 0
        for phase in table.phases:
            part = slice(phase.start, phase.stop)
            assert (table.fwd_live[part].any(1) == phase.forward).all()
            assert (table.bwd_live[part].any(1) == phase.backward).all()
            rows = table.rows(phase)
            assert {len(column) for column in rows.values()} == {phase.stop - phase.start}
            assert all(column.dtype in (np.int32, np.bool_) and column.min() >= 0 for column in rows.values())
            assert rows["fwd_take"].max() < table.fwd_slots and rows["fwd_put"].max() <= table.fwd_slots
            assert rows["bwd_take"].max() < table.bwd_slots and rows["bwd_put"].max() <= table.bwd_slots
            assert rows["bwd_load"].max() < table.saved_slots and rows["fwd_save"].max() <= table.saved_slots
            for what in ("embed", "loss", "embed_gradient"):
                live = rows[f"{what}_live"]
                assert getattr(phase, what) == ("always" if live.all() else "sometimes" if live.any() else "never")
            losses += rows["loss_live"].sum()
        assert losses == M


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f1", 2, 4), "schedule '1f1' is not known .did you mean '1f1b'.*gpipe, 1f1b, interleaved"),
        (("gpipe", 2, 4, 2), "'gpipe' with 2 chunks per stage.*choose 1 chunk, or schedule 'interleaved'"),
        (("1f1b", 2, 0), "microbatches: 0"),
        (("1f1b", 0, 4), "stages: 0"),
        (("interleaved", 2, 4, 0), "chunks per stage: 0"),
    ],
)
def test_bad_input_says_what_to_do(arguments, message):
    with pytest.raises(InputError, match=message):
        make(*arguments)


def test_layers_are_dealt_out_round_robin():
    assert sch.layer_order(8, 2, 2).tolist() == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert sch.layer_order(6, 3).tolist() == [[[0, 1]], [[2, 3]], [[4, 5]]]
    with pytest.raises(InputError, match=r"30 layers on 4 stages x 2 chunks.*nearest: 24 or 32 layers, or 3 stages"):
        sch.layer_order(30, 4, 2)
    with pytest.raises(InputError, match="nearest: 4 layers, or 3 stages"):
        sch.layer_order(3, 4)


@pytest.mark.parametrize(
    "sizes", [("gpipe", 4, 8, 1), ("1f1b", 8, 64, 1), ("interleaved", 2, 100, 4), ("1f1b", 1, 1, 1)]
)
@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_drawing_fits_the_terminal(sizes, width):
    lines = draw_text(make(*sizes), width).plain.splitlines()
    assert max(map(len, lines)) <= width
    assert sum(line.startswith("stage ") for line in lines) == sizes[1]


def test_the_drawing_shows_units_bubbles_and_colours():
    text = draw_text(make("1f1b", 2, 2))
    assert [line.rstrip() for line in text.plain.splitlines()[1:]] == [
        "tick      0 1 2 3",
        "stage 0 F 0 1 .",
        "        B   . 0 1",
        "stage 1 F . 0 1",
        "        B   0 1 .",
        "loss        0 1",
    ]
    styles = {(text.plain[span.start : span.end].strip(), str(span.style)) for span in text.spans}
    assert styles >= {("1", "white on blue"), ("1", "black on green"), ("1", "black on yellow"), (".", "red")}
    assert not styles & {(".", "white on blue"), (".", "black on green"), ("1", "red")}


def test_the_picture_is_a_png_for_print(tmp_path):
    draw_png(make("interleaved", 2, 4, 2), tmp_path / "a.png")
    content = (tmp_path / "a.png").read_bytes()
    width = int.from_bytes(content[16:20], "big")  # first field of the header's chunk
    assert content.startswith(b"\x89PNG") and width == 300 * 11


def test_the_docs_show_the_numbers_of_the_tables():
    docs = Path(__file__).parent.parent / "docs"
    spec = importlib.util.spec_from_file_location("make_pipeline", docs / "make_pipeline.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = (docs / "pipeline.md").read_text()
    assert module.render(page) == page, "run: python docs/make_pipeline.py"


def test_schedules_need_no_jax():
    code = "import sys, jaxshard.parallel.schedule_check, jaxshard.views.schedule_draw; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
