"""What follows from a configuration is derived once, and the program is built from it."""

import math

import jax
import numpy as np
import pytest

from jaxshard.config import Config, DataConfig, ModelConfig, grouped
from jaxshard.errors import InputError
from jaxshard.models.presets import architecture
from jaxshard.parallel.axes import MeshShape
from jaxshard.parallel.mesh import resolve_mesh
from jaxshard.parallel.resolve import kv_heads_of_a_device, misfits, resolve
from jaxshard.training.program import build_program

MODEL = dict(family="llama", vocab_size=64, d_model=16, n_layers=4, n_heads=4, n_kv_heads=2, d_ff=32)


def settings(**options) -> Config:
    return Config(model=ModelConfig(**MODEL), data=DataConfig(seq_len=16), **grouped(**{"global_batch": 8} | options))


@pytest.mark.parametrize(
    "options, zero, tables, apart, schedule, chunks, microbatches, split",
    [
        (dict(mesh="dp=4,tp=2"), 0, 0, (), None, 1, 1, True),
        (dict(mesh="dp=2,tp=4", zero=1), 1, 2, (), None, 1, 1, False),
        (dict(mesh="dp=4,tp=2", zero=1, accumulation=2), 1, 1, ("data",), None, 1, 1, True),
        (dict(mesh="replica=2,dp=2,tp=2", zero=0, accumulation=2), 0, 0, ("replica", "data"), None, 1, 1, True),
        (dict(mesh="replica=2,dp=4", zero=3, accumulation=1), 3, 3, (), None, 1, 1, True),
        (dict(mesh="replica=2,dp=2", zero=3, accumulation=2), 3, 3, ("replica",), None, 1, 1, True),
        (dict(mesh="pp=2,dp=2"), 1, 1, ("data",), "1f1b", 1, 4, True),
        (dict(mesh="pp=2,dp=2,tp=2", virtual_stages=2), 1, 1, ("data",), "interleaved", 2, 4, True),
        (dict(mesh="pp=2", schedule="gpipe", microbatches=2), 0, 0, (), "gpipe", 1, 2, True),
    ],
)
def test_the_program_is_what_is_resolved(options, zero, tables, apart, schedule, chunks, microbatches, split):
    config = settings(**options)
    arch = architecture(config.model, None, 16)
    sizes = [int(part.partition("=")[2]) for part in options["mesh"].split(",")]
    devices = jax.devices()[: math.prod(sizes)]
    found = resolve(config, arch, resolve_mesh(config.mesh, len(devices)), "cpu")
    assert (found.zero, found.tables, found.apart, found.schedule) == (zero, tables, apart, schedule)
    assert (found.chunks, found.microbatches, found.split_kv, found.kernel) == (chunks, microbatches, split, "xla")
    assert found.parts == config.parallel.accumulation * microbatches
    program = build_program(config, devices)
    assert (program.layout.zero, program.layout.apart) == (zero, apart)
    plan = program.recipe.pipeline
    held = (plan.schedule.name, plan.schedule.chunks, plan.schedule.microbatches) if plan else (None, 1, 1)
    assert held == (schedule, chunks, microbatches)
    assert program.recipe.context.split_kv == split


def test_kv_heads_that_do_not_divide_are_all_on_every_device():
    arch = architecture(ModelConfig(**MODEL | dict(n_heads=16, n_kv_heads=8, head_dim=2)), None, 16)
    assert kv_heads_of_a_device(arch, np.array([1, 2, 8, 16])).tolist() == [8, 4, 1, 8]


def test_sizes_that_do_not_divide_are_named_with_their_axes():
    config = settings(global_batch=6)
    arch = architecture(config.model, None, 16)
    shape = MeshShape(replica=2, stage=3, data=2, model=8)
    assert [str(misfit) for misfit in misfits(config, arch, shape)] == [
        "model.n_heads = 4 does not divide by tp = 8",
        "model.n_layers = 4 does not divide by pp = 3",
        "train.global_batch = 6 does not divide by dp x replica = 4",
    ]


def test_a_kernel_that_cannot_be_had_is_refused():
    config = Config(model=ModelConfig(**MODEL, attention="cudnn"), **grouped(precision="bf16"))
    arch = architecture(config.model, None, 16)
    assert resolve(config, arch, MeshShape(), "gpu").kernel == "cudnn"
    with pytest.raises(InputError, match="needs a GPU and 16-bit precision; here are tpu and bf16"):
        resolve(config, arch, MeshShape(), "tpu")
