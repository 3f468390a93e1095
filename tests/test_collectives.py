"""Collectives found in compiled programs: each once, with its axes, bytes, calls, source and what overlaps."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxshard.xla.collectives import collectives

HLO = Path(__file__).parent / "hlo"
MESH = {"data": 4, "model": 2}


def read(name):
    return {found.name: found for found in collectives((HLO / name).read_text(), MESH)}


def test_tpu_asynchronous_fusion_is_one_collective():
    found = read("tpu_fusions.hlo")
    assert set(found) == {"async-collective-start", "fusion.9"}
    gather = found["async-collective-start"]
    assert (gather.kind, gather.axes, gather.form, gather.is_async) == ("all-gather", ("data",), "async fused", True)
    assert gather.bytes == 4096 * 2048 * 2
    assert gather.op_name == "jit(step)/gather_weight"
    assert gather.overlap is not None
    assert gather.overlap.instructions == ("fusion.5",)
    assert gather.overlap.collectives == ("fusion.9",)
    assert gather.overlap.flops == 2 * 8 * 2048 * 1024 * 4096


def test_tpu_asynchronous_fusion_that_a_loop_carries_along_is_one_collective():
    """It begins before the loop, products in the loop carry it along, and it ends after the loop."""
    (found,) = read("tpu_carried.hlo").values()
    assert (found.name, found.form, found.bytes, found.count) == ("start", "async fused", 64 * 8 * 2, 1)
    assert found.is_async and found.overlap is not None and found.overlap.instructions == ("loop",)


def test_tpu_all_reduce_scatter_is_a_reduce_scatter_of_its_input():
    scatter = read("tpu_fusions.hlo")["fusion.9"]
    assert (scatter.kind, scatter.axes, scatter.form, scatter.is_async) == ("reduce-scatter", ("data",), "fused", False)
    assert scatter.bytes == 1024 * 4096 * 2 + 512 * 2
    assert [part.bytes for part in scatter.parts] == [1024 * 4096 * 2, 1024]
    assert scatter.op_name == "jit(step)/transpose(jvp())/dot_general"


@pytest.mark.parametrize(
    ("name", "kind", "axes", "size", "form", "is_async"),
    [
        ("all-gather-start", "all-gather", ("data",), 1024 * 64 * 2 + 128 * 2, "pair", True),
        ("reduce-scatter-start", "reduce-scatter", ("data",), 8 * 16 * 4 + 16 * 4, "pair", True),
        ("collective-permute-start", "collective-permute", ("data",), 512, "pair", False),
        ("all-reduce-start", "all-reduce", ("data", "model"), 512 + 64, "pair", False),
        ("all-reduce-start.1", "all-reduce", ("model",), 512, "pair", False),
        ("async-start", "collective-broadcast", ("model",), 512, "pair", True),
        ("send", "collective-permute", ("model",), 512, "send", True),
        ("all-to-all-start", "all-to-all", ("model",), 512, "pair", False),
    ],
)
def test_gpu_pairs_are_counted_once(name, kind, axes, size, form, is_async):
    found = read("gpu_pairs.hlo")
    assert len(found) == 8
    one = found[name]
    if name.startswith(("all-reduce-start", "all-to-all-start")):
        is_async = True  # started and awaited at once: a pair with nothing between
        assert one.overlap is not None
        assert one.overlap.instructions == ()
    assert (one.kind, one.axes, one.bytes, one.form, one.is_async) == (kind, axes, size, form, is_async)
    assert (one.count, one.exact) == (1, True)


def test_gpu_overlap_and_sources():
    found = read("gpu_pairs.hlo")
    gather, scatter = found["all-gather-start"], found["reduce-scatter-start"]
    assert gather.overlap is not None
    assert gather.overlap.instructions == ("gemm",)
    assert gather.overlap.flops == 2 * 64 * 32 * 16
    assert gather.overlap.collectives == ("reduce-scatter-start",)
    assert (gather.op_name, gather.source, gather.dtype, gather.group_size) == (
        "jit(step)/gather",
        "step.py:10",
        "bf16",
        4,
    )
    assert scatter.op_name == "jit(step)/transpose(jvp())/dot_general"  # combined: named after what makes it
    assert scatter.source == "step.py:30"
    assert found["async-start"].source == "step.py:12"
    assert found["async-start"].overlap.instructions == ("work",)
    assert (found["collective-permute-start"].shift, found["send"].shift) == (1, 1)


def test_sabotage_a_lost_done_or_group_changes_the_answer():
    text = (HLO / "gpu_pairs.hlo").read_text()
    changed = collectives(text.replace("[2,4]<=[4,2]T(1,0)", "[4,2]<=[8]"), MESH)
    assert next(one for one in changed if one.kind == "reduce-scatter").axes == ("model",)


# ---- real programs on eight faked CPU devices ----


def mesh():
    return Mesh(np.array(jax.devices()).reshape(1, 1, 4, 2), ("replica", "stage", "data", "model"))


SHAPE = {"replica": 1, "stage": 1, "data": 4, "model": 2}


def spec(*axes):
    return NamedSharding(mesh(), PartitionSpec(*axes))


def array(shape, *axes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=spec(*axes))


def found_in(function, *args, **jit):
    return collectives(jax.jit(function, **jit).lower(*args).compile().as_text(), SHAPE)


def manual(function, out):
    return jax.shard_map(function, mesh=mesh(), in_specs=PartitionSpec("data", "model"), out_specs=out, check_vma=False)


@pytest.mark.parametrize(
    ("operation", "kind", "axes", "size"),
    [
        (lambda x: lax.psum(x, "data"), "all-reduce", ("data",), 16 * 32 * 4),
        (lambda x: lax.psum(x, ("data", "model")), "all-reduce", ("data", "model"), 16 * 32 * 4),
        (lambda x: lax.all_gather(x, "model", axis=0, tiled=True), "all-gather", ("model",), 2 * 16 * 32 * 4),
        (lambda x: lax.psum_scatter(x, "data", tiled=True), "reduce-scatter", ("data",), 16 * 32 * 4),
        (lambda x: lax.all_to_all(x, "data", 0, 0, tiled=True), "all-to-all", ("data",), 16 * 32 * 4),
        (
            lambda x: lax.ppermute(x, "data", [(0, 1), (1, 2), (2, 3), (3, 0)]),
            "collective-permute",
            ("data",),
            16 * 32 * 4,
        ),
    ],
)
def test_each_kind(operation, kind, axes, size):
    """x is [16, 32] on each device."""
    found = found_in(manual(operation, PartitionSpec("data", "model")), array((64, 64), "data", "model"))
    assert [(one.kind, one.axes, one.bytes, one.count) for one in found] == [(kind, axes, size, 1)]
    assert found[0].source.startswith(__file__)


def test_calls_multiply_over_nested_loops():
    ring = [(i, (i + 1) % 4) for i in range(4)]

    def body(x):
        def outer(c, _):
            c, _ = lax.scan(lambda c, _: (lax.ppermute(jnp.sin(c), "data", ring), None), c, None, length=5)
            return lax.psum(c, "model") * 0.5, None

        return lax.scan(outer, x, None, length=3)[0]

    found = found_in(manual(body, PartitionSpec("data", "model")), array((64, 64), "data", "model"))
    by_kind = {one.kind: one for one in found}
    assert {kind: one.count for kind, one in by_kind.items()} == {"all-reduce": 3, "collective-permute": 15}
    assert [loop.trips for loop in by_kind["collective-permute"].loops] == [3, 5]
    assert all(one.exact for one in found)
    assert by_kind["collective-permute"].total_bytes == 15 * 16 * 32 * 4


def test_unknown_trips_and_branches_are_said():
    def body(x, n):
        x = lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, lax.psum(jnp.sin(c[1]), "data")), (0, x))[1]
        return lax.cond(n > 3, lambda v: lax.psum(v, "model"), lambda v: v, x)

    wrapped = jax.shard_map(
        body, mesh=mesh(), in_specs=(PartitionSpec("data", "model"), PartitionSpec()),
        out_specs=PartitionSpec("data", "model"), check_vma=False,
    )  # fmt: skip
    found = found_in(wrapped, array((64, 64), "data", "model"), array((), dtype=jnp.int32))
    loop = next(one for one in found if one.loops)
    branch = next(one for one in found if one.branches)
    assert (loop.axes, loop.count, loop.exact, loop.loops[0].trips) == (("data",), 1, False, None)
    assert (branch.axes, branch.exact) == (("model",), False)
    assert "of 2" in branch.branches[0]


def test_automatic_sharding_in_a_scan():
    """A column/row pair in a scan of four layers: one all-reduce of [B,D] over model per layer."""
    b, d, f = 16, 64, 128

    def step(x, up, down):
        def layer(h, w):
            h = jnp.tanh(h @ w[0]) @ w[1]
            return lax.with_sharding_constraint(h, spec("data")), None

        return lax.scan(layer, x, (up, down))[0]

    found = found_in(
        step, array((b, d), "data"), array((4, d, f), None, None, "model"), array((4, f, d), None, "model", None)
    )
    assert [(one.kind, one.axes, one.bytes, one.count) for one in found] == [
        ("all-reduce", ("model",), b // 4 * d * 4, 4)
    ]
    assert found[0].op_name.endswith("dot_general")


def test_cpu_widens_bfloat16_and_says_so():
    found = found_in(
        manual(partial(lax.psum, axis_name="data"), PartitionSpec(None, "model")),
        array((64, 64), "data", "model", dtype=jnp.bfloat16),
    )
    assert (found[0].dtype, found[0].note) == ("f32", "widened to f32 by the CPU compiler")


def test_no_collectives():
    assert found_in(jnp.sin, array((64, 64), "data", "model")) == []
