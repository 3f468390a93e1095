"""Training through a pipeline: fp64 gradients equal one device's with everything it is combined with.

The table of layouts (test_layouts.py) has every schedule on 2 and 4 stages with data and model axes; here are more.
"""

import re
from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest

from jaxshard.config import Config, DataConfig, ModelConfig, grouped
from jaxshard.errors import InputError
from jaxshard.parallel import schedule
from jaxshard.parallel.axes import AXES, MeshShape
from jaxshard.training.checkpoint import Checkpoints
from jaxshard.training.describe import size_text, zero_notes
from jaxshard.training.invariance import compare, compile_quickly, one_step, synthetic_batch, wide_types
from jaxshard.training.pipeline_plan import pipeline_notes
from jaxshard.training.program import build_program
from jaxshard.training.shrink import alone
from jaxshard.training.start import first_or_restored, run_facts, unpadded
from jaxshard.xla import absent
from jaxshard.xla.absent import captured_stderr
from jaxshard.xla.collectives import collectives
from jaxshard.xla.compile import spmd_warnings
from jaxshard.xla.hardware import parse_target

T = 12
LLAMA = dict(family="llama", n_kv_heads=2, tie_embeddings=True, dropout=0.1)
GPT2 = dict(family="gpt2", n_kv_heads=4, tie_embeddings=False)


def config(mesh, model=LLAMA, zero=0, pack=True, n_layers=8, **train):
    sizes = dict(vocab_size=59, d_model=16, n_layers=n_layers, n_heads=4, head_dim=4, d_ff=24, max_seq_len=T)
    options = dict(global_batch=24, precision="fp64", z_loss=1e-3, loss_chunk=5)
    return Config(
        model=ModelConfig(**(sizes | model)),
        data=DataConfig(seq_len=T, pack=pack),
        **grouped(mesh=mesh, zero=zero, **options | train),
    )


def program(cfg):
    with wide_types():
        devices = np.prod([int(part.split("=")[1]) for part in cfg.mesh.split(",")])
        return build_program(cfg, jax.devices()[:devices])


def batch(cfg):
    return synthetic_batch(59, cfg.train.global_batch, T, cfg.data.pack)


@cache
def one_device(cfg):
    return one_step(program(cfg), batch(cfg), update=False)


def faults(cfg, update=False):
    """What disagrees with one device, or could not be partitioned."""
    with captured_stderr() as said:
        found = one_step(program(cfg), batch(cfg), update)
    warnings = [w.message for w in spmd_warnings(said.text)]
    return compare(found, one_device(alone(cfg))).faults() + warnings


FAST = {
    "1f1b": ("pp=4,dp=2", dict(zero=1, microbatches=4)),
    "gpipe": ("pp=2,dp=2,tp=2", dict(schedule="gpipe", microbatches=6, sequence_parallel=True)),
    "interleaved": ("pp=2,dp=2,tp=2", dict(schedule="interleaved", zero=1, accumulation=2, microbatches=3)),
    "zero-3": ("pp=2,dp=2,tp=2", dict(zero=3, accumulation=2, microbatches=2, remat="full", sequence_parallel=True)),
}


@pytest.mark.parametrize("name", FAST)
def test_gradients_equal_one_device(name):
    mesh, options = FAST[name]
    assert faults(config(mesh, **options)) == []


SLOW = {
    "one microbatch": ("pp=2,dp=2", dict(microbatches=1)),
    "one sequence each": ("pp=4,dp=2", dict(microbatches=12)),
    "zero-2": ("pp=2,dp=4", dict(zero=2, microbatches=3)),
    "zero-2 interleaved": ("pp=2,dp=2,tp=2", dict(zero=2, schedule="interleaved", virtual_stages=4, microbatches=4)),
    "zero-3 interleaved": ("pp=2,dp=4", dict(zero=3, schedule="interleaved", microbatches=6, remat="dots")),
    "zero-3 interleaved once": ("pp=4,dp=2", dict(zero=3, virtual_stages=2, microbatches=4, pipeline_gather="step")),
    "kv heads whole": ("pp=2,tp=4", dict(microbatches=8)),
    "names": ("pp=2,dp=2,tp=2", dict(microbatches=4, remat="names:residual,attention", zero=1)),
    "offload": ("pp=2,dp=2,tp=2", dict(microbatches=4, remat="offload", zero=1)),
    "gpt2": ("pp=2,dp=2,tp=2", dict(model=GPT2, pack=False, microbatches=4, zero=1)),
    "gpt2 zero-3": ("pp=4,dp=2", dict(model=GPT2, zero=3, microbatches=4, schedule="interleaved")),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_gradients_equal_one_device_with(name):
    mesh, options = SLOW[name]
    assert faults(config(mesh, **options)) == []


@pytest.mark.slow
def test_an_update_on_the_host_equals_one_device():
    cfg = config("pp=2,dp=2,tp=2", zero=1, microbatches=4, virtual_stages=2, offload="optimizer", offload_mode="host")
    plain = alone(cfg).with_parallel(offload="none", offload_mode=None)
    found = one_step(program(cfg), batch(cfg), update=True)
    assert compare(found, one_step(program(plain), batch(cfg), update=True)).faults() == []


def test_evaluation_equals_one_device_and_every_parameter_is_there_once():
    plain = config("dp=1", accumulation=1)
    mesh = config("pp=2,dp=2,tp=2", schedule="interleaved", microbatches=3, accumulation=2, zero=1)
    losses, counts = [], []
    for cfg in (plain, mesh):
        prog = program(cfg)
        with wide_types():
            state = compile_quickly(prog.init.lower(), prog)()
            args = state.params, prog.place(batch(cfg))
            loss, targets = compile_quickly(prog.evaluate.lower(*args), prog)(*args)
        losses.append((float(loss), int(targets)))
        rows = jax.tree.leaves(prog.model.weights, is_leaf=lambda x: hasattr(x, "rows"))
        whole = [a.size // a.shape[0] * row.rows for a, row in zip(jax.tree.leaves(state.params), rows, strict=True)]
        counts.append((sum(whole), prog.model.arch.parameters))
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    assert counts[0] == counts[1] == (counts[0][1],) * 2


def test_a_wrong_layer_number_is_seen(monkeypatch):
    """Interleaved layers are stored out of order; dropout must still go by their natural numbers."""
    cfg = config("pp=2,dp=2", schedule="interleaved", microbatches=2)
    expected = one_device(alone(cfg))
    prog = program(cfg)
    plain = replace(prog.recipe.model, dealt=(1, 1))
    prog = replace(prog, recipe=replace(prog.recipe, model=plain))
    assert any("gradient of blocks" in fault for fault in compare(one_step(prog, batch(cfg), False), expected).faults())


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16", "pure-bf16"])
@pytest.mark.parametrize("options", [dict(zero=1), dict(zero=3, schedule="interleaved")])
def test_sixteen_bits(precision, options):
    """Loss and gradient norm of a step are those of one device up to rounding."""
    cfg = config("pp=2,dp=2,tp=2", precision=precision, microbatches=4, **options)
    metrics = []
    for one in (cfg, replace(alone(cfg), train=replace(alone(cfg).train, precision=precision))):
        prog = build_program(one, jax.devices()[: 8 if one is cfg else 1])
        state = compile_quickly(prog.init.lower(), prog)()
        args = state, prog.place(batch(cfg))
        metrics.append(jax.device_get(compile_quickly(prog.step.lower(*args), prog)(*args)[1]))
    found, expected = metrics
    assert found["skipped"] == 0 and found["tokens"] == expected["tokens"]
    assert found["loss_scale"] == expected["loss_scale"] == (65536 if precision == "fp16" else 1)
    assert found["loss"] == pytest.approx(expected["loss"], rel=2e-3)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=2e-2)


@pytest.mark.parametrize(
    "mesh, options, words",
    [
        ("dp=2", dict(microbatches=4), ("parallel.microbatches is 4", "--parallel.accumulation 4", "pp=2")),
        ("dp=2", dict(schedule="gpipe"), ("parallel.schedule is 'gpipe'", "--mesh pp=2")),
        ("tp=2", dict(virtual_stages=2), ("parallel.virtual_stages is 2", "--mesh pp=2")),
        ("pp=2", dict(virtual_stages=2, schedule="1f1b"), ("virtual_stages is 2", "1f1b", "interleaved")),
        ("pp=2", dict(pipeline_gather="step"), ("pipeline_gather is 'step'", "--zero 0", "--zero 3")),
        ("pp=4", dict(n_layers=6), ("6 layers on 4 stages", "4 or 8 layers", "3 stages")),
        ("pp=2", dict(n_layers=6, virtual_stages=4), ("6 layers on 2 stages x 4 chunks", "8 layers")),
        (
            "pp=2,dp=2",
            dict(microbatches=5),
            ("microbatches = 5", "12 sequences", "--parallel.microbatches 6", "batch 20"),
        ),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(mesh, options, words):
    with pytest.raises(InputError) as caught:
        program(config(mesh, **options))
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


@pytest.mark.parametrize(
    "mesh, batch, expected", [("pp=2,dp=2", 24, 4), ("pp=4", 24, 8), ("pp=2", 5, 5), ("pp=2", 2, 2)]
)
def test_the_default_number_of_microbatches(mesh, batch, expected):
    plan = program(config(mesh, global_batch=batch)).recipe.pipeline
    assert plan.schedule.microbatches == expected and plan.schedule.name == "1f1b"


def test_fewer_microbatches_than_stages_are_warned_of():
    few = program(config("pp=4", microbatches=2)).recipe.pipeline
    (line,), (warning,) = pipeline_notes(few)
    bubble = f"{100 * schedule.bubble_fraction(few.schedule):.1f} %"
    assert bubble in line and bubble in warning and "pp = 4" in warning
    assert pipeline_notes(program(config("pp=2", microbatches=2)).recipe.pipeline)[1] == []
    assert pipeline_notes(None) == ([], [])


@pytest.mark.parametrize("S, V", [(2, 2), (2, 4), (4, 2), (4, 1)])
def test_the_model_stores_layers_in_the_order_of_the_schedule(S, V):
    prog = program(config(f"pp={S}", virtual_stages=V))
    assert np.array_equal(prog.model.layer_order, schedule.layer_order(8, S, V).ravel())


@pytest.mark.parametrize(
    "mesh, options",
    [("dp=4", {}), pytest.param("pp=2,tp=2", dict(virtual_stages=4), marks=pytest.mark.slow)],
)
def test_a_checkpoint_goes_on_with_another_pipeline(tmp_path, mesh, options):
    """Parameters, masters and moments of an interleaved run keep their layers."""
    meshes = [("pp=2,dp=2", dict(virtual_stages=2)), (mesh, options)]
    natural = []
    for step, (mesh, options) in enumerate(meshes, 1):
        prog = build_program(config(mesh, precision="bf16", zero=1, **options), jax.devices()[:4])
        saved = Checkpoints(tmp_path)
        state, found = first_or_restored(prog, saved, saved.latest())
        assert found == step - 1
        names = jax.tree.structure(state).flatten_up_to(prog.logical_axes)
        if step == 1:  # Moments begin as zeros: make every entry of everything different.
            mark = lambda a: a + jax.numpy.arange(a.size, dtype=a.dtype).reshape(a.shape)
            state = jax.device_put(jax.tree.map(mark, state), prog.shardings)
        places = prog.model.layer_places
        order = lambda a, axes, places=places: np.take(a, places, axes.index("layers")) if "layers" in axes else a
        leaves = [np.asarray(a, np.float64) for a in jax.tree.leaves(state)]
        natural.append([order(a, axes) for a, axes in zip(leaves, names, strict=True)])
        saved.save(step, state, run_facts(prog), axes=prog.logical_axes, sizes=unpadded(prog))
        saved.wait()
    assert len(natural[0]) > 40
    assert all(np.array_equal(a, b) for a, b in zip(*natural, strict=True))


def travelling(target, mesh, cfg):
    """(program, collectives of its compiled step) on faked or absent devices."""
    placed = absent.mesh_for(parse_target(target), mesh)
    prog = build_program(cfg, list(placed.devices.flat), mesh=placed)
    lowered = prog.step.lower(prog.abstract, prog.abstract_batch())
    text = (compile_quickly(lowered, prog) if target.startswith("cpu") else lowered.compile()).as_text()
    return prog, collectives(text, dict(zip(AXES, prog.layout.shape.sizes, strict=True)))


needs_gpu = pytest.mark.skipif(
    not absent._installed("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12"),
    reason="GPU compiler not installed (jaxshard[gpu])",
)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize("target", ["cpu:8", pytest.param("h100:8", marks=[needs_gpu, pytest.mark.slow])])
def test_what_travels_in_a_tick(target, name):
    """On the stage axis sends, and sums of at most one microbatch; on the data axis nothing (ZeRO-1)."""
    untied = LLAMA | dict(tie_embeddings=False, attention="xla")
    cfg = config(
        "pp=4,dp=2", untied, schedule=name, microbatches=12, zero=1, precision="bf16", remat="full", loss_chunk=T
    )
    found = [one for one in travelling(target, MeshShape(stage=4, data=2), cfg)[1] if one.loops]
    values = cfg.train.global_batch // 2 // 12 * T * cfg.model.d_model
    assert {one.kind for one in found} == {"collective-permute", "all-reduce"}
    assert {one.axes for one in found} == {("stage",)}
    # CPUs reduce 16 bits in fp32.
    assert max(part.bytes for one in found for part in one.parts) == values * (4 if target == "cpu:8" else 2)


@pytest.mark.parametrize("zero, gather", [(2, None), (3, "tick"), (3, "step")])
@pytest.mark.parametrize("target", ["cpu:4", pytest.param("h100:4", marks=[needs_gpu, pytest.mark.slow])])
def test_what_zero_costs_is_said_to_the_byte(target, zero, gather):
    """Gradients of the layers are reduced in every backward half, parameters gathered in every tick or once."""
    untied = LLAMA | dict(tie_embeddings=False, attention="xla", max_seq_len=16)
    train = dict(microbatches=4, precision="fp32", remat="full", pipeline_gather=gather, global_batch=16)
    cfg = replace(config("pp=2,dp=2", untied, zero=zero, **train), data=DataConfig(seq_len=16))
    prog, found = travelling(target, MeshShape(stage=2, data=2), cfg)
    # Gathers of layers bear their names; other constraints, the embedding and the loss are not of the layers.
    others = lambda one: any(word in one.op_name for word in ("embedding", "loss", "sharding_constraint"))
    shared = lambda one: others(one) and not re.search(r"weight_gather/\(?blocks\.", one.op_name)
    data = [one for one in found if one.axes == ("data",) and one.loops and not shared(one)]
    total = lambda *kinds: sum(one.total_bytes for one in data if one.kind in kinds)
    lines = zero_notes(prog)
    # CPUs form no reduce-scatter.
    assert f": {size_text(total('all-reduce', 'reduce-scatter'))} a step" in lines[0]
    if gather == "tick":
        assert f"in each tick: {size_text(total('all-gather'))} a step" in lines[1]
    else:
        assert total("all-gather") == 0
    assert len(lines) == zero - 1
    assert zero_notes(replace(prog, layout=replace(prog.layout, zero=1))) == []


@needs_gpu
@pytest.mark.slow
def test_memory_grows_with_the_slots_of_the_schedule_only():
    """1F1B's temporaries stay within 2 % from 8 to 64 microbatches; GPipe's grow by the inputs that it keeps."""
    model = dict(family="llama", tie_embeddings=False, attention="xla", d_model=256, d_ff=512, max_seq_len=128)
    found, slots = {}, {}
    for name, count in (("1f1b", 8), ("1f1b", 64), ("gpipe", 8), ("gpipe", 64)):
        train = dict(schedule=name, microbatches=count, global_batch=2 * count, zero=1, precision="bf16", remat="full")
        cfg = replace(config("pp=4,dp=2", model, **train, loss_chunk=128), data=DataConfig(seq_len=128))
        placed = absent.mesh_for(parse_target("h100:8"), MeshShape(stage=4, data=2))
        prog = build_program(cfg, list(placed.devices.flat), mesh=placed)
        compiled = prog.step.lower(prog.abstract, prog.abstract_batch()).compile()
        found[name, count] = compiled.memory_analysis().temp_size_in_bytes
        table = prog.recipe.pipeline.schedule
        slots[name, count] = table.saved_slots + table.fwd_slots + table.bwd_slots
    assert abs(found["1f1b", 64] / found["1f1b", 8] - 1) < 0.02
    kept = (slots["gpipe", 64] - slots["gpipe", 8]) * 128 * 256 * 2
    assert found["gpipe", 64] - found["gpipe", 8] == pytest.approx(kept, rel=0.02)


def test_a_pipeline_over_several_data_groups_is_zero_1_by_default():
    default = lambda mesh: program(config(mesh).with_parallel(zero=None)).config.zero
    assert [default(mesh) for mesh in ("pp=2,dp=2", "pp=4", "dp=4", "pp=2,replica=2")] == [1, 0, 0, 0]
