"""The command inspect: presets and checkpoints, shown where no device can be had."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jaxshard.commands.cli import run
from jaxshard.commands.inspect import axes_of
from jaxshard.config import Config, DataConfig, ModelConfig, grouped
from jaxshard.models.presets import PRESETS
from jaxshard.training.checkpoint import Checkpoints, SavedArray
from jaxshard.training.program import build_program
from jaxshard.training.start import resolved, run_facts, write_config

ROOT = Path(__file__).parent.parent
NO_BACKEND = {**os.environ, "JAX_PLATFORMS": "nothing"}
"""With these variables whatever starts a backend fails."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run with checkpoints of steps 3 and 8: bf16 parameters, fp32 masters and moments, ZeRO-3 on two devices."""
    path = tmp_path_factory.mktemp("run")
    config = Config(
        output=str(path),
        model=ModelConfig(family="llama", d_model=32, n_layers=2, n_heads=4, n_kv_heads=2),
        data=DataConfig(seq_len=16),
        **grouped(mesh="dp=2", zero=3, steps=10, global_batch=2, precision="bf16"),
    )
    program = build_program(config, jax.devices()[:2], tokenizer_size=257)
    write_config(resolved(config, program), path)
    state = program.init()
    with Checkpoints(path / "checkpoints") as saved:
        for step in (3, 8):
            saved.save(step, state, run_facts(program))
    return path


def inspect_json(capsys, *options: str) -> dict:
    assert run(["inspect", "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_checkpoint_is_described_in_full(folder, capsys):
    found = inspect_json(capsys, "--output", str(folder))
    assert (found["step"], found["steps"]) == (8, [3, 8])
    assert found["config"]["train"]["precision"] == "bf16" and found["config"]["zero"] == 3
    assert found["meta"]["mesh"] == "dp=2" and found["meta"]["jax"] == jax.__version__
    arrays = {array["path"]: array for array in found["arrays"]}
    query = {"shape": [2, 32, 4, 8], "axes": ["layers", "embed", "heads", "head_dim"]}
    for path, dtype in (("params", "bfloat16"), ("masters", "float32")):
        array = arrays[f"{path}.blocks.attention.query"]
        assert array == query | {"path": array["path"], "dtype": dtype, "bytes": 2048 * (2 if path == "params" else 4)}
    assert arrays["step"] == {"path": "step", "shape": [], "dtype": "int32", "bytes": 4, "axes": None}
    moments = [array for path, array in arrays.items() if path.endswith("blocks.attention.query")]
    assert len(moments) == 4 and all(array["axes"] == query["axes"] for array in moments)
    assert [array["bytes"] for array in found["arrays"]] == sorted((a["bytes"] for a in arrays.values()), reverse=True)


def test_bytes_of_each_class_follow_from_the_number_of_parameters(folder, capsys):
    """AdamW under bf16: 2 + 4 + 4 + 4 bytes a parameter, the vocabulary's padding (257 to 320 rows) included."""
    found = inspect_json(capsys, "--output", str(folder), "--checkpoint", "3")
    assert found["step"] == 3
    classes = {entry["name"]: entry for entry in found["classes"]}
    held = found["parameters"] + 2 * 63 * 32
    assert classes["parameters"] == {
        "name": "parameters",
        "arrays": 12,
        "bytes": 2 * held,
        "dtypes": ["bfloat16"],
    }
    assert classes["fp32 masters"]["bytes"] == 4 * held and classes["fp32 masters"]["dtypes"] == ["float32"]
    assert 8 * held <= classes["optimizer moments"]["bytes"] < 8 * held + 100
    assert sum(entry["bytes"] for entry in classes.values()) == found["bytes"]
    assert sum(entry["arrays"] for entry in classes.values()) == len(found["arrays"])


def test_a_checkpoint_is_shown_without_a_device(folder):
    command = [sys.executable, str(ROOT / "run.py"), "inspect", "--output", str(folder)]
    done = subprocess.run(command, env=NO_BACKEND, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    for text in ("step 8 of 10", "others: 3", "fp32 masters", "masters.blocks.mlp.up", "layers, embed, mlp", "--json"):
        assert text in done.stdout
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["model.d_model", "32"] in rows and sum(row[:1] == ["model"] for row in rows) == 1 and "{" not in done.stdout
    started = subprocess.run(
        [sys.executable, "-c", "import jax; jax.devices()"], env=NO_BACKEND, capture_output=True, timeout=600
    )
    assert started.returncode != 0, "the variables do not keep a backend from starting: this test shows nothing"


def test_presets_are_shown_without_a_device_or_a_run():
    command = [sys.executable, "-X", "importtime", str(ROOT / "run.py"), "inspect", "--presets"]
    done = subprocess.run(command, env=NO_BACKEND, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "llama3.1-8b" in done.stdout and "8,030,261,248" in done.stdout
    assert not any(line.endswith((" jax", " orbax")) for line in done.stderr.splitlines())


def test_presets_as_values(capsys):
    rows = {row["name"]: row for row in inspect_json(capsys, "--presets")["presets"]}
    assert rows.keys() == PRESETS.keys()
    assert rows["gpt2-124m"]["parameters"] == 124_439_808 and rows["gpt2-124m"]["tie_embeddings"] is True
    assert rows["llama3-8b"]["n_kv_heads"] == 8


@pytest.mark.parametrize(
    "path, shape, expected",
    [
        ("moments.0.mu.head.out", (320, 32), ("vocab", "embed")),
        ("moments.0.v_row.head.out", (320,), None),
        ("moments.count", (), None),
        ("params.nothead.out", (320, 32), None),
    ],
)
def test_dims_have_names_where_an_array_has_its_weight_s_dims(path, shape, expected):
    array = SavedArray(path, shape, "float32")
    assert array.bytes == 4 * math.prod(shape)
    assert axes_of(array, {"head.out": ("vocab", "embed")}) == expected


def test_a_missing_checkpoint_is_named(folder, capsys):
    assert run(["inspect", "--output", str(folder), "--checkpoint", "5"]) == 2
    assert "no complete checkpoint of step 5; there are 3, 8" in capsys.readouterr().err


def test_a_folder_without_a_run_is_refused(tmp_path, capsys):
    assert run(["inspect", "--output", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err
