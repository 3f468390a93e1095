"""Plans and the compiler's word: what it confirms and refuses, and what it is asked beyond the closed form.

The compiler is a stand-in here; tests/test_confirmed.py asks the real ones.
"""

import json

import jax
import pytest

from jaxshard.analysis.timeline import Timeline
from jaxshard.commands import cli
from jaxshard.config import Config, DataConfig, ModelConfig, TrainConfig, grouped
from jaxshard.config.options import Given
from jaxshard.errors import InputError
from jaxshard.models.presets import architecture
from jaxshard.planner import confirm, exploration, planner, ranking, refusal
from jaxshard.planner.search import Pins
from jaxshard.training.program import build_program
from jaxshard.views import plan_tables
from jaxshard.xla.compile import DoesNotFit
from jaxshard.xla.hardware import parse_target

GIB = 2**30


def settings(preset, batch, seq_len):
    train = TrainConfig(precision="bf16", global_batch=batch)
    return Config(model=ModelConfig(preset=preset), data=DataConfig(seq_len=seq_len), train=train)


def search(config, target):
    return ranking.search(config, architecture(config.model), parse_target(target), Pins({}, {}))


class _Peak:
    def __init__(self, peak):
        self.memory = type("Memory", (), {"peak": peak})


def confirmed(monkeypatch, verdict, count=2, tries=1):
    """Plans of llama3-8b on h100:8 when the compiler's answer is verdict(config), asked `tries` times for each."""
    monkeypatch.setattr(exploration, "TRIES", tries)
    monkeypatch.setattr(planner, "compiler_missing", lambda target: None)
    answer = lambda config, target, vocab: type("Confirmed", (), {"result": verdict(config, target)})
    monkeypatch.setattr(confirm, "compile_step", answer)
    monkeypatch.setattr(confirm, "timeline", lambda result, mesh: Timeline({"matmuls": 1.0}, {}, ()))
    found = search(settings("llama3-8b", 64, 8192), "h100:8")
    return planner.offered(found, Given({}), count)


def test_what_is_more_than_jaxs_own_share_of_a_gpu_is_asked_for_and_never_more_than_nine_tenths(monkeypatch):
    memory = parse_target("h100:8").chip.memory_bytes
    ask = "env XLA_PYTHON_CLIENT_MEM_FRACTION=0.9 python run.py "
    for peak, starts in ((int(0.75 * memory), "python run.py "), (int(0.76 * memory), ask), (int(0.9 * memory), ask)):
        plans, _ = confirmed(monkeypatch, lambda config, target, peak=peak: _Peak(peak))
        assert all(plan.command.startswith(starts) for plan in plans if plan.compiled_peak)
    estimated = [plan for plan in plans if not plan.compiled_peak]
    for plan in estimated:  # an estimate may be too low by its margin
        most = plan.scored.memory.total / (1 - ranking.MARGIN)
        assert plan.command.startswith(ask if most > 0.75 * memory else "python run.py ")
        assert plan.scored.memory.total <= (1 - ranking.MARGIN) * 0.9 * memory
    assert estimated
    with pytest.raises(InputError, match="may be used"):
        confirmed(monkeypatch, lambda config, target: _Peak(int(0.901 * memory)))


def test_rows_of_one_document_are_named_where_only_the_mask_of_packed_ones_is_too_much():
    config, target = settings("llama3.2-1b", 8, 8192), parse_target("h100:1")
    pins = Pins({}, {"remat": "full", "offload": "none"})
    arch = architecture(config.model)
    least = ranking.search(config, arch, target, pins).smallest().memory.total
    for limit, named in ((least - 1, True), (least // 2, False)):
        error = refusal.refused(ranking.search(config, arch, target, pins, limit), pins, limit)
        assert ("it fits here with --data.pack false" in str(error)) == named


def test_the_best_plans_carry_the_compilers_figure(monkeypatch):
    plans, _ = confirmed(monkeypatch, lambda config, target: _Peak(50 * GIB))
    assert [plan.compiled_peak for plan in plans[:3]] == [50 * GIB, 50 * GIB, None]
    assert plans[0].as_json()["compiled_time"] == {
        **{"seconds": 1.0, "parts": {"matmuls": 1.0}, "hidden": {}, "again": 0.0},
    }
    assert [plan.as_json()["compiled_time"] for plan in plans[2:4]] == [None, None]


def test_speeds_in_the_table_are_of_the_compiled_schedule_where_there_is_one(monkeypatch):
    plans, _ = confirmed(monkeypatch, lambda config, target: _Peak(50 * GIB))
    found = search(settings("llama3-8b", 64, 8192), "h100:8")
    cells = [dict(zip(plan_tables.COLUMNS, row, strict=True)) for row in plan_tables.rows(found, plans)]
    assert [row["tokens/s"] for row in cells[:2]] == [f"{64 * 8192:,}"] * 2  # in the one second of `Timeline` above
    assert plans[0].mfu and plans[0].seconds
    assert cells[0]["MFU"] == f"{100 * plans[0].mfu * plans[0].seconds:.0f} %"
    assert plans[2].expected and cells[2]["tokens/s"] == f"~{64 * 8192 / plans[2].expected:,.0f}"


def test_speeds_of_one_kind_are_not_marked(monkeypatch):
    plans, _ = confirmed(monkeypatch, lambda config, target: _Peak(50 * GIB))
    assert plan_tables.speed_note(plans).startswith("~ not compiled: ")
    assert plan_tables.speed_note(plans[:2]) == plan_tables.speed_note(plans[2:]) == ""


def test_zero_1_and_2_share_a_row_where_they_are_one_program(monkeypatch):
    monkeypatch.setattr(planner, "compiler_missing", lambda target: None)
    found = ranking.search(
        settings("gpt2-124m", 64, 1024),
        architecture(ModelConfig(preset="gpt2-124m")),
        parse_target("h100:8"),
        Pins({"data": 8}, {"accumulation": 1, "remat": "none"}),
    )
    plans, notes = planner.offered(found, Given({}), 0)
    assert sorted(plan.scored.candidate.zero for plan in plans) == [0, 1, 3]
    assert any("same program with ZeRO-1 and ZeRO-2" in note for note in notes)
    ones = [plan for plan in plans if plan.scored.candidate.zero == 1]
    assert "ZeRO-2 on this mesh: the same program." in ones[0].reasons
    several = Pins({"data": 8}, {"accumulation": 2, "remat": "none"})
    found = ranking.search(found.config, found.arch, found.target, several)
    plans, notes = planner.offered(found, Given({}), 0)
    assert sorted(plan.scored.candidate.zero for plan in plans) == [0, 1, 2, 3]
    assert not any("same program" in note for note in notes)


def test_zero_2_without_accumulation_is_lowered_to_the_program_of_zero_1():
    model = ModelConfig(family="gpt2", d_model=32, n_layers=2, n_heads=2, d_ff=64, vocab_size=257)

    def lowered(zero, accumulation):
        groups = grouped(mesh="dp=8", zero=zero, global_batch=16, accumulation=accumulation)
        config = Config(model=model, data=DataConfig(seq_len=16), **groups)
        program = build_program(config, jax.devices(), None)
        return program.step.lower(program.abstract, program.abstract_batch()).as_text()

    assert lowered(1, 1) == lowered(2, 1)
    assert lowered(1, 2) != lowered(2, 2)


def test_what_the_compiler_refuses_is_never_offered(monkeypatch):
    asked = []

    def verdict(config, target):
        asked.append((config.mesh, config.zero, config.parallel.remat))
        refused = len(asked) <= 2
        return DoesNotFit(target, 90 * GIB, 80 * GIB, "no") if refused else _Peak(60 * GIB)

    plans, notes = confirmed(monkeypatch, verdict, tries=2)
    offered = [(str(p.scored.candidate.shape), p.scored.candidate.zero, p.scored.candidate.remat) for p in plans]
    confirmed_keys = {key for key, plan in zip(offered, plans, strict=True) if plan.compiled_peak}
    assert len(confirmed_keys) == 2
    assert not {*asked[:2]} & {*offered} - confirmed_keys
    assert sum("Not offered" in note for note in notes) == 2


def test_a_compiled_peak_above_the_limit_is_a_refusal(monkeypatch):
    with pytest.raises(InputError, match="refuses every layout"):
        confirmed(monkeypatch, lambda config, target: _Peak(100 * GIB), count=1)


def test_near_the_edge_the_compiler_decides(monkeypatch):
    """The closed form says that nothing fits, by less than its error: the compiler has the last word, either way."""
    config = settings("llama3-8b", 64, 8192)
    arch, target = architecture(config.model), parse_target("h100:8")
    pins = Pins({"data": 8}, {"zero": 3, "remat": "full", "accumulation": 8, "offload": "none"})
    limit = int(0.95 * ranking.search(config, arch, target, pins).smallest().memory.total)
    tight = lambda: ranking.search(config, arch, target, pins, memory_limit=limit)
    monkeypatch.setattr(planner, "compiler_missing", lambda target: None)
    monkeypatch.setattr(confirm, "timeline", lambda result, mesh: None)
    for peak, fits in ((limit, True), (limit + 1, False)):
        found = tight()
        assert not found.fitting
        answer = type("Confirmed", (), {"result": _Peak(peak)})
        monkeypatch.setattr(confirm, "compile_step", lambda *args, answer=answer: answer)
        if fits:
            (plan,), _ = planner.offered(found, Given({}), 3)
            assert plan.compiled_peak == limit
        else:
            # The compiler's figure, where it is known, goes before the estimate.
            said = (
                rf"fits nowhere.* compiler was asked about \(dp=8, ZeRO-3.*\) needs {limit + 1:,} bytes on a device by "
            )
            with pytest.raises(InputError, match=rf"{said}its word, and {limit:,} may be used; ") as refused:
                planner.offered(found, Given({}), 3)
            assert "Not offered" not in str(refused.value)
    with pytest.raises(InputError, match="fits nowhere"):
        planner.offered(tight(), Given({}), 0)


def test_what_is_too_large_by_the_closed_form_needs_the_compilers_word(monkeypatch):
    """A compiler that cannot say whether a layout fits is not enough where the closed form says that it does not."""

    def fails(*args):
        raise jax.errors.JaxRuntimeError("INTERNAL: no host memory here")

    config = settings("llama3-8b", 8, 2048)
    arch, target = architecture(config.model), parse_target("h100:1")
    pins = Pins({}, {"offload": "optimizer", "remat": "full"})
    monkeypatch.setattr(planner, "compiler_missing", lambda target: None)
    monkeypatch.setattr(confirm, "compile_step", fails)
    least = ranking.search(config, arch, target, pins).smallest().memory.total
    plans, notes = planner.offered(ranking.search(config, arch, target, pins, least), Given({}), 3)
    assert plans[0].compiled_peak is None
    assert "Not confirmed" in notes[-1]
    with pytest.raises(InputError, match="fits nowhere"):
        planner.offered(ranking.search(config, arch, target, pins, least - 1), Given({}), 3)


def test_after_refusals_of_all_that_should_fit_the_next_larger_ones_are_asked(monkeypatch):
    config = settings("llama3-8b", 64, 8192)
    arch, target = architecture(config.model), parse_target("h100:8")
    pins = Pins({}, {"zero": 3, "remat": "full", "offload": "none"})
    least = ranking.search(config, arch, target, pins).smallest()
    own = str(least.candidate.shape)
    monkeypatch.setattr(planner, "compiler_missing", lambda target: None)
    monkeypatch.setattr(confirm, "timeline", lambda result, mesh: None)
    answer = lambda config, *rest: type("Confirmed", (), {"result": _Peak(GIB * (100 if config.mesh == own else 1))})
    monkeypatch.setattr(confirm, "compile_step", answer)
    found = ranking.search(config, arch, target, pins, least.memory.total)
    assert {str(plan.candidate.shape) for plan in found.fitting} == {own}
    plans, notes = planner.offered(found, Given({}), 3)
    assert all(plan.compiled_peak == GIB and plan.scored.memory.total > found.limit for plan in plans)
    assert f"Not offered: {own}, ZeRO-3" in " ".join(notes)


def test_fewest_devices_by_the_compilers_word(capsys, monkeypatch):
    """Where the compiler refuses all that should fit, the next larger target has its turn."""
    asked = []

    def answer(config, target, vocab):
        asked.append(target.name)
        peak = 90 * GIB if target.count < 4 else 50 * GIB
        return type("Confirmed", (), {"result": _Peak(peak)})

    monkeypatch.setattr(planner, "compiler_missing", lambda target: None)
    monkeypatch.setattr(confirm, "compile_step", answer)
    monkeypatch.setattr(confirm, "timeline", lambda result, mesh: None)
    words = ["plan", "--model.preset", "llama3-8b", "--train.global_batch", "64", "--data.seq_len", "8192"]
    assert cli.run([*words, "--confirm", "1", "--target", "h100:64", "--fewest", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["target"] == "h100:4"
    assert asked[-1] == "h100:4" and set(asked[:-1]) <= {"h100:1", "h100:2"} and len(asked) > 1


def test_a_mistake_is_not_taken_for_a_target_that_is_too_small(monkeypatch):
    """With --fewest what the user gets wrong comes out at once, instead of larger and larger targets being tried."""
    asked = []

    def compile_step(config, target, vocabulary):
        asked.append(target.name)
        raise InputError("parallel.allow_replicated names 'x', but the model has no such weight")

    monkeypatch.setattr(planner, "compiler_missing", lambda target: None)
    monkeypatch.setattr(confirm, "compile_step", compile_step)
    config = settings("llama3.2-1b", 64, 8192)
    find = lambda target: planner.find(config, architecture(config.model), target, Given({}), None, True, 1)
    with pytest.raises(InputError, match=r"^parallel\.allow_replicated names 'x', but the model has no such weight$"):
        find(parse_target("h100:64"))
    assert len(asked) == 1
    # What is refused for its size lets the next target have its turn.
    monkeypatch.setattr(confirm, "compile_step", lambda *_: type("Confirmed", (), {"result": _Peak(90 * GIB)}))
    with pytest.raises(InputError, match=r"the compiler for h100:2 refuses every layout"):
        find(parse_target("h100:2"))
