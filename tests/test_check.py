"""`check`: the comparison for a user's own configuration, scaled down without losing what decides its sharding."""

import json
import math

import jax
import pytest

from jaxshard.commands.cli import run
from jaxshard.config import Config, DataConfig, ModelConfig, grouped
from jaxshard.models.presets import architecture
from jaxshard.parallel.axes import MeshShape
from jaxshard.training import gradients
from jaxshard.training.shrink import alike, alone, shrink


def check(capsys, *argv: str) -> tuple[int, dict]:
    code = run(["check", "--fake-devices", "8", "--json", *argv])
    return code, json.loads(capsys.readouterr().out)


def test_a_sound_layout_is_the_same(capsys):
    before = jax.config.read("jax_enable_x64")
    code, result = check(
        capsys, "--mesh", "replica=2,dp=2,tp=2", "--zero", "3", "--model.preset", "gpt2-124m", "--model.dropout", "0.1",
        "--parallel.accumulation", "2", "--optim.name", "lion",
    )  # fmt: skip
    assert code == 0 and result["same"] and result["faults"] == [] and result["initial_equal"]
    assert {tensor["path"] for tensor in result["tensors"]} >= {"blocks.attention.query_bias", "embedding.positions"}
    assert max(tensor["gradient"] for tensor in result["tensors"]) < 1e-12
    assert result["model"]["n_layers"] == 2 and result["model"]["dropout"] == 0.1
    assert jax.config.read("jax_enable_x64") == before


def test_a_wrong_layout_is_told_in_words_and_exit_code_1(capsys, monkeypatch):
    whole = gradients._whole
    monkeypatch.setattr(
        gradients,
        "_whole",
        lambda recipe, params, batch, ids, *more: whole(
            recipe, params, jax.tree.map(lambda a: a[:1], batch), ids[:1], *more
        ),
    )
    argv = ["check", "--mesh", "dp=2", "--fake-devices", "2", "--parallel.accumulation", "2"]
    assert run(argv) == 1
    said = capsys.readouterr().out
    assert "DIFFERENT: dp=2 --zero 0 does not compute the same model" in said and "gradient of blocks." in said


def test_a_pipeline_with_offload_too(capsys):
    code, result = check(
        capsys, "--mesh", "pp=2,dp=2,tp=2", "--zero", "1", "--model.n_layers", "8",
        "--parallel.schedule", "interleaved", "--parallel.offload", "optimizer", "--parallel.sequence_parallel", "true",
    )  # fmt: skip
    assert code == 0 and result["model"]["n_layers"] == 4


@pytest.mark.parametrize(
    "argv, part",
    [
        (["--mesh", "tp=3", "--fake-devices", "3"], "n_heads = 4"),
        (["--mesh", "dp=2", "--tolerance", "0"], "tolerance"),
        (["--mesh", "dp=2", "--devices", "tpu"], "fp64"),
    ],
)
def test_bad_input_is_one_line(argv, part, capsys):
    assert run(["check", *argv]) == 2
    said = capsys.readouterr().err
    assert part in said and said.count("\n") == 1


def test_alike_keeps_shared_factors():
    assert alike(4096, 16, 8) == 16 and alike(4096, 16, 32) == 32 and alike(50257, 16, 8) == 17
    assert alike(3, 16, 8) == 3 and alike(7, 2, 4, 3) == 5
    assert all(math.gcd(alike(n, 5, 12), 12) == math.gcd(n, 12) for n in range(1, 60))


SHAPES = [MeshShape(data=4, model=2), MeshShape(data=2, model=4, stage=2), MeshShape(replica=2, data=4, model=16)]


FITTING = [
    (preset, shape)
    for preset in ("gpt2-124m", "llama3-8b", "llama3.2-3b", "llama2-7b")
    for shape in SHAPES
    if architecture(ModelConfig(preset=preset)).n_heads % shape.model == 0
]


@pytest.mark.parametrize("preset, shape", FITTING, ids=str)
def test_shrinking_keeps_what_decides_the_sharding(preset, shape):
    arch = architecture(ModelConfig(preset=preset), None, 1024)
    groups = grouped(
        global_batch=shape.batch_ways * 32, accumulation=4, remat="dots", sequence_parallel=True, loss_chunk=300, zero=3
    )
    config = Config(model=ModelConfig(preset=preset), data=DataConfig(seq_len=1024), **groups)
    small = shrink(config, arch, shape)
    new = architecture(small.model, None, small.data.seq_len)
    assert new.parameters < 1_000_000
    assert new.n_heads // new.n_kv_heads == arch.n_heads // arch.n_kv_heads and new.n_heads % shape.model == 0
    assert math.gcd(new.n_kv_heads, shape.model) == math.gcd(arch.n_kv_heads, shape.model)
    split = shape.data * shape.model
    for name in ("d_model", "d_ff"):
        assert math.gcd(getattr(new, name), split) == math.gcd(getattr(arch, name), split)
    pad = math.lcm(64, shape.stage * shape.model)
    assert (new.vocab_size % pad == 0) == (arch.vocab_size % pad == 0)
    assert new.n_layers % shape.stage == 0 and new.tie_embeddings == arch.tie_embeddings
    assert (new.rope_scaling, new.rope_theta, new.family) == (arch.rope_scaling, arch.rope_theta, arch.family)
    kept = ("accumulation", "remat", "sequence_parallel", "schedule")
    assert all(getattr(small.parallel, name) == getattr(config.parallel, name) for name in kept)
    assert small.zero == 3 and small.train.precision == "fp64" and small.data.seq_len % shape.model == 0
    assert small.data.seq_len % small.parallel.loss_chunk and 1024 % 300
    single = alone(small)
    assert (single.mesh, single.zero, single.parallel.remat, single.parallel.accumulation) == ("dp=1", 0, "none", 1)
    assert single.model == small.model and single.train.global_batch == small.train.global_batch
