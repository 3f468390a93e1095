"""Checkpoints: bit-exact, resharded, complete or not there, and clear about what is wrong."""

import asyncio
import contextlib
import gc
import json
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxshard.errors import InputError
from jaxshard.training.checkpoint import Checkpoints, complete_steps, describe


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    step: jax.Array
    params: Any
    moments: Any
    scale: Any = None


def sharding(data, model, *spec, kind=None):
    devices = np.array(jax.devices()[: data * model]).reshape(data, model)
    return NamedSharding(Mesh(devices, ("data", "model")), PartitionSpec(*spec), memory_kind=kind)


def small(step=1, size=8):
    """A state on one device."""
    params = {"blocks": {"query": jnp.arange(size * 4.0).reshape(size, 4) + step}, "scale": jnp.ones(4)}
    return State(jnp.int32(step), params, optax.adam(1e-3).init(params))


def abstract(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.fixture
def saved(tmp_path):
    with Checkpoints(tmp_path / "checkpoints", keep=2) as checkpoints:
        yield checkpoints


def test_every_type_comes_back_bit_for_bit_on_another_mesh(saved):
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        bits = {np.float32: np.uint32, np.float64: np.uint64, np.int32: np.uint32, jnp.bfloat16: np.uint16}
        draw = lambda t: rng.integers(0, 2**16, (8, 16), dtype=np.uint64).astype(bits[t]) * bits[t](0x10001 % 2**16)
        values = {jnp.dtype(t).name: np.ascontiguousarray(draw(t)).view(t) for t in bits}
        values["float32"].flat[:3] = [-0.0, np.nan, 1e-42]
        state = jax.device_put(values, sharding(4, 2, "data", "model"))
        saved.save(3, state, {"position": 17})
        saved.wait()
        for target in (sharding(4, 2, "data", "model"), sharding(2, 4, "model", "data"), sharding(1, 1)):
            target_state = jax.tree.map(lambda x, t=target: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=t), state)
            back, meta = saved.restore(3, target_state)
            equal(back, state)
            assert meta == {"position": 17}
            assert all(x.sharding == target for x in jax.tree.leaves(back))


def test_nested_state_with_optax_tuples_and_host_memory(saved):
    state = small()
    host = jax.device_put(np.arange(16.0, dtype=np.float32), sharding(4, 2, "data", kind="pinned_host"))
    state = State(state.step, state.params, (optax.chain(optax.adam(1.0), optax.trace(0.9)).init(state.params), host))
    assert saved.save(1, state, {})
    back, _ = saved.restore(1, abstract(state))
    equal(back, state)
    assert back.moments[1].sharding.memory_kind == "pinned_host"
    params, _ = saved.restore(1, {"params": abstract(state).params}, partial=True)
    equal(params["params"], state.params)
    bare = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state.params)
    equal(saved.restore(1, {"params": bare}, partial=True)[0], params)


def test_arrays_may_be_donated_as_soon_as_save_returns(saved):
    make = lambda: jax.device_put(np.random.default_rng(0).normal(size=(1024, 1024)), sharding(4, 2, "data", "model"))
    state = {"w": make()}
    saved.save(1, state, {})
    target = abstract(state)
    jax.block_until_ready(jax.jit(lambda s: jax.tree.map(lambda x: x * 0 - 1, s), donate_argnums=0)(state))
    equal(saved.restore(1, target)[0], {"w": make()})


def test_keeps_the_newest_and_leaves_an_existing_one_alone(saved):
    for step in (1, 2, 3, 10):
        assert saved.save(step, small(step), {"step": step})
    assert not saved.save(10, small(99), {})
    saved.wait()
    assert saved.steps() == [3, 10] and saved.latest() == 10
    equal(saved.restore(10, abstract(small()))[0], small(10))
    assert sorted(path.name for path in saved.folder.iterdir()) == ["10", "3"]
    with pytest.raises(InputError, match="step 10, newer than the step 5"):
        saved.save(5, small(), {})


def test_unfinished_and_foreign_folders_are_no_checkpoints(saved):
    assert saved.latest() is None and saved.steps() == []
    saved.save(5, small(5), {})
    saved.wait()
    (saved.folder / "9").mkdir()
    (saved.folder / "7.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    (saved.folder / "3.deleted").mkdir()
    shutil.copytree(saved.folder / "5", saved.folder / "8")
    (saved.folder / "8" / "state" / "manifest.ocdbt").unlink()
    assert saved.steps() == [5]
    for step in (7, 8, 9):
        assert saved.save(step, small(step), {})
    saved.wait()
    assert saved.steps() == [8, 9]
    equal(saved.restore(9, abstract(small()))[0], small(9))
    assert {path.name for path in saved.folder.iterdir()} == {"8", "9", "8.incomplete", "9.incomplete"}


def test_a_failed_write_names_the_folder_and_keeps_the_good_ones(saved):
    saved.save(1, small(1), {})
    saved.wait()
    noise = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(512, 512)))}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # Like a full disk: writes fail in the background.
    try:
        with pytest.raises(InputError) as told:
            saved.save(2, noise, {})
            saved.save(3, noise, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    message = str(told.value)
    assert f"checkpoint 2 cannot be written to {saved.folder}: File too large" in message
    assert f"{noise['w'].nbytes:,} bytes" in message and "Newest complete checkpoint: 1" in message
    saved.wait()  # Told once.
    assert saved.steps() == [1]
    assert saved.save(3, small(3), {})
    saved.wait()
    assert saved.steps() == [1, 3]
    # Threads of the failed save may write for a moment longer, into a folder that nothing takes for a checkpoint.
    assert {path.name for path in saved.folder.iterdir()} - {"2.orbax-checkpoint-tmp"} == {"1", "3"}


def test_what_a_failed_save_still_writes_does_not_stop_the_next_one(saved):
    left = saved.folder / "2.orbax-checkpoint-tmp" / "state"
    written, done = threading.Event(), threading.Event()

    def write():
        while not done.is_set():
            with contextlib.suppress(OSError):  # removed meanwhile
                left.mkdir(parents=True, exist_ok=True)
                (left / f"{time.monotonic_ns()}").touch()
            written.set()

    stray = threading.Thread(target=write)
    stray.start()
    written.wait()
    threading.Timer(0.3, done.set).start()
    saved.save(3, small(3), {})
    saved.wait()
    done.set()
    stray.join()
    assert saved.steps() == [3]


def test_an_unwritable_place_is_one_clear_message(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        Checkpoints(tmp_path / "file" / "checkpoints") as saved,
        pytest.raises(InputError, match=r"cannot be written to .*: Not a directory .*another --output"),
    ):
        saved.save(1, small(), {})
    assert complete_steps(tmp_path / "file") == complete_steps(tmp_path / "none") == []


def test_meta_that_is_no_json_is_refused_before_writing(saved):
    with pytest.raises(TypeError):
        saved.save(1, small(), {"position": object()})
    assert not saved.folder.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda s: State(s.step, small(size=16).params, s.moments),
            r"params\.blocks\.query is float32 \[8, 4\] in it ",
        ),
        (lambda s: State(s.step, s.params, s.moments, jnp.ones(())), r"scale \(float32 \[\]\) is not in it"),
        (lambda s: State(s.step, {"scale": s.params["scale"]}, s.moments), r"params\.blocks\.query .* is only in it"),
        (
            lambda s: State(s.step, jax.tree.map(lambda x: x.astype(jnp.bfloat16), s.params), s.moments),
            r"params\.scale is float32 \[4\] in it and bfloat16 \[4\] here",
        ),
    ],
)
def test_a_state_that_does_not_fit_is_refused(saved, change, message):
    saved.save(1, small(), {})
    with pytest.raises(InputError, match=message):
        saved.restore(1, abstract(change(small())))


def test_padding_may_differ_where_it_is_allowed(saved):
    state = {"table": jnp.pad(jnp.ones((5, 3)), ((0, 3), (0, 0))), "other": jnp.ones(4)}
    axes, sizes = {"table": ("vocab", "embed"), "other": ("embed",)}, {"vocab": 5}
    saved.save(1, state, {}, axes=axes, sizes=sizes)
    for rows in (5, 6, 8, 12):
        target = {"table": jax.ShapeDtypeStruct((rows, 3), jnp.float32), "other": abstract(state)["other"]}
        back, _ = saved.restore(1, target, axes=axes, sizes=sizes)
        np.testing.assert_array_equal(back["table"], np.pad(np.ones((5, 3)), ((0, rows - 5), (0, 0))))
    with pytest.raises(InputError, match=r"table .*: not the bits that were saved"):
        saved.restore(1, target, axes=axes, sizes={"vocab": 4})
    target["table"] = jax.ShapeDtypeStruct((4, 3), jnp.float32)
    with pytest.raises(InputError, match="table is"):
        saved.restore(1, target, axes=axes, sizes=sizes)


def test_a_damaged_checkpoint_is_told(saved):
    for step in (1, 2):
        saved.save(step, small(step), {})
    saved.wait()
    for data in saved.folder.glob("2/state/**/d/*"):
        data.write_bytes(b"")
    with pytest.raises(InputError, match=r"checkpoint 2 in .* is damaged: .* use the one of step 1"):
        saved.restore(2, abstract(small()))
    (saved.folder / "2" / "meta" / "metadata").write_text("{")
    with pytest.raises(InputError, match="is damaged"):
        describe(saved.folder, 2)


def test_damaged_numbers_are_told_too(saved):
    """What describes the array is sound, so that it is met only while its numbers are read."""
    state = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(64, 64)))}
    saved.save(1, state, {})
    saved.wait()
    numbers = max(saved.folder.glob("1/state/**/d/*"), key=lambda path: path.stat().st_size)
    numbers.write_bytes(numbers.read_bytes()[: numbers.stat().st_size // 2])
    with pytest.raises(InputError, match=r"checkpoint 1 in .* is damaged: \w+: Error reading"):
        saved.restore(1, abstract(state))


def test_describe_needs_no_devices_and_nothing_is_printed(tmp_path):
    script = f"""
import jax, jax.numpy as jnp, resource, sys
from pathlib import Path
from jaxshard.errors import InputError
from jaxshard.training.checkpoint import Checkpoints, describe
folder = Path({str(tmp_path)!r})
if sys.argv[1] == "save":
    state = {{"params": {{"w": jnp.ones((4, 8), jnp.bfloat16)}}, "step": jnp.int32(7)}}
    with Checkpoints(folder) as saved:
        saved.save(7, state, {{"mesh": "dp=1"}})
        saved.wait()
        saved.save(8, state, {{}})
        saved.restore(8, state)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))  # Orbax logs failures with a traceback.
        try:
            saved.save(9, state, {{}})
            saved.wait()
        except InputError:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
else:
    found = describe(folder, 7)
    assert found.bytes == 68 and found.meta == {{"mesh": "dp=1"}}
    assert [(a.path, a.shape, a.dtype, a.bytes) for a in found.arrays] == [
        ("params.w", (4, 8), "bfloat16", 64), ("step", (), "int32", 4)]
    assert describe(folder).step == 8
"""
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    for what in ("save", "read"):
        # Any use of a device would fail where there is no such platform.
        env |= {"JAX_PLATFORMS": "cpu" if what == "save" else "none"}
        done = subprocess.run([sys.executable, "-c", script, what], env=env, capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    with pytest.raises(InputError, match="no complete checkpoint of step 9; there are 7, 8"):
        describe(tmp_path, 9)
    with pytest.raises(InputError, match="no complete checkpoint; train first"):
        describe(tmp_path / "none")


def failing(file: str, text: str = "No space left on device"):
    """A function of that file that raises an error with that text."""
    space = {}
    exec(compile(f"def fail():\n    raise OSError(28, {text!r})", file, "exec"), space)
    return space["fail"]


ORBAX, OTHER = "site-packages/orbax/checkpoint/path.py", "elsewhere/path.py"


def test_a_second_error_of_the_same_save_is_not_printed_by_asyncio(saved, caplog):
    texts = {"(of Orbax)": ORBAX, "(as [tensorstore_spec={}] says)": OTHER, "(of others)": OTHER}
    for text, file in texts.items():

        async def leave(fail):
            asyncio.get_running_loop().run_in_executor(None, fail)  # as of two writes that fail together

        with asyncio.Runner() as runner:
            runner.run(leave(failing(file, text)))
        gc.collect()
    said = [record.getMessage() for record in caplog.records if record.name == "asyncio"]
    assert [text for text in texts if any(text in one for one in said)] == ["(of others)"]


def test_an_error_that_nobody_waits_for_is_not_printed_by_python(saved, monkeypatch):
    monkeypatch.setattr(sys, "unraisablehook", told := [].append)
    Checkpoints(saved.folder)
    hook, seen = sys.unraisablehook, told.__self__
    for fail in (failing(ORBAX), failing(OTHER)):
        try:
            fail()
        except OSError as error:
            hook(SimpleNamespace(exc_value=error, exc_traceback=error.__traceback__))
    hook(SimpleNamespace(exc_value=RuntimeError("Event loop is closed"), exc_traceback=None))
    (left,) = seen
    assert OTHER in left.exc_traceback.tb_next.tb_frame.f_code.co_filename


def test_the_layout_on_disk_is_as_documented(saved):
    saved.save(1, small(), {"a": 1})
    saved.wait()
    content = json.loads((saved.folder / "1" / "meta" / "metadata").read_text())
    assert content["meta"] == {"a": 1}
    name, shape, checksum = content["arrays"]["params.blocks.query"]
    assert (name, shape) == ("float32", [8, 4]) and int(checksum, 16) and len(checksum) == 16
    assert content["arrays"]["moments.0.mu.blocks.query"][:2] == ["float32", [8, 4]]
    assert content.keys() == {"step", "arrays", "meta", "checksum"}
