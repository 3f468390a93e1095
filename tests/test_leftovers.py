"""A saved run on another mesh: what only its own mesh had stops no command, and what the user gives is still judged."""

import itertools
import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from jaxshard.commands.cli import run
from jaxshard.commands.generate import _for_generation
from jaxshard.config import Config, DataConfig, LogConfig, ModelConfig, grouped
from jaxshard.config.options import Given
from jaxshard.errors import InputError
from jaxshard.models.presets import architecture
from jaxshard.parallel.mesh import parse_mesh, resolve_mesh
from jaxshard.training import loop, start
from jaxshard.training.leftovers import for_forward, own_devices
from jaxshard.training.program import build_program

NONE = Given({})


CONFIG = Config(
    fake_devices=4,
    model=ModelConfig(family="llama", d_model=8, n_layers=4, n_heads=4, n_kv_heads=4, head_dim=2, d_ff=16),
    data=DataConfig(path=__file__, seq_len=32, eval_fraction=0.5),
    log=LogConfig(every=1, tensorboard=False),
    **grouped(mesh="pp=2,dp=2", steps=1, global_batch=8, accumulation=2, microbatches=2, virtual_stages=2),
)
"""With every option that only a mesh such as its own has."""


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory) -> Path:
    """A run, as training leaves it, with a checkpoint of step 1."""
    folder = tmp_path_factory.mktemp("leftovers") / "run"
    (folder / "texts").mkdir(parents=True)
    for n in range(8):
        (folder / "texts" / f"{n}.txt").write_text(f"{n} is a number " * 20)
    config = replace(CONFIG, data=replace(CONFIG.data, path=str(folder / "texts")))
    _, program = start.open_run(config)
    with start.checkpoints(replace(config, output=str(folder))) as saved:
        padding = dict(axes=program.logical_axes, sizes=start.unpadded(program))
        saved.save(1, program.init(), start.run_facts(program), **padding)
    start.write_config(start.resolved(program.config, program), folder)
    return folder


@pytest.fixture
def copied(pipeline, tmp_path) -> Path:
    return shutil.copytree(pipeline, tmp_path / "copy")


@pytest.mark.slow
def test_a_run_is_evaluated_alike_on_any_mesh(pipeline, capsys):
    """A batch of 8 rows that 3 devices do not divide, and layers that fill other stages."""
    found = []
    for mesh in ("dp=1", "dp=3", "pp=4"):
        assert run(["eval", "--output", str(pipeline), "--mesh", mesh, "--json"]) == 0, capsys.readouterr().err
        found.append(json.loads(capsys.readouterr().out))
    for other in found[1:]:
        assert other["eval_tokens"] == found[0]["eval_tokens"] > 0
        assert other["eval_loss"] == pytest.approx(found[0]["eval_loss"], rel=1e-5)


@pytest.mark.slow
def test_a_run_writes_on_any_mesh(pipeline, capsys):
    options = ["--mesh", "dp=3", "--max_new_tokens", "1", "--greedy", "--json"]
    assert run(["generate", "--output", str(pipeline), *options]) == 0, capsys.readouterr().err
    assert json.loads(capsys.readouterr().out)["step"] == 1


MESHES = ("dp=1", "dp=8", "dp=3", "pp=4", "pp=2,tp=2", "pp=2,dp=3", "replica=2,tp=4")
ODD = {
    "as it is": {},
    "offload": {"offload": "optimizer", "offload_mode": "host"},
    "remat": {"remat": "offload"},
    "gather": {"pipeline_gather": "step"},
    "sequence": {"sequence_parallel": True},
    "whole": {"allow_replicated": ("blocks.norm1.scale",)},
}


@pytest.mark.parametrize("name", ODD)
def test_what_only_training_has_stops_neither_eval_nor_generate(name):
    for zero, mesh in itertools.product((1, 3), MESHES):
        shape = resolve_mesh(mesh, math.prod(parse_mesh(mesh).values()))
        config = CONFIG.with_parallel(mesh=mesh, zero=zero, **ODD[name])
        config = replace(config, model=replace(config.model, attention="cudnn"))
        arch = architecture(config.model, 257, 32)
        for fitting in (for_forward(NONE, config, arch, shape), _for_generation(config, NONE, 257, shape)):
            program = build_program(fitting, jax.devices()[: shape.devices], 257)
            assert program.layout.zero == (3 if zero == 3 else 0) and fitting.parallel.offload == "none"


@pytest.mark.parametrize(
    "command, options, words",
    [
        ("eval", "--mesh dp=1 --parallel.microbatches 4", "parallel.microbatches is 4, but without stages"),
        ("generate", "--mesh dp=1 --parallel.virtual_stages 2", "parallel.virtual_stages is 2, but without stages"),
        ("eval", "--mesh pp=4 --parallel.virtual_stages 2", "4 layers on 4 stages x 2 chunks"),
        ("eval", "--mesh dp=3 --zero 3", "cannot be sharded as --zero asks"),
        ("eval", "--mesh dp=3 --train.global_batch 8", "train.global_batch = 8 does not divide by dp 3"),
        ("eval", "--mesh dp=1 --parallel.sequence_parallel true", "parallel.sequence_parallel splits"),
        (
            "train --resume",
            "--mesh dp=4 --parallel.allow_replicated [blocks.norm1.scale]",
            "parallel.allow_replicated = [blocks",
        ),
        (
            "eval",
            "--mesh dp=1 --parallel.allow_replicated [blocks.norm1.scale]",
            "with ZeRO-0 every weight may stay whole",
        ),
        ("train --resume", "--train.loss_scale 4", "train.loss_scale = 4 changes nothing: only fp16"),
        ("train --resume", "--parallel.offload_mode host", "parallel.offload_mode is 'host'"),
        ("train --resume", "--mesh dp=1 --parallel.microbatches 4", "parallel.microbatches is 4, but without stages"),
    ],
)
def test_what_the_user_gives_is_still_refused(pipeline, command, options, words, capsys):
    assert run([*command.split(), "--output", str(pipeline), *options.split()]) == 2
    error = capsys.readouterr().err
    assert words in error and "config.yaml" not in error and error.count("\n") == 1


def test_a_run_goes_on_without_what_the_mesh_does_not_have(copied, monkeypatch, capsys):
    monkeypatch.setattr(loop, "_compile", lambda *_: (_ for _ in ()).throw(InputError("it would compile now")))
    assert run(["train", "--resume", "--output", str(copied), "--mesh", "dp=4", "--train.steps", "2"]) == 2
    said = capsys.readouterr().out
    (line,) = [line for line in said.splitlines() if line.startswith("left out")]
    for part in ("zero 1", "parallel.microbatches 2", "parallel.virtual_stages 2"):
        assert part in line
    text = (copied / "config.yaml").read_text()
    assert "microbatches: null" in text and "virtual_stages: null" in text and "zero: 0" in text
    assert run(["train", "--resume", "--output", str(copied)]) == 2
    captured = capsys.readouterr()
    assert "left out" not in captured.out and "it would compile now" in captured.err


def test_a_batch_that_does_not_divide_says_whose_it_is(pipeline, capsys):
    for mesh, words in (
        ("dp=3", "train.global_batch = 8 does not divide by dp 3"),
        ("dp=8", "parallel.accumulation = 2 does not divide the 1 sequence that each of 8 data groups has"),
    ):
        assert run(["train", "--resume", "--output", str(pipeline), "--mesh", mesh, "--train.steps", "2"]) == 2
        error = capsys.readouterr().err
        assert words in error and f"{pipeline}/config.yaml" in error and re.search(r"--(train|parallel)\.", error), (
            error
        )
        assert error.count("\n") == 1


def test_a_file_beside_resume_states_the_run_in_full(pipeline, capsys):
    options = ["--config", str(pipeline / "config.yaml"), "--mesh", "dp=1", "--fake_devices", "1"]
    assert run(["train", "--resume", "--output", str(pipeline), *options]) == 2
    assert "parallel.microbatches is 2, but without stages there is no pipeline" in capsys.readouterr().err


def test_faked_devices_of_the_run_do_not_bind_another_mesh():
    saved = Config(fake_devices=4, **grouped(mesh="dp=8"))
    assert own_devices(saved, Given({"mesh": "dp=8"})).fake_devices is None
    assert own_devices(saved, NONE) == own_devices(saved, Given({"mesh": "dp=8", "fake_devices": "4"})) == saved
    for mesh in ("dp=-1", "auto"):
        assert own_devices(Config(fake_devices=4, **grouped(mesh=mesh)), Given({"mesh": mesh})).fake_devices == 4
