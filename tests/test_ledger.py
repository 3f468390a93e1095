"""Found = expected on faked CPU devices, and mistakes that the comparison catches and names.

The same for absent GPUs and TPUs: test_ledger_gpu.py, test_ledger_tpu.py.
"""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec
from ledger_layouts import (
    ALL,
    FULL_KV,
    LLAMA,
    MIXED_KV,
    PADDED,
    PIPELINES,
    agreeing,
    config,
    ledger,
    program_for,
)

from jaxshard.analysis.compare import check
from jaxshard.analysis.expected import expected
from jaxshard.analysis.facts import facts_of
from jaxshard.analysis.ledger import rows
from jaxshard.analysis.shrink_advice import large_buffers
from jaxshard.config import DataConfig
from jaxshard.parallel.axes import MeshShape
from jaxshard.parallel.layout import Layout
from jaxshard.training import gradients, step
from jaxshard.xla.buffers import BufferReport, Temporary
from jaxshard.xla.hlo import parse

CPU = "cpu:8"
HLO = Path(__file__).parent / "hlo"


def test_a_cpu_rewrites_and_it_is_said():
    """Input gradients are summed once for each product, where other compilers sum the products first."""
    found = agreeing(config("dp=4,tp=2", 3), CPU)
    assert found.check is not None
    words = " ".join(found.check.rewrites)
    for word in ("for reduce-scatter", "f32", "one sum for each product that reads the input"):
        assert word in words


SLOW = (
    "ddp, deferred",
    "ddp with tp",
    "hsdp zero 3, accumulation, sp",
    "tp sp, full",
    "tp, shared kv heads",
    "gpt2 tp sp",
    "gpipe",
    "interleaved, zero 1, sp, accumulation",
    "1f1b, zero 3 with tp, full",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_found_is_expected(name):
    agreeing(ALL[name], CPU)


@pytest.mark.slow
def test_what_is_not_predicted_is_said(capsys):
    """Muon multiplies matrices that are split: listed, and not compared."""
    found = agreeing(config("dp=4,tp=2", 1, optim="muon"), CPU)
    own = sum(row.total for row in found.rows if row.family == "optimizer")
    assert own > 0
    found.show()
    said = " ".join(capsys.readouterr().out.split())
    assert f"{own:,} bytes are not compared" in said and "nothing unexpected in all that is predicted" in said


@pytest.mark.slow
@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_deferred_gradients_are_compared_whatever_the_optimizer(name):
    """They are reduced where the optimizer's own arithmetic stands: outside of both passes."""
    found = agreeing(config("dp=8", 0, optim=name, accumulation=2), CPU)
    assert any(row.family == "vector" and row.phase == "outside" for row in found.rows)


def test_what_tpus_pad_is_counted_apart():
    facts = facts_of(program_for(config("replica=2,dp=4", 1, PADDED), CPU))
    (row,) = rows(parse((HLO / "tpu_padded.hlo").read_text()), facts.sizes, facts)
    assert (row.family, row.bytes, row.padding) == ("gradient", 224 * 64 * 4, 64 * 64 * 4)
    assert row.parameters == ("blocks.attention.key",)


def test_what_shrinks_a_buffer_is_not_what_is_set_already():
    """And positions by a width of the same size are no pairs of positions."""
    case = config("dp=8", model=LLAMA | {"n_layers": 4}, global_batch=64)
    facts = facts_of(program_for(replace(case, data=DataConfig(seq_len=128)), CPU))
    assert (facts.layers, facts.batch, facts.length, facts.width) == (4, 8, 128, 128)

    def said(shape, name="", **changed):
        report = BufferReport(0, 0, (Temporary("t", shape, 1, name, ""),))
        (buffer,) = large_buffers(report, replace(facts, **changed))
        return buffer.what, buffer.advice

    assert said("f32[4,8,128,128]") == (ALL_LAYERS, "--parallel.remat dots or full")
    kept = ALL_LAYERS.replace("activations", "attention weights")
    scores = "f32[4,8,4,2,128,128]"
    assert said(scores) == (kept, "--parallel.remat dots or full")
    assert said(scores, platform="gpu") == (kept, "--parallel.remat dots or full, or --model.attention cudnn")
    assert said(scores, platform="gpu", attention="cudnn") == said(scores)
    one, pairs = said("f32[8,128,8,128]", head_dim=128), said("f32[8,128,8,128]", "x/attention/exp", head_dim=128)
    assert one[0].startswith("one activation") and pairs[0] == "attention weights of every pair of positions"
    assert said("f32[7,7]", saved="full")[1] == "more --parallel.accumulation"
    assert said("f32[7,7]", batch=1)[1] == "shorter sequences, or tp higher, or --parallel.remat full"
    alone = MeshShape()
    gradient = "jit(f)/transpose(jvp())/mlp/blocks.mlp.up/weight_grad/dot_general"
    assert said("f32[128,384]", gradient) == ("gradient of blocks.mlp.up", "--zero 2 splits gradients over dp")
    assert said("f32[128,384]", gradient, mesh=alone)[1] == "dp or tp higher"
    assert said("f32[128,384]", "jit(f)/weight_gather/blocks.mlp.up/x")[0] == "blocks.mlp.up, ready for use"


ALL_LAYERS = "activations of all layers, kept for the backward pass"


def unexpected(program) -> list[str]:
    """What the comparison holds against a program."""
    found = ledger(program, CPU)
    assert not found.ok and found.check is not None
    return [item.reason for item in found.check.failures]


def constrain_otherwise(monkeypatch, axes, changed):
    """Replaces the constraint of the activations with these logical axes."""
    whole = Layout.shard
    other = lambda self, x, names, name=None: whole(self, x, changed if names == axes else names, name)
    monkeypatch.setattr(Layout, "shard", other)


def test_a_dropped_activation_constraint(monkeypatch):
    stream = ("batch", "residual_sequence", "embed")
    constrain_otherwise(monkeypatch, stream, (None, None, "embed"))
    reasons = unexpected(program_for(config("dp=8", precision="fp32"), CPU))
    assert any("an activation travels over dp" in reason for reason in reasons), reasons


def test_logits_that_are_gathered(monkeypatch):
    logits = ("batch", "sequence", "vocab")
    constrain_otherwise(monkeypatch, logits, ("batch", "sequence", None))
    reasons = unexpected(program_for(config("dp=4,tp=2", precision="fp32"), CPU))
    said = ["the loss is not vocabulary-parallel"]
    if jax.__version_info__ > (0, 10, 2):  # newer compilers may gather the head's weight instead of the logits
        said.append("head.out (or its gradient) travels over tp")
    assert any(words in reason for words in said for reason in reasons), reasons


def test_a_parameter_that_stays_whole():
    program = program_for(config("dp=8", 3, precision="fp32"), CPU)
    params = jax.tree.map(lambda leaf: leaf, program.abstract.params)
    down = params["blocks"]["mlp"]["down"]
    whole = program.layout.sharding(PartitionSpec())
    params["blocks"]["mlp"]["down"] = jax.ShapeDtypeStruct(down.shape, down.dtype, sharding=whole)
    found = ledger(replace(program, abstract=replace(program.abstract, params=params)), CPU)
    (leaf,) = found.replicated
    assert (leaf.path, leaf.bytes) == ("blocks.mlp.down", 4 * down.size)
    assert not found.ok and found.check is not None
    # It is used as any other, and gathered once more, whole, when it is updated.
    (unexpected,) = found.check.failures
    assert unexpected.reason == "updated parameters gathered (ZeRO-1/2)" and unexpected.bytes == 4 * down.size


def test_moments_that_stay_whole():
    program = program_for(config("dp=8", 1, precision="fp32"), CPU)
    whole = program.layout.sharding(PartitionSpec())
    lie_whole = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole)
    moments = jax.tree.map(lie_whole, program.abstract.moments)
    found = ledger(replace(program, abstract=replace(program.abstract, moments=moments)), CPU)
    assert not found.ok and found.program is not None and found.program.replicated == []
    size = {leaf.path: leaf.bytes for leaf in found.replicated}
    assert len(size) == 2 * len(jax.tree.leaves(program.abstract.params))  # mean and mean square
    (down, again) = (size[path] for path in size if path.endswith("blocks.mlp.down"))
    assert down == again == 4 * 3 * 384 * 128
    assert all("of the moments, and the rules split them" in leaf.why for leaf in found.replicated)


def test_small_unexpected_pieces_are_added_up(monkeypatch):
    """The sequences are shifted and shifted back: traffic in several pieces, none of which is all of it."""
    plain = gradients.cross_entropy
    there_and_back = lambda x: jnp.roll(jnp.roll(x, 1, 0) * 1.5, -1, 0) / 1.5
    moved = lambda spec, x, out, targets: plain(spec, there_and_back(x), out, targets)
    monkeypatch.setattr(gradients, "cross_entropy", moved)
    found = ledger(program_for(config("dp=8", precision="fp32"), CPU), CPU)
    facts = found.facts
    assert found.check is not None and facts is not None
    sizes = [item.bytes for item in found.check.unexpected]
    judged = lambda limit: check(found.rows, facts, "cpu", limit).failures
    assert max(sizes) < sum(sizes) - 1
    assert judged(sum(sizes) - 1) == found.check.unexpected and judged(sum(sizes)) == ()


def test_zero_3_undone(monkeypatch):
    """All parameters whole before the step: nothing unexpected travels, and every device holds them all at once."""
    plain = step.gradients

    def whole(recipe, params, *rest):
        base = recipe.layout.tree(lambda specs: specs.base)
        gathered = replace(recipe, layout=recipe.layout.once_gathered())
        return plain(gathered, jax.tree.map(jax.lax.with_sharding_constraint, params, base), *rest)

    monkeypatch.setattr(step, "gradients", whole)
    found = ledger(program_for(config("dp=8", 3, precision="fp32"), CPU), CPU)
    assert not found.ok and not found.replicated and found.facts is not None
    assert found.check is not None and not found.check.failures
    said = " ".join(found.check.undone)
    assert "expected and not found" in said and "gathered in one call" in said and "blocks.mlp.down" in said
    assert found.to_dict()["undone"] == list(found.check.undone)
    assert check(found.rows, replace(found.facts, gathered_once=True), "cpu").undone == ()


def test_a_sum_where_a_scatter_would_do_is_no_excuse_on_gpus():
    """A GPU program that all-reduces ZeRO gradients is reported, with the bytes."""
    found = ledger(program_for(config("dp=8", 1, precision="fp32"), CPU), CPU)  # the CPU compiler does just that
    assert found.ok and found.facts is not None
    judged = check(found.rows, found.facts, "gpu")
    assert any("twice the bytes" in item.reason for item in judged.unexpected)


def test_nor_is_it_for_weights_shaped_like_some_that_are_only_bounded():
    """Keys and values are whole on every device, and shaped like its queries: those are scattered all the same."""
    found = ledger(program_for(config("dp=2,tp=4", 1, MIXED_KV, precision="fp32"), CPU), CPU)
    assert found.ok and found.facts is not None
    of_matrices = 4 * sum(weight.total for weight in found.facts.weights if not weight.bounded)
    judged = check(found.rows, found.facts, "gpu")
    twice = [item.bytes for item in judged.unexpected if "twice the bytes" in item.reason and item.axes == ("data",)]
    assert sum(twice) == of_matrices
    nothing = check([], found.facts, "gpu")
    assert nothing.missing and not nothing.unexpected


def test_gradients_of_kv_heads_that_several_devices_use_are_summed_and_not_gathered():
    found = agreeing(config("dp=2,tp=4", 0, MIXED_KV), CPU)
    kv = [row for row in found.rows if row.family == "kv"]
    assert {row.kind for row in kv} == {"all-reduce"} and {row.axes for row in kv} == {("model",)}


def test_full_kv_heads_differ_from_shared_ones():
    each = [facts_of(program_for(config("tp=8", model=model), CPU)) for model in (None, FULL_KV)]
    shared, split = ({row.family for row in expected(facts)} for facts in each)
    assert "kv" in shared and "kv" not in split


def test_a_pipeline_counts_ticks():
    """gpipe on 4 stages with 4 microbatches: 7 ticks forward, 7 backward, 4 of which take a loss."""
    facts = facts_of(program_for(PIPELINES["gpipe"], CPU))
    stream = 2 * 64 * 128 * 2  # 2 sequences of a microbatch, 64 positions, 128 wide, bf16
    over_stage = {(row.family, row.text): (row.bytes, row.count) for row in expected(facts) if "stage" in row.axes}
    assert over_stage[("send", "to the next stage")] == over_stage[("send", "to the stage before")] == (stream, 7)
    assert over_stage[("stage", "last stage's output, for the loss")] == (stream, 4)
    assert over_stage[("embedding", "rows of the embedding")] == (stream, 7)
