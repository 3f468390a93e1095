"""`jaxshard.explain` on a function that knows nothing of this project."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxshard
from jaxshard.errors import InputError
from jaxshard.planner.confirm import compiler_missing
from jaxshard.xla import absent
from jaxshard.xla.absent import devices_for
from jaxshard.xla.hardware import parse_target

B, D, F = 32, 64, 256


def mesh_of(devices) -> Mesh:
    return Mesh(np.asarray(devices).reshape(4, 2), ("rows", "columns"))


def step(up, down, x):
    """Two layers, split by columns and then by rows, of a batch that is split over rows of the mesh."""
    loss = lambda up, down: (jax.nn.relu(x @ up) @ down).sum()
    gradients = jax.grad(loss, argnums=(0, 1))(up, down)
    return jax.tree.map(lambda w, g: w - 0.1 * g, (up, down), gradients)


def arguments(mesh: Mesh):
    shaped = lambda shape, *axes: jax.ShapeDtypeStruct(
        shape, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*axes))
    )
    return shaped((D, F), None, "columns"), shaped((F, D), "columns"), shaped((B, D), "rows")


def test_its_own_axes_and_bytes(capsys, tmp_path):
    mesh = mesh_of(jax.devices())
    found = jaxshard.explain(jax.jit(step), *arguments(mesh))
    assert found.ok and found.check is None and "function of your own" in found.not_compared
    # Both gradients, of which a device holds half, are summed over the rows.
    assert found.to_dict()["bytes_by_axis"]["rows"] == 2 * (D * F // 2) * 4
    assert {row.kind for row in found.rows} == {"all-reduce"}
    assert any("test_own_function.py" in row.source for row in found.rows)
    found.show()
    assert "not compared with expectations" in capsys.readouterr().out
    found.report(tmp_path / "page.html")
    assert "<html" in (tmp_path / "page.html").read_text()


def test_copies_and_what_is_not_donated_are_named_and_axes_keep_their_names(capsys, tmp_path):
    """Axes that are called as --mesh calls its own, which it would shorten."""
    mesh = Mesh(np.asarray(jax.devices()).reshape(4, 2), ("data", "model"))
    shaped = lambda shape, *axes: jax.ShapeDtypeStruct(
        shape, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*axes))
    )
    weights = {"up": shaped((D, F), None, "model"), "scale": shaped((D,))}
    batch = shaped((B, D), "data")

    def update(params, x):
        loss = lambda p: jax.nn.relu(x * p["scale"] @ p["up"]).sum()
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params))

    whole = NamedSharding(mesh, PartitionSpec())
    places = {"up": weights["up"].sharding, "scale": whole}
    found = jaxshard.explain(jax.jit(update, out_shardings=places), weights, batch)
    half = "4 devices hold the same part: it is whole over data"
    copies = {leaf.path: (leaf.bytes, leaf.why) for leaf in found.replicated}
    assert copies["params.up"] == copies["output up"] == (D * F // 2 * 4, half)
    assert copies["x"] == (B // 4 * D * 4, "2 devices hold the same part: it is whole over model")
    assert found.ok and [(d.path, d.like) for d in found.undonated] == [("params.up", "output up")]
    found.show()
    found.report(tmp_path / "page.html")
    said, page = capsys.readouterr().out, (tmp_path / "page.html").read_text()
    assert "params.up (like output up) could lend outputs their memory, 32.00 KiB a device" in said
    assert "donate_argnums=0" in said and "held in copies" in page and "donate_argnums=0" in page
    assert " data " in said and " dp " not in said and ">data<" in page and ">dp<" not in page
    donated = jaxshard.explain(jax.jit(update, out_shardings=places, donate_argnums=0), weights, batch)
    assert donated.undonated == ()


def test_arrays_and_a_plain_function():
    mesh = mesh_of(jax.devices())
    place = lambda leaf: jax.device_put(jnp.ones(leaf.shape, leaf.dtype), leaf.sharding)
    abstract = jaxshard.explain(step, *arguments(mesh))
    found = jaxshard.explain(step, *map(place, arguments(mesh)))
    assert found.to_dict()["bytes_by_axis"] == abstract.to_dict()["bytes_by_axis"]
    assert found.mesh == "rows=4,columns=2" and found.flops > 0


def test_absent_gpus():
    target = parse_target("h100:8")
    missing = compiler_missing(target)
    if missing:
        pytest.skip(missing)
    found = jaxshard.explain(jax.jit(step), *arguments(mesh_of(devices_for(target))), target="h100:8")
    assert found.platform == "gpu" and found.to_dict()["bytes_by_axis"]["rows"] == 2 * (D * F // 2) * 4
    for wrong in ("local", "h100:4", "a100:8"):
        with pytest.raises(InputError, match="the mesh is 8 x NVIDIA H100 80GB HBM3: name as target= what"):
            jaxshard.explain(jax.jit(step), *arguments(mesh_of(devices_for(target))), target=wrong)


def test_every_array_is_listed_and_branches_are_said(capsys):
    """A sum of one number in a branch: the train step would call that bookkeeping."""
    whole = NamedSharding(mesh_of(jax.devices()), PartitionSpec())
    gathered = lambda x: jax.lax.with_sharding_constraint(x, whole)
    choose = lambda flag, x: jax.lax.cond(flag, lambda x: gathered(2 * x), lambda x: gathered(x + x.sum()), x)
    jaxshard.explain(choose, jnp.array(True), arguments(mesh_of(jax.devices()))[2]).show()
    said = capsys.readouterr().out
    assert "sum over devices (reduce_sum); only when taken: " in said and "4 B  up to 1" in said


def test_a_function_that_sends_nothing_says_so(capsys, tmp_path):
    found = jaxshard.explain(lambda x: 2 * x, arguments(mesh_of(jax.devices()))[2])
    found.show()
    assert "no collectives: nothing travels between devices" in capsys.readouterr().out
    found.report(tmp_path / "page.html")
    assert "<p>Nothing.</p>" in (tmp_path / "page.html").read_text()


def test_a_compiler_that_jax_dropped_when_it_started_says_when_to_ask(monkeypatch):
    def dropped(_):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(absent, "_gpu_devices", dropped)
    monkeypatch.setattr(absent, "_installed", lambda *_: True)
    jax.devices()
    with pytest.raises(InputError, match=r"call devices_for before jax.devices\(\)"):
        devices_for(parse_target("h200:24"))  # asked for in no other test: what was found is kept
    monkeypatch.setattr(absent.xla_bridge, "backends_are_initialized", lambda: False)
    with pytest.raises(InputError, match="its compiler does not start: topology not implemented"):
        devices_for(parse_target("h200:24"))


def test_without_a_mesh_it_says_what_to_give():
    with pytest.raises(InputError, match="give mesh="):
        jaxshard.explain(step, jnp.ones((D, F)), jnp.ones((F, D)), jnp.ones((B, D)))
