"""The order of plans: what the compiler is asked, how times of two kinds are compared, and what is said meanwhile.

The compiler is a stand-in that answers as compiled schedules did; tests/test_confirmed.py asks the real ones.
"""

import re
import time
from functools import cache
from itertools import pairwise
from types import SimpleNamespace

import pytest

from jaxshard.analysis.timeline import Timeline
from jaxshard.commands import cli
from jaxshard.config import Config, DataConfig, ModelConfig, TrainConfig
from jaxshard.config.options import Given
from jaxshard.models.presets import architecture
from jaxshard.planner import asking, confirm, planner, ranking
from jaxshard.planner.advice import reasons
from jaxshard.planner.correction import EDGE
from jaxshard.planner.exploration import TRIES
from jaxshard.planner.search import Pins
from jaxshard.views.plan_tables import speed_note
from jaxshard.xla.hardware import parse_target

GIB = 2**30
FACTORS = {"none": 1.36, "dots": 1.1, "full": 1.0}
"""Compiled seconds over those from shapes as llama3.2-3b and llama3-8b on eight H100s have them, by recomputation."""
NEAR_THE_EDGE = 1.25
"""The same where XLA saves memory."""


def settings(preset, batch=64, seq_len=8192):
    train = TrainConfig(precision="bf16", global_batch=batch)
    return Config(model=ModelConfig(preset=preset), data=DataConfig(seq_len=seq_len), train=train)


@cache
def search(preset, target="h100:8", limit=None):
    config = settings(preset)
    return ranking.search(config, architecture(config.model), parse_target(target), Pins({}, {}), limit)


@pytest.fixture
def compiler(monkeypatch):
    """Sets the factor by which a layout is slower when it is compiled; returns what was asked."""

    def use(factor):
        asked = []

        def verdict(found, scored, answers):
            asked.append(scored)
            timeline = Timeline({"matmuls": scored.seconds * factor(scored)}, {}, ())
            return confirm.Verdict(True, scored.memory.total, timeline)

        monkeypatch.setattr(planner, "compiler_missing", lambda target: None)
        monkeypatch.setattr(confirm, "_verdict", verdict)
        return asked

    return use


def like_xla(scored):
    edge = scored.memory.total > EDGE * parse_target("h100:8").chip.memory_bytes
    return FACTORS[scored.candidate.remat] * (NEAR_THE_EDGE if edge else 1)


@pytest.mark.parametrize("preset", ["llama3.2-3b", "llama3-8b"])
def test_more_memory_never_gives_a_worse_plan(preset, compiler):
    asked = compiler(like_xla)
    best, peaks = [], []
    for limit in (30, 50, 70, None):
        asked.clear()
        plans, _ = planner.offered(search(preset, limit=limit and limit * GIB), Given({}), 3)
        assert plans[0].timeline and len(asked) <= TRIES * 3
        best.append(plans[0].timeline.seconds)
        peaks.append(plans[0].scored.memory.total)
    assert best == sorted(best, reverse=True)
    assert best[-1] < best[0] and peaks[-1] > peaks[0]


def test_questions_go_to_other_kinds_when_one_came_out_slow(compiler):
    asked = compiler(like_xla)
    found = search("llama3.2-3b")
    plans, notes = planner.offered(found, Given({}), 3)
    assert [s.candidate.remat for s in asked[:1]] == ["none"]  # by shapes it comes first
    assert {s.candidate.remat for s in asked} >= {"none", "dots"}
    assert plans[0].scored.candidate.remat == "dots"
    assert any(note.startswith("From shapes alone dp=8, ZeRO-2, remat none, ") for note in notes)
    why = " ".join(plans[0].reasons)
    assert re.search(r"remat none: \d\.\d % faster by the prediction from shapes, but \d\d\.\d % slower as the", why)


def test_times_of_both_kinds_stand_in_one_order(compiler):
    """A kind that takes three times what its shapes say, compiled or not, stands behind another."""
    compiler(lambda scored: 3.0 if scored.candidate.shape.stage == 1 else 1.1)
    plans, _ = planner.offered(search("llama3-8b"), Given({}), 2)
    expected = [plan.expected for plan in plans]
    assert all(later > 0.985 * earlier for earlier, later in pairwise(expected))  # but for simpler ones before others
    kind = lambda plan: (plan.scored.candidate.remat, plan.scored.candidate.shape.stage > 1)
    compiled = {kind(plan) for plan in plans if plan.timeline}
    others = [plan for plan in plans if not plan.timeline]
    assert others and any(kind(plan) in compiled for plan in others)
    for plan in plans:
        assert plan.expected and plan.seconds
        if plan.timeline:
            assert plan.expected == plan.timeline.seconds
        elif kind(plan) in compiled:
            assert plan.expected / plan.seconds == pytest.approx(1.1 if kind(plan)[1] else 3.0)
    assert plans[0].timeline and plans[0].scored.candidate.shape.stage > 1
    assert "not compiled" in speed_note(plans)
    assert plans[0].as_json()["expected_seconds"] == expected[0]


def test_without_a_compiler_the_order_is_that_of_the_shapes():
    plans, notes = planner.offered(search("llama3-8b"), Given({}), 0)
    assert all(plan.expected == plan.seconds for plan in plans)
    assert plans[0].scored is search("llama3-8b").fitting[0]
    assert not speed_note(plans) and not any("From shapes alone" in note for note in notes)


def test_of_equal_schedules_the_simpler_layout_comes_first(compiler):
    compiler(lambda scored: 5.0 / scored.seconds)
    plans, _ = planner.offered(search("llama3-8b"), Given({}), 3)
    compiled = [plan.scored.candidate.complexity for plan in plans if plan.timeline]
    assert len(compiled) == 3
    assert ranking.PREFERENCE @ compiled[0] == min(ranking.PREFERENCE @ each for each in compiled)


@pytest.mark.parametrize("chip, hides", [("a100", False), ("h100", True)])
def test_shapes_assume_the_overlap_of_the_targets_compiler(chip, hides):
    found = ranking.search(
        settings("llama3-8b"), architecture(ModelConfig(preset="llama3-8b")), parse_target(f"{chip}:8"),
        Pins({"data": 8}, {"zero": 3, "remat": "full"}),
    )  # fmt: skip
    parts = found.at(0).parts
    assert (parts["data_comm_hidden"] > 0) is hides


# What is left out, and what is said.


def test_sizes_that_do_not_divide_are_named(capsys):
    own = ("--model.family", "llama", "--model.d_model", "16384", "--model.n_layers", "126", "--model.n_heads", "128")
    more = ("--model.vocab_size", "128256", "--target", "h100:512", "--train.global_batch", "512", "--confirm", "0")
    assert cli.run(["plan", *own, *more]) == 0
    out = capsys.readouterr().out
    assert "Not searched: pp = 4, 8, 16, 32 or 64: model.n_layers = 126 does not divide by them; 2 does" in out
    assert "on other numbers of devices 3, 6, 7, 9, 14 or 18 would" in out
    assert cli.run(["plan", "--model.preset", "gpt2-1.5b", "--target", "h100:8", "--confirm", "0"]) == 0
    assert "Not searched: tp = 2, 4 or 8: model.n_heads = 25 does not divide by them." in capsys.readouterr().out
    narrow = ("--model.family", "llama", "--model.d_model", "60", "--model.d_ff", "100", "--model.n_heads", "3")
    rest = ("--model.n_layers", "2", "--target", "h100:8", "--train.global_batch", "12", "--confirm", "0")
    assert cli.run(["plan", *narrow, *rest]) == 0
    out = capsys.readouterr().out
    assert "Not searched: dp x replica = 8: train.global_batch = 12 does not divide by it; 2 and 4 do." in out
    rest = ("--model.n_layers", "1", "--target", "h100:8", "--train.global_batch", "16", "--confirm", "0")
    assert cli.run(["plan", *narrow, *rest]) == 0
    out = capsys.readouterr().out
    assert "Not searched: ZeRO-1 on dp=8: " in out and "--parallel.allow_replicated" in out


def test_a_state_that_fits_alone_is_not_said_to_fit():
    config = settings("llama3.2-1b", 8)
    arch, target = architecture(config.model), parse_target("h100:1")
    whole = ranking.search(config, arch, target, Pins({}, {})).whole_state
    tight = ranking.search(config, arch, target, Pins({}, {}), 1.05 * whole)
    plan = tight.fitting[0]
    assert plan.candidate.offload == "optimizer"
    why = " ".join(reasons(tight, plan))
    assert "fits into a device's" not in why
    assert "alone is less than a device's" in why and "without that no layout of these devices fits" in why


def test_questions_are_counted_and_alive_on_stderr(monkeypatch, capsys):
    def slow(*args):
        time.sleep(0.05)
        return SimpleNamespace(result=SimpleNamespace(memory=SimpleNamespace(peak=GIB)))

    monkeypatch.setattr(planner, "compiler_missing", lambda target: None)
    monkeypatch.setattr(confirm, "compile_step", slow)
    monkeypatch.setattr(confirm, "timeline", lambda result, mesh: Timeline({"matmuls": 1.0}, {}, ()))
    monkeypatch.setattr(asking.Progress.__init__, "__defaults__", (0.01,))
    line = ["plan", "--model.preset", "gpt2-124m", "--target", "h100:8", "--train.global_batch", "64", "--confirm", "2"]
    assert cli.run(line) == 0
    out, err = capsys.readouterr()
    assert "asking the compiler for h100:8: 1 of at most 6: dp=8, " in err
    assert "asking the compiler for h100:8: 2 of at most 6: " in err and re.search(r"\(\d:\d\d so far\)", err)
    assert "  still compiling, 0:00 since the first" in err
    assert "compil" not in out.split("Plans for")[0]
    assert cli.run([*line[:-2], "--mesh", "dp=7"]) == 2
    assert "asking" not in capsys.readouterr().err
