"""The small model that `check` computes lies on the mesh as the user's own: weights and moments, dim by dim."""

import random

import jax
import pytest

from jaxshard.analysis.state_bytes import padded, table_of
from jaxshard.commands.check import lies_otherwise
from jaxshard.commands.cli import run
from jaxshard.config import Config, DataConfig, ModelConfig, OptimConfig, grouped
from jaxshard.errors import InputError
from jaxshard.models.presets import PRESETS, architecture
from jaxshard.parallel.axes import MeshShape
from jaxshard.parallel.mesh import resolve_mesh
from jaxshard.parallel.rules import weight_specs
from jaxshard.training import shrink as shrink_module
from jaxshard.training.invariance import wide_types
from jaxshard.training.program import build_program, check_fit
from jaxshard.training.shrink import shrink

SHAPES = [
    MeshShape(data=4),
    MeshShape(data=8),
    MeshShape(replica=2, data=3),
    MeshShape(data=2, model=4),
    MeshShape(stage=2, data=2, model=2),
    MeshShape(data=64, model=8),
]


def places(config: Config, shape: MeshShape) -> list:
    """Specs of all weights and moments, from shapes and rules alone."""
    table = table_of(architecture(config.model, None, config.data.seq_len), config.optim, "fp32")
    specs = lambda row: weight_specs(padded(row, shape), row.axes, shape, config.zero or 0)
    weights = [(row.path, row.axes, specs(row)) for row in table.weights]
    return weights + [(row.path, row.axes, specs(row).optimizer) for row in table.moments]


def differences(config: Config, shape: MeshShape) -> list:
    """What lies otherwise in the small model; [] where the mesh does not fit the full one."""
    arch = architecture(config.model, None, config.data.seq_len)
    try:
        check_fit(config, arch, shape)
    except InputError:
        return []
    small = shrink(config, arch, shape)
    # Widths keep the factors that they share with dp x tp, so many devices need a wide model.
    assert shape.data * shape.model > 8 or architecture(small.model).parameters < 1_000_000
    full, scaled = places(config, shape), places(small, shape)
    return [(a, b) for a, b in zip(full, scaled, strict=True) if a != b]


def preset_config(preset: str, shape: MeshShape, zero: int, optim: str) -> Config:
    seq_len = min(1024, PRESETS[preset]["max_seq_len"])
    return Config(
        model=ModelConfig(preset=preset), data=DataConfig(seq_len=seq_len), optim=OptimConfig(name=optim),
        **grouped(global_batch=4 * shape.batch_ways, zero=zero),
    )  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_preset_lies_as_the_full_one(shape):
    for number, preset in enumerate(PRESETS):
        for zero, optim in ((3, "adamw"), (number % 3, ("adamw", "adafactor")[number % 2])):
            assert differences(preset_config(preset, shape, zero, optim), shape) == [], (preset, zero, optim)


def drawn(draw: random.Random) -> tuple[Config, MeshShape]:
    """A small odd configuration."""
    pick = draw.choice
    shape = MeshShape(
        replica=pick([1, 1, 2, 3]), stage=pick([1, 1, 2, 4]), data=pick([1, 2, 3, 4, 8]), model=pick([1, 1, 2, 3])
    )
    kv, family = pick([1, 2, 3, 4, 5, 6]), pick(["llama", "gpt2"])
    each = pick([1, 2, 3, 4]) if family == "llama" else 1
    model = ModelConfig(
        family=family, vocab_size=pick([2, 50, 257, 1024, 50257]), d_model=pick([12, 36, 48, 60, 64, 96, 100, 256]),
        head_dim=pick([2, 4, 6, 10, 16, 64]), n_kv_heads=kv, n_heads=kv * each,
        n_layers=pick([4, 12]), d_ff=pick([24, 36, 96, 100, 192]), max_seq_len=pick([16, 30, 64, 127]),
    )  # fmt: skip
    optim = OptimConfig(name=pick(["adamw", "adafactor"]))
    groups = grouped(global_batch=8 * shape.batch_ways, zero=pick([0, 1, 2, 3]))
    return Config(model=model, data=DataConfig(seq_len=16), optim=optim, **groups), shape


def test_odd_sizes_lie_as_the_full_ones():
    draw = random.Random(0)
    for _ in range(80):
        config, shape = drawn(draw)
        assert differences(config, shape) == [], (config.model, shape, config.zero, config.optim.name)


@pytest.mark.parametrize(
    "preset, mesh, optim", [("tinyllama-1.1b", "dp=8", "adamw"), ("gpt2-774m", "dp=8", "adafactor")]
)
def test_the_built_programs_lie_alike(preset, mesh, optim):
    full, small = built(preset, mesh, optim)
    assert lies_otherwise(full, small) == []


def built(preset: str, mesh: str, optim: str):
    shape = resolve_mesh(mesh, 8)
    config = preset_config(preset, shape, 3, optim)
    full = build_program(config.with_parallel(mesh=mesh), jax.devices()[:8])
    with wide_types():
        return full, build_program(shrink(full.config, full.model.arch, shape), jax.devices()[:8])


def test_what_lies_otherwise_is_told(monkeypatch, capsys):
    """Where no small model lies as the full one, nothing is called the same in silence."""
    monkeypatch.setattr(shrink_module, "TRIED", 0)
    found = lies_otherwise(*built("toy-10m", "dp=8", "adamw"))
    assert {"array": "embedding.tokens", "full": "embed on dp", "scaled": "vocab on dp"} in found
    assert {each["array"].partition(" ")[0] for each in found} >= {"moment", "embedding.tokens"}


@pytest.mark.slow
def test_the_command_tells_it(monkeypatch, capsys):
    monkeypatch.setattr(shrink_module, "TRIED", 0)
    argv = ["check", "--mesh", "dp=2", "--fake-devices", "2", "--zero", "3", "--model.preset", "toy-10m"]
    assert run(argv) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "SAME: dp=2 --zero 3 computes the same model as one device, but" in said
    assert "arrays lie otherwise than in your model (listed below)" in said
    assert "Placed otherwise in the scaled-down model" in said and "embedding.tokens" in said
