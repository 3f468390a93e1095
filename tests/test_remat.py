"""Rematerialisation: what is kept falls from policy to policy, gradients stay, and a gathered weight is never kept."""

from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layout_table import table

from jaxshard.config import Config, DataConfig, ModelConfig, grouped
from jaxshard.errors import InputError
from jaxshard.models.layers import DOT_NAMES, SAVED_NAMES
from jaxshard.parallel import remat
from jaxshard.planner.confirm import compile_step
from jaxshard.training.gradients import gradients
from jaxshard.training.invariance import compile_quickly, synthetic_batch
from jaxshard.training.program import Program, build_program
from jaxshard.xla import absent
from jaxshard.xla.compile import Compiled
from jaxshard.xla.hardware import parse_target

needs_tpu = pytest.mark.skipif(not absent._installed("libtpu"), reason="TPU compiler not installed (jaxshard[tpu])")
needs_gpu = pytest.mark.skipif(
    not absent._installed("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12"),
    reason="GPU compiler not installed (jaxshard[gpu])",
)


def config(mesh: str, zero: int = 0, batch: int = 8, length: int = 32, remat: str = "none", **model: Any) -> Config:
    sizes = dict(family="llama", d_model=32, n_layers=4, n_heads=4, n_kv_heads=4, d_ff=64, vocab_size=64, dropout=0.1)
    return Config(
        model=ModelConfig(**(sizes | model)),
        data=DataConfig(seq_len=length),
        **grouped(mesh=mesh, zero=zero, global_batch=batch, remat=remat),
    )


def program(devices: int, *args: Any, **options: Any) -> Program:
    return build_program(config(*args, **options), jax.devices()[:devices])


def temporaries(made: Program) -> int:
    """Bytes of the compiled step beside its arguments and results."""
    step = compile_quickly(made.step.lower(made.abstract, made.abstract_batch()), made)
    return step.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_temporaries_fall_in_order(family):
    none, dots, one, full = (
        temporaries(program(2, "dp=2", remat=kind, family=family)) for kind in ("none", "dots", "names:query", "full")
    )
    assert none > dots > one > full
    # What dots keeps beside full is those arrays of every layer: named outputs [B / 2, T, their width] in fp32.
    widths = {"mlp_gate": 64 if family == "llama" else 0, "mlp_up": 64}
    kept = sum(widths.get(name, 32) for name in DOT_NAMES) * 4 * 4 * 32 * 4
    assert one - full == pytest.approx(4 * 4 * 32 * 32 * 4, rel=0.25) and dots - full < 1.25 * kept


@cache
def gradients_under(kind: str) -> dict[str, np.ndarray]:
    made = program(4, "dp=2,tp=2", 3, length=8, remat=kind)
    params = compile_quickly(made.init.lower(), made)().params
    args = (params, made.place(synthetic_batch(64, 8, 8, True)), jnp.int32(5), jnp.float32(1))
    found = compile_quickly(jax.jit(partial(gradients, made.recipe)).lower(*args), made)(*args)[0]
    return {jax.tree_util.keystr(path): np.asarray(g) for path, g in jax.tree_util.tree_leaves_with_path(found)}


@pytest.mark.parametrize("kind", ["dots", "full", "offload", "names:attention,mlp_hidden"])
def test_gradients_are_those_of_none_with_dropout_on(kind):
    for path, expected in gradients_under("none").items():
        assert np.abs(gradients_under(kind)[path] - expected).max() <= 1e-6 * np.abs(expected).max(), path


def test_the_layout_table_holds_every_policy_to_one_device():
    kinds = {case.train.get("remat", "none").partition(":")[0] for case in table.CASES}
    assert kinds == {"none", "dots", "full", "offload", "names"}


def growth_per_layer(zero: int) -> float:
    """Bytes by which the step's temporaries grow with one more layer whose weights are large and activations small."""
    wide = dict(d_model=64, d_ff=256, dropout=0.0, n_kv_heads=4)
    few, many = (temporaries(program(8, "dp=8", zero, length=4, n_layers=n, **wide)) for n in (2, 6))
    return (many - few) / 4


LAYER = 4 * (4 * 64 * 64 + 3 * 64 * 256)
"""Bytes of one layer's matrices, gathered."""


def test_gathered_weights_are_not_kept_for_the_backward_pass():
    assert growth_per_layer(3) < 0.75 * LAYER


def test_a_policy_that_keeps_gathered_weights_is_seen(monkeypatch):
    monkeypatch.setattr(remat, "_all_but_weights", lambda *_, **__: True)
    assert growth_per_layer(3) > LAYER


def test_names_that_do_not_exist_are_refused():
    assert remat.parse_remat("names:query,mlp_out", SAVED_NAMES) == ("query", "mlp_out")
    for text, part in (("dot", "'dots'"), ("names:querry", "'query'"), ("names:", "no activation"), ("", "not known")):
        with pytest.raises(InputError, match=part):
            remat.parse_remat(text, SAVED_NAMES)


def test_every_name_exists_in_the_model():
    """A name that no activation has would keep nothing, in silence."""
    for family in ("llama", "gpt2"):
        made = program(1, "dp=1", length=8, family=family)
        args = (made.abstract.params, made.abstract_batch(), made.abstract.step, jnp.float32(1))
        text = str(jax.make_jaxpr(partial(gradients, made.recipe))(*args))
        missing = {name for name in SAVED_NAMES if f"name={name}" not in text}
        assert missing <= ({"mlp_gate"} if family == "gpt2" else set())


@pytest.mark.slow
@pytest.mark.parametrize("target", [pytest.param("v5e:2x2", marks=needs_tpu), pytest.param("h100:4", marks=needs_gpu)])
def test_temporaries_fall_and_offload_holds_what_dots_keeps_in_host_memory(target):
    """Deep enough that activations, not what is fetched ahead from the host, decide."""
    layers, seen = 32, {}
    for kind in ("none", "dots", "full", "offload"):
        small = config("dp=4", length=512, remat=kind, d_model=256, n_heads=2, n_kv_heads=2, d_ff=512, n_layers=layers)
        compiled = compile_step(small, parse_target(target)).result
        assert isinstance(compiled, Compiled) and compiled.spmd_warnings == ()
        seen[kind] = compiled.memory
    none, dots, full, offload = (seen[kind].temporaries for kind in ("none", "dots", "full", "offload"))
    assert none > dots > full > offload
    # [B / 4, T, width] in fp32 of every layer: its input, query to attention_out, gate and up; mlp_out nobody needs.
    kept = layers * 2 * 512 * (6 * 256 + 2 * 512) * 4
    assert seen["offload"].host == pytest.approx(kept, rel=0.01) and seen["full"].host == 0


def test_every_name_is_documented():
    rows = (Path(__file__).parent.parent / "docs" / "remat.md").read_text().splitlines()
    assert {row.split("`")[1] for row in rows if row.startswith("| `")} == {*SAVED_NAMES}
