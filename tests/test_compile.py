"""Compiling for present and absent devices: memory, refusals, warnings, temporaries."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxshard.analysis.lock import check_writable
from jaxshard.commands import cli, explain
from jaxshard.config import Config, grouped
from jaxshard.errors import InputError, RunError
from jaxshard.parallel.axes import MeshShape
from jaxshard.xla import absent, compile
from jaxshard.xla.absent import captured_stderr, devices_for, mesh_for
from jaxshard.xla.collectives import module_collectives
from jaxshard.xla.compile import Compiled, DoesNotFit, compile_for, spmd_warnings
from jaxshard.xla.flops import computation_flops
from jaxshard.xla.hardware import GIB, parse_target
from jaxshard.xla.loops import Scope

AXES = {"replica": 1, "stage": 1, "data": 4, "model": 2}
needs_tpu = pytest.mark.skipif(not absent._installed("libtpu"), reason="TPU compiler not installed (jaxshard[tpu])")
needs_gpu = pytest.mark.skipif(
    not absent._installed("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12"),
    reason="GPU compiler not installed (jaxshard[gpu])",
)


def layered(target, layers=4, d=256, f=1024, batch=8, t=128, buffers=True):
    """A scan of column/row pairs, ZeRO-3 over data and tensor parallel over model, forward and backward."""
    mesh = mesh_for(target, MeshShape(data=target.count // 2, model=2))
    spec = lambda *axes: NamedSharding(mesh, PartitionSpec(*axes))
    array = lambda shape, *axes: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=spec(*axes))

    def step(up, down, x):
        def loss(up, down):
            def layer(h, w):
                gathered = lax.with_sharding_constraint(w[0], spec(None, "model"))
                back = lax.with_sharding_constraint(w[1], spec("model"))
                return lax.with_sharding_constraint(h + jnp.tanh(h @ gathered) @ back, spec("data")), None

            h, _ = lax.scan(jax.checkpoint(layer), x, (up, down))
            return (h.astype(jnp.float32) ** 2).sum()

        grads = jax.grad(loss, argnums=(0, 1))(up, down)
        return tuple(
            map(lax.with_sharding_constraint, grads, (spec(None, "data", "model"), spec(None, "model", "data")))
        )

    up = array((layers, d, f), None, "data", "model")
    down = array((layers, f, d), None, "model", "data")
    x = array((batch * target.count // 2, t, d), "data")
    return compile_for(target, jax.jit(step), up, down, x, buffers=buffers)


def test_cpu_program():
    result = layered(parse_target("cpu:8"))
    assert isinstance(result, Compiled)
    memory = result.memory
    assert memory.arguments == 2 * (2 * 4 * 256 * 1024 // 8 + 8 * 128 * 256)
    assert memory.peak == memory.arguments + memory.outputs - memory.aliased + memory.temporaries
    assert memory.host == 0
    assert result.fits
    assert result.compile_seconds > 0
    assert result.spmd_warnings == ()


def test_largest_temporaries_are_named_and_fill_the_heap():
    result = layered(parse_target("cpu:8"), layers=6, t=512)
    assert result.buffers is not None
    sizes = [one.bytes for one in result.buffers.temporaries]
    assert sizes == sorted(sizes, reverse=True)
    assert 0.9 * result.buffers.heap_bytes <= sum(sizes) <= result.buffers.heap_bytes
    # The layers' inputs, saved for the backward pass, are the largest: [6, 8, 512, 256] in f32 or bf16.
    assert "[6,8,512,256]" in result.buffers.temporaries[0].shape
    assert any(one.source.startswith(__file__) for one in result.buffers.temporaries)


def test_without_buffers():
    f = jax.jit(jnp.sin)
    result = compile_for(parse_target("local"), f, jnp.ones((64,)), buffers=False)
    assert isinstance(result, Compiled)
    assert result.buffers is None
    assert result.memory.arguments == 256


def test_involuntary_rematerialization_is_caught(capfd):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("a", "b", "c"))
    spec = lambda *axes: NamedSharding(mesh, PartitionSpec(*axes))

    def clash(x):
        x = lax.with_sharding_constraint(jnp.cos(x), spec(("a", "b")))
        return lax.with_sharding_constraint(jnp.sin(x), spec(None, "c"))

    x = jax.ShapeDtypeStruct((16, 48), jnp.float32, sharding=spec())
    result = compile_for(parse_target("local"), jax.jit(clash), x)
    assert isinstance(result, Compiled)
    assert capfd.readouterr().err == ""
    (warning,) = result.spmd_warnings
    assert "sharding_constraint" in warning.op_name
    assert "[4,1" in warning.before or "{'a', 'b'}" in warning.before  # jax 0.10 and 0.12 print shardings differently
    assert "[1,2" in warning.after or "{'c'}" in warning.after


def test_warnings_are_parsed_once_each():
    line = (
        "W1129 15:50 1 spmd_partitioner.cc:656] [SPMD] Involuntary full rematerialization. The compiler cannot go from "
        "sharding {devices=[4,1,2]<=[8]} to {devices=[1,2,4]<=[8]} efficiently for HLO operation %x.1 = f32[4,48]{1,0} "
        'copy(%y), metadata={op_name="jit(f)/sin"}. As the last resort, SPMD will replicate the tensor.\n'
    )
    (warning,) = spmd_warnings("noise\n" + line + line)
    assert warning.operation == "%x.1 = f32[4,48]{1,0} copy"
    assert (warning.op_name, warning.before) == ("jit(f)/sin", "{devices=[4,1,2]<=[8]}")


@pytest.mark.parametrize(
    ("message", "needs", "available"),
    [
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (1.50T) "
            "exceeds available HBM (15.75G).",
            1.5 * 2**40,
            15.75 * GIB,
        ),
        (
            "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.25G of 15.75G hbm. Exceeded hbm "
            "capacity by 4.50G.",
            20.25 * GIB,
            15.75 * GIB,
        ),
        ("RESOURCE_EXHAUSTED: something else", 0, 15.75 * GIB),
    ],
)
def test_refusals_are_read(message, needs, available):
    refusal = compile._refusal(parse_target("v5e:2x4"), message)
    assert isinstance(refusal, DoesNotFit)
    assert (refusal.needs, refusal.available, refusal.fits) == (int(needs), int(available), False)
    assert compile._refusal(parse_target("v5e:2x4"), "INTERNAL: bug") is None


@needs_gpu
def test_an_array_beyond_64_bits_does_not_fit():
    target = parse_target("h100:8")
    here = NamedSharding(mesh_for(target, MeshShape(data=8)), PartitionSpec())
    x = jax.ShapeDtypeStruct((1, 2_000_000_000, 4, 500_000_000), jnp.float32, sharding=here)
    assert isinstance(compile_for(target, jax.jit(lambda x: x + 1), x), DoesNotFit)


def test_standard_error_is_captured_below_python(capfd):
    with captured_stderr() as said:
        os.write(2, b"from native code\n")
    os.write(2, b"after\n")
    assert "from native code" in said.text
    assert capfd.readouterr().err == "after\n"


@pytest.mark.parametrize(("name", "extra"), [("h100:8", "jaxshard[gpu]"), ("v5e:2x4", "jaxshard[tpu]")])
def test_missing_compiler_names_the_extra(name, extra, monkeypatch):
    monkeypatch.setattr(absent, "_installed", lambda *modules: False)
    absent._absent_devices.cache_clear()
    with pytest.raises(InputError) as error:
        devices_for(parse_target(name))
    assert f'pip install "{extra}"' in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--target h1000:8", ("unknown chip 'h1000'", "did you mean 'h100'")),
        ("--target cpu:4 --mesh dp=8", ("needs 8 devices, and target cpu:4 has 4: try --target cpu:8 or --mesh dp=4",)),
        ("--target cpu:8 --mesh dp=3,tp=2", ("needs 6 devices", "--target cpu:6 or --mesh dp=4,tp=2")),
        ("--target cpu:8 --mesh tp=3,dp=-1", ("needs 3 devices or a multiple", "try --target cpu:3")),
        ("--target cpu:8 --fake-devices 4", ("--fake_devices 4 and --target cpu:8 both say",)),
        ("--target h100:8 --devices cpu", ("--devices cpu and --target h100:8 both say",)),
        ("--report /proc/none/a.html", ("--report /proc/none/a.html: cannot be written",)),
        ("--report .", ("--report .: cannot be written (Is a directory)",)),
        ("--lock none/a.json", ("--lock none/a.json: cannot be written",)),
        ("--png /proc/none", ("--png /proc/none: cannot be written", "another folder")),
        ("--lock=", ("--lock is empty: name a file",)),
        ("--report=", ("--report is empty",)),
        ("--png=", ("--png is empty: name a folder",)),
    ],
)
def test_bad_input_is_one_line_that_names_the_fix(line, words, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert cli.run(["explain", *line.split()]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and all(word in error for word in words), error
    assert list(tmp_path.iterdir()) == []


def test_files_to_write_are_tried_and_nothing_stays(tmp_path):
    check_writable("--report", tmp_path / "new" / "deep" / "a.html")
    check_writable("--png", tmp_path / "new", folder=True)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "old.html").write_text("kept")
    check_writable("--report", tmp_path / "old.html")
    assert (tmp_path / "old.html").read_text() == "kept"


def test_mesh_must_use_the_target():
    with pytest.raises(InputError, match="4 devices and target cpu:8 has 8"):
        mesh_for(parse_target("cpu:8"), MeshShape(data=4))


def test_too_many_cpu_devices():
    with pytest.raises(InputError, match="1000"):
        devices_for(parse_target("cpu:1000"))


def axes_by_kind(result, axes):
    return {(one.kind, one.axes) for one in module_collectives(result.module, axes) if one.bytes > 1024}


@needs_gpu
@pytest.mark.parametrize("name", ["a100:8", "h100:8", "h200:8", "b200:8"])
def test_absent_gpus(name):
    target = parse_target(name)
    result = layered(target)
    assert isinstance(result, Compiled)
    assert result.fits
    assert result.memory.arguments == 2 * (2 * 4 * 256 * 1024 // 8 + 8 * 128 * 256)
    assert ("reduce-scatter", ("data",)) in axes_by_kind(result, AXES)
    assert ("all-gather", ("data",)) in axes_by_kind(result, AXES)
    assert ("all-reduce", ("model",)) in axes_by_kind(result, AXES)
    found = module_collectives(result.module, AXES)
    weights = 2 * 4 * 256 * 1024 // 2 * 2  # both, all layers, halved over model, bf16
    bytes_of = lambda kind: sum(one.total_bytes for one in found if one.kind == kind and one.bytes > 1024)
    assert bytes_of("all-gather") == 2 * weights  # forward and backward
    assert bytes_of("reduce-scatter") == weights
    assert bytes_of("all-reduce") == 2 * 4 * (8 * 128 * 256 * 2)  # [B,T,D] a layer, forward and backward
    assert {one.count for one in found if one.bytes > 1024} == {4}
    assert any(one.is_async for one in found) or name == "a100:8"  # whose arrays here are too small to be worth it


@needs_gpu
def test_gpu_hosts_are_contiguous():
    mesh = mesh_for(parse_target("h100:16"), MeshShape(data=4, model=4))
    hosts = np.vectorize(lambda device: device.process_index)(mesh.devices)
    assert hosts.shape == (1, 1, 4, 4)
    assert (hosts[0, 0, :2] == 0).all()
    assert (hosts[0, 0, 2:] == 1).all()


@needs_gpu
def test_gpu_program_that_is_too_large_does_not_fit():
    target = parse_target("h100:2")
    mesh = mesh_for(target, MeshShape(data=2))
    x = jax.ShapeDtypeStruct((2, 50_000_000_000), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec("data")))
    result = compile_for(target, jax.jit(jnp.sin), x)
    assert not result.fits


@needs_gpu
def test_cudnn_attention_of_absent_gpus():
    """[B,T,H,D] = [2,1024,4,64] a device: no [T,T] scores in memory, two products forward and five backward."""
    target = parse_target("h100:8")
    mesh = mesh_for(target, MeshShape(data=8))
    q = jax.ShapeDtypeStruct((16, 1024, 4, 64), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec("data")))

    def loss(q, k, v):
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
        return out.astype(jnp.float32).sum()

    result = compile_for(target, jax.jit(jax.grad(loss, argnums=(0, 1, 2))), q, q, q)
    assert isinstance(result, Compiled)
    assert result.memory.temporaries < 2 * 4 * 1024 * 1024  # one byte a score would be as much
    flops = computation_flops(Scope(result.module, result.module.entry))
    assert flops == 7 * 2 * 2 * 4 * 1024 * 1024 * 64


def offload(target, host=None):
    """One moment update with the moments in host memory: 16 MiB a device of each array."""
    mesh = mesh_for(target, MeshShape(data=4, model=2))
    here = NamedSharding(mesh, PartitionSpec("data", "model"))
    there = NamedSharding(mesh, PartitionSpec("data", "model"), memory_kind="pinned_host")
    array = lambda sharding: jax.ShapeDtypeStruct((8192, 4096), jnp.float32, sharding=sharding)

    def update(state, unused, grad):
        moment = jax.device_put(state["m"], jax.memory.Space.Device) * 0.9 + grad
        return {"w": state["w"] - moment, "m": jax.device_put(moment, jax.memory.Space.Host)}, moment.sum()

    jitted = jax.jit(update, donate_argnums=0, out_shardings=({"w": here, "m": there}, None))
    return compile_for(target, jitted, {"w": array(here), "m": array(there)}, array(here), array(here), host=host)


@needs_gpu
def test_host_memory_of_absent_gpus():
    moments = {"w": False, "m": True}
    result = offload(parse_target("h100:8"), host=((moments, False, False), (moments, False)))
    assert isinstance(result, Compiled)
    mib = 2**20
    assert result.memory.host == 16 * mib
    assert result.memory.arguments == 32 * mib  # w and grad; `unused` is dropped
    assert 32 * mib <= result.memory.temporaries < 34 * mib  # the moment on its way in and out
    assert result.memory.peak < 67 * mib
    forgotten = offload(parse_target("h100:8"))
    assert isinstance(forgotten, Compiled)
    assert forgotten.memory.temporaries < 18 * mib  # without being told, the way in is missing


@needs_tpu
def test_host_memory_of_absent_tpus():
    result = offload(parse_target("v5e:2x4"))
    assert isinstance(result, Compiled)
    assert (result.memory.host, result.memory.arguments) == (16 * 2**20, 32 * 2**20)
    assert result.memory.peak < 70 * 2**20


@needs_tpu
def test_absent_tpu():
    result = layered(parse_target("v5e:2x4"))
    assert isinstance(result, Compiled)
    assert result.memory.arguments == 2 * (2 * 4 * 256 * 1024 // 8 + 8 * 128 * 256)
    found = module_collectives(result.module, AXES)
    assert ("reduce-scatter", ("data",)) in axes_by_kind(result, AXES)
    assert ("all-reduce", ("model",)) in axes_by_kind(result, AXES)
    gathers = [one for one in found if one.kind == "all-gather" and one.axes == ("data",)]
    assert (
        sum(one.total_bytes for one in gathers) == 2 * 2 * 4 * 256 * 1024 // 2 * 2
    )  # both weights, forward and backward
    assert {one.count for one in gathers} == {4}
    assert result.buffers is not None
    assert result.memory.peak == result.buffers.device_bytes
    assert layered(parse_target("v5e:2x4"), buffers=False).memory == result.memory  # plan's figure is explain's


@needs_tpu
def test_tpu_program_that_is_too_large_is_refused_with_numbers():
    target = parse_target("v5e:2x2")
    mesh = mesh_for(target, MeshShape(data=4))
    x = jax.ShapeDtypeStruct((4, 40_000_000_000), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec("data")))
    result = compile_for(target, jax.jit(lambda x: x + 1), x)
    assert isinstance(result, DoesNotFit)
    assert result.available == target.chip.usable_bytes == int(15.75 * GIB)
    assert result.needs > 70 * GIB


@needs_tpu
@pytest.mark.parametrize("name", ["v4:2x2x1", "v4:4x4x4", "v5e:1x1", "v5e:2x4", "v5e:8x16", "v5p:2x2x2", "v6e:16x16"])
def test_tpu_devices(name):
    target = parse_target(name)
    devices = devices_for(target)
    assert len(devices) == target.count
    assert len({device.process_index for device in devices}) == target.hosts


@needs_tpu
def test_opening_absent_devices_is_quiet_and_needs_no_environment():
    code = (
        "from jaxshard.xla.absent import devices_for\n"
        "from jaxshard.xla.hardware import parse_target\n"
        "print(len(devices_for(parse_target('v5p:2x2x2'))))\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "JAX_PLATFORMS"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert (done.stdout, done.stderr) == ("8\n", "")


def test_gpu_description_names_every_field():
    text = absent.gpu_target_config(parse_target("h100:8"))
    for field in ("core_count: 132", "device_memory_size: 84942979072", "major: 9", 'platform_name: "CUDA"'):
        assert field in text


def test_a_fault_of_the_compiler_is_one_line(monkeypatch):
    """Met with absent GPUs and rows of 36: "Couldn't find output tile sizes that satisfy ..."."""

    def fails(*args, **kwargs):
        raise jax.errors.JaxRuntimeError("INTERNAL: Couldn't find output tile sizes\nmore\nand more")

    monkeypatch.setattr(explain, "compile_step", fails)
    with pytest.raises(RunError, match=r"^the compiler for cpu:8 .* failed.*tile sizes\. Odd sizes") as error:
        explain.explain_config(Config(**grouped(mesh="dp=8")), "cpu:8")
    assert "\n" not in str(error.value)
