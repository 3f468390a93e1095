"""Parallelism is invisible in the numbers: every layout of the table computes one device's step, in fp64 to 1e-10.

Each way of getting it wrong that is worth fearing is committed here on purpose and must turn the comparison red.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layout_table import table

from jaxshard.analysis.state_bytes import state_bytes
from jaxshard.config import ParallelConfig
from jaxshard.errors import InputError
from jaxshard.models import transformer
from jaxshard.models.presets import architecture
from jaxshard.parallel import layout
from jaxshard.parallel.mesh import resolve_mesh
from jaxshard.training import gradients, loss
from jaxshard.training.invariance import (
    TOLERANCE,
    Outcome,
    compare,
    compile_quickly,
    synthetic_batch,
    wide_types,
)
from jaxshard.training.loss import LossSpec

PIPELINES = [case for case in table.CASES if "pp=" in case.mesh]
SLOW = [case for case in table.CASES if case in PIPELINES or "offload" in case.train]
FAST = [case for case in table.CASES if case not in SLOW]


WRITTEN = table.committed()


def case_named(name: str):
    return next(case for case in table.CASES if str(case) == name)


@pytest.mark.parametrize("case", [*FAST, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)], ids=str)
def test_every_gradient_equals_one_devices(case, capfd):
    result = table.measure(case)
    assert result.faults(TOLERANCE) == []
    assert result.loss == pytest.approx(float(WRITTEN[table.CASES.index(case)]["loss"]), rel=1e-10)
    assert result.parameters == architecture(case.config().model, None, table.LENGTH).parameters
    # What the partitioner cannot do well it says at this level only.
    assert "Involuntary full rematerialization" not in capfd.readouterr().err


def test_the_written_table_is_that_of_today():
    """Its rows and their bytes; the losses are looked at where they are computed."""
    assert [list(row.values())[:4] for row in WRITTEN] == [table.name_cells(case) for case in table.CASES]
    for case, row in zip(table.CASES, WRITTEN, strict=True):
        config = case.config()
        narrow = replace(config, train=replace(config.train, precision="fp32"))
        sizes = state_bytes(
            narrow, architecture(config.model, None, table.LENGTH), resolve_mesh(case.mesh, case.devices)
        )
        found = (sizes.parameters, sizes.gradients, sizes.optimizer)
        assert found == tuple(int(row[name].replace(",", "")) for name in table.COLUMNS[-3:]), case


def test_the_layouts_of_a_variant_differ_in_parallel_only():
    """So the table compares what it should: the group `parallel` decides no number."""
    for case in table.CASES:
        same = replace(case.config(), parallel=ParallelConfig())
        assert same == replace(table.Case(case.variant).config(), parallel=ParallelConfig())


def test_the_table_has_the_layouts_that_matter():
    assert len(FAST) >= 40
    assert len({str(case) for case in table.CASES}) == len(table.CASES)
    meshes, options = {case.mesh for case in FAST}, {key for case in FAST for key in case.train}
    assert {axis for mesh in meshes for axis in ("replica", "dp", "tp") if axis in mesh} == {"replica", "dp", "tp"}
    assert {case.zero for case in FAST} == {0, 1, 2, 3}
    assert {"accumulation", "remat", "sequence_parallel", "loss_chunk"} <= options
    schedule = lambda case: (case.train.get("schedule", "1f1b"), case.mesh.split(",")[case.mesh.startswith("replica")])
    pipelines = {(*schedule(case), axis) for case in PIPELINES for axis in ("dp", "tp") if axis in case.mesh}
    assert len(pipelines) == 3 * 2 * 2  # schedules, 2 and 4 stages, data and model axis
    assert {case.zero for case in PIPELINES} == {0, 1, 2, 3}
    assert {case.variant for case in table.CASES} == set(table.VARIANTS)


def test_batches_have_what_is_hard_to_cut():
    batch = synthetic_batch(100, 16, 12, packed=True)
    assert all(array.shape == (16, 12) and array.dtype == np.int32 for array in batch.values())
    assert (batch["segments"].max(axis=1) > 1).any() and (batch["segments"][-1] == 0).all()
    starts = (batch["segments"] > 0) & (np.diff(batch["segments"], axis=1, prepend=0) != 0)
    assert (batch["positions"][starts] == 0).all() and batch["positions"].max() > 5
    valid = (batch["targets"] >= 0).sum(axis=1)
    assert valid[-1] == 0 and len(set(valid)) > 4
    assert (batch["targets"][batch["segments"] == 0] == -1).all()
    alone = synthetic_batch(100, 16, 12, packed=False)["segments"]
    assert alone.max() == 1 and (np.diff(alone, axis=1) <= 0).all()


EVALUATED = ["gqa dp=4 zero=1 accumulation=4", "mqa tp=4", "gqa dp=2,tp=4 zero=2 sequence_parallel", "odd dp=3 zero=3"]


@pytest.mark.parametrize("name", EVALUATED)
def test_evaluation_is_the_same_and_without_dropout(name):
    def evaluate(case):
        program, batch = table.program_of(case), table.batch_of(case.variant)
        with wide_types():
            params = compile_quickly(program.init.lower(), program)().params
            placed = program.place(batch)
            total, count = compile_quickly(program.evaluate.lower(params, placed), program)(params, placed)
        return float(total), int(count)

    case = case_named(name)
    total, count = evaluate(case)
    expected, valid = evaluate(table.Case(case.variant))
    assert count == valid == (table.batch_of(case.variant)["targets"] >= 0).sum()
    assert total == pytest.approx(expected, rel=1e-12)
    assert table.VARIANTS[case.variant].model.get("dropout", 0) == 0 or not np.isclose(
        total / count, table.reference(case.variant).loss, rtol=1e-6
    )


# Mistakes, each where it could be made, and a layout that must show it.


def _one_groups_head_only(patch):
    """The head's gradient is not summed over the data groups."""
    original = loss._by_group
    patch.setattr(loss, "_by_group", lambda spec, dw: original(spec, dw.at[1:].set(0)))


def _one_groups_gradient_only(patch):
    """Deferred gradients are not summed over the data groups."""
    original = gradients._by_group

    def only_first(recipe, one):
        def run(*args):
            grads, entropy = original(recipe, one)(*args)
            return jax.tree.map(lambda g: g.at[1:].set(0), grads), entropy

        return run

    patch.setattr(gradients, "_by_group", only_first)


def _reduced_twice(patch):
    """A gradient is summed over the data axis twice, as by a reduction in the loop and another one after it."""
    original = layout._lift.bwd

    def twice(use, grads, like, cotangent):
        nothing, slot = original(use, grads, like, cotangent)
        return nothing, slot * grads.mesh.shape["data"]

    patch.setattr(layout._lift, "bwd", twice)


def _mean_of_means(patch):
    """Every accumulation step divides by its own number of targets, as if all had the same."""
    original = gradients.count_targets
    first = lambda batch: jax.tree.map(lambda a: a[:1], batch)
    patch.setattr(gradients, "count_targets", lambda batch: original(first(batch)) * len(batch["targets"]))


def _last_microbatch_dropped(patch):
    original = gradients._whole
    less = lambda recipe, params, batch, ids, *more: original(
        recipe, params, jax.tree.map(lambda a: a[:-1], batch), ids[:-1], *more
    )
    patch.setattr(gradients, "_whole", less)


def _dropout_by_place_in_group(patch):
    """Dropout masks go by the sequence's place on its device instead of in the global batch."""
    original = gradients.dropout_keys
    local = lambda recipe, ids: ids % (16 // recipe.layout.groups)
    patch.setattr(gradients, "dropout_keys", lambda recipe, step, ids: original(recipe, step, local(recipe, ids)))


def _dropout_by_accumulation_step(patch):
    """Every accumulation step draws the same masks."""
    original = gradients.dropout_keys
    patch.setattr(gradients, "dropout_keys", lambda recipe, step, ids: original(recipe, step, ids - ids.min()))


def _padding_in_the_softmax(patch):
    """Rows of the vocabulary that are padding take part in the loss."""
    original = gradients.Recipe.loss_spec
    whole = lambda recipe: replace(original(recipe), vocab_size=recipe.model.vocab)
    patch.setattr(gradients.Recipe, "loss_spec", whole)


def _padding_in_the_draw(patch):
    """Initial values depend on the padded size of the vocabulary."""
    original = transformer._draw
    patch.setattr(
        transformer, "_draw", lambda key, row, *more: original(jax.random.fold_in(key, row.shape[0]), row, *more)
    )


def _tail_of_the_chunks_lost(patch):
    """Positions after the last whole chunk of the loss are forgotten."""

    def forget(spec: LossSpec, x, w, targets):
        whole = targets.shape[1] // spec.chunk * spec.chunk
        return loss.cross_entropy(spec, x, w, targets.at[:, whole:].set(-1))

    patch.setattr(gradients, "cross_entropy", forget)


SABOTAGES = [
    (_one_groups_head_only, "gqa dp=8"),
    (_one_groups_gradient_only, "gqa dp=4 zero=1 accumulation=4"),
    (_reduced_twice, "gqa dp=8 zero=2"),
    (_mean_of_means, "gqa dp=1 accumulation=4"),
    (_last_microbatch_dropped, "gqa dp=4 zero=2 accumulation=4"),
    (_dropout_by_place_in_group, "gqa dp=4 remat=dots"),
    (_dropout_by_accumulation_step, "gpt2 dp=2,tp=4 zero=1 accumulation=2"),
    (_padding_in_the_softmax, "odd tp=3"),
    (_padding_in_the_draw, "odd tp=3"),
    (_tail_of_the_chunks_lost, "gqa dp=2,tp=2 loss_chunk=5"),
]


@pytest.mark.parametrize("sabotage, name", SABOTAGES, ids=lambda x: getattr(x, "__name__", x).strip("_"))
def test_a_mistake_is_seen(sabotage, name, monkeypatch):
    case = case_named(name)
    table.reference(case.variant)  # of the sound program
    sabotage(monkeypatch)
    result = table.measure(case)
    assert result.faults(TOLERANCE)
    assert not result.initial_equal or max(result.worst_gradient.gradient, result.loss_error) > 1e-3


def test_what_is_not_a_number_or_hides_in_padding_disagrees():
    outcome = Outcome(1.0, 1, {"w": np.ones(2)}, {"w": np.ones(2)}, 1.0, {"w": np.ones(2)}, 0.0)
    assert compare(outcome, outcome).faults() == []
    wrong = {
        "initial": replace(outcome, parameters={"w": np.array([1, np.nextafter(1, 2)])}),
        "loss": replace(outcome, loss=float("nan")),
        "gradient of w": replace(outcome, gradients={"w": np.array([1, np.nan])}),
        "norm": replace(outcome, norm=1 + 1e-9),
        "update of w": replace(outcome, moved={"w": np.array([1, 1 + 1e-6])}),
        "padding": replace(outcome, padding=1e-300),
        "3 parameters": replace(outcome, parameters={"w": np.ones(2), "v": np.ones(1)}),
    }
    for name, other in wrong.items():
        (fault,) = compare(other, outcome).faults()
        assert name in fault


def test_copies_of_a_weight_stay_equal_bit_for_bit():
    """kv heads fewer than tp are kept on several devices, as norms are; nothing may make them drift apart."""
    case = case_named("gqa dp=2,tp=4 zero=2 sequence_parallel")
    program = table.program_of(replace(case, train=case.train | {"precision": "fp32"}))
    state = compile_quickly(program.init.lower(), program)()
    step = compile_quickly(program.step.lower(program.abstract, program.abstract_batch()), program)
    for seed in range(3):
        state, _ = step(state, program.place(synthetic_batch(100, 16, table.LENGTH, True, seed)))
    compared = 0
    for leaf in jax.tree.leaves(state):
        first = {}
        for shard in leaf.addressable_shards:
            value = np.asarray(shard.data)
            compared += str(shard.index) in first
            assert np.array_equal(first.setdefault(str(shard.index), value), value)
    key = state.params["blocks"]["attention"]["key"]
    assert key.sharding.spec == jax.sharding.PartitionSpec(None, None, None, None) and compared > 100


def test_sequence_parallelism_without_tensor_parallelism_is_refused():
    case = replace(case_named("gqa dp=8"), train={"sequence_parallel": True})
    with pytest.raises(InputError, match=r"sequence_parallel.* tp = 1: leave it out"):
        table.program_of(case)


def test_draws_are_pinned_whatever_jax_is_told():
    expected = table.reference("gqa").parameters["blocks.mlp.up"]
    jax.config.update("jax_threefry_partitionable", False)
    program = table.program_of(case_named("gqa dp=4 remat=dots"))
    with wide_types():
        drawn = compile_quickly(program.init.lower(), program)().params["blocks"]["mlp"]["up"]
    assert np.array_equal(drawn, expected)


def test_64_bit_types_are_on_within_and_off_again_after():
    with wide_types():
        assert jnp.zeros(()).dtype == jnp.float64
    assert jnp.zeros(()).dtype == jnp.float32
