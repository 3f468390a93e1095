"""The names that the program carries: in its compiled text every array that travels says which weight it is of."""

import re

import jax
from ledger_layouts import GPT2, LLAMA, QUICK, config, program_for

from jaxshard.config import ModelConfig
from jaxshard.models.presets import architecture
from jaxshard.models.transformer import describe
from jaxshard.names import map_named
from jaxshard.training.program import weight_paths


def test_a_scope_for_every_leaf():
    jaxpr = jax.make_jaxpr(lambda x: map_named("why", lambda a: a + 1, {"a": {"b": x}}, under="c"))(1.0)
    assert [str(eqn.source_info.name_stack) for eqn in jaxpr.eqns] == ["why/c.a.b"]


def test_modules_know_their_weights_paths():
    """A weight's path within the module is that of its row in the table."""
    for family in (GPT2, LLAMA):
        model = describe(architecture(ModelConfig(**family), None, 64))
        for group, graph in model.graphs.items():
            known = {path for path in weight_paths(model.weights) if path.startswith(f"{group}.")}
            assert known == set(re.findall(r"'path': '([\w.]+)'", str(graph))), group


def test_gathers_and_reductions_bear_their_weights_path():
    program = program_for(config("dp=4,tp=2", 3), "cpu:8")
    lowered = program.step.lower(program.abstract, program.abstract_batch())
    text = lowered.compile(compiler_options=QUICK).as_text()
    assert text is not None
    of = lambda kind: re.findall(rf' {kind}\(.*op_name="([^"]*)"', text)
    gathers, sums = of("all-gather"), of("all-reduce")
    newer = jax.__version_info__ > (0, 10, 2)  # what is gathered straight from an argument is named after that
    for path in weight_paths(program.model.weights):
        argument = "state.params" + "".join(rf"[\'{part}\']" for part in path.split("."))
        mine = [name for name in gathers if f"weight_gather/{path}" in name or (newer and name == argument)]
        assert any("transpose(" not in name for name in mine), path
        if path.startswith("blocks") and "norm" not in path:
            assert any("rematted_computation" in name for name in mine), path
            assert any(f"{path}/weight_grad" in name for name in sums), path
    assert all("weight_gather/" in name or (newer and name.startswith("state.params")) for name in gathers)
