"""Every byte of the state is where theory says: on real shards, in the compiled step, and by the program itself."""

import math
import re
from collections import Counter
from dataclasses import dataclass, replace

import jax
import pytest

from jaxshard.analysis.shardable import unsharded
from jaxshard.config import Config, DataConfig, ModelConfig, OptimConfig, grouped
from jaxshard.errors import InputError
from jaxshard.models.presets import architecture
from jaxshard.parallel import rules
from jaxshard.parallel.axes import MeshShape
from jaxshard.parallel.mesh import parse_mesh, resolve_mesh
from jaxshard.training.describe import zero_notes
from jaxshard.training.invariance import compile_quickly, synthetic_batch
from jaxshard.training.program import Program, build_program, class_bytes

D, F, L, V, HEADS, T, B = 32, 64, 2, 128, 8, 8, 16
CLASSES = ("parameters", "gradients", "moments", "masters")
SIZES = {"fp32": (4, 4, 0), "bf16": (2, 4, 4), "pure-bf16": (2, 2, 0)}
"""Bytes of one parameter, of one moment, and of one master."""
COUNTERS = 12
"""Bytes of the state's three counters: step, skipped, skipped in a row."""
ADAMW, ADAFACTOR = OptimConfig(), OptimConfig(name="adafactor")


@dataclass(frozen=True)
class Row:
    mesh: str
    zero: int
    precision: str = "fp32"
    accumulation: int = 1

    @property
    def shape(self) -> MeshShape:
        sizes = parse_mesh(self.mesh)
        return resolve_mesh(self.mesh, math.prod(sizes.values()))

    def config(self, optim: OptimConfig = ADAMW, **model) -> Config:
        sizes = dict(d_model=D, d_ff=F, n_layers=L, n_heads=HEADS, n_kv_heads=HEADS, vocab_size=V)
        return Config(
            optim=optim,
            model=ModelConfig(family="llama", tie_embeddings=False, **(sizes | model)),
            data=DataConfig(seq_len=T),
            **grouped(
                mesh=self.mesh, zero=self.zero, global_batch=B, precision=self.precision, accumulation=self.accumulation
            ),
        )

    def program(self, optim: OptimConfig = ADAMW, **model) -> Program:
        return build_program(self.config(optim, **model), jax.devices()[: self.shape.devices])

    def formula(self) -> dict[str, int]:
        """ZeRO (Rajbhandari et al. 2020, section 5) with matrices split by tp; every size here divides."""
        N = (L * (4 * D * D + 3 * D * F) + 2 * V * D) // self.shape.model + (2 * L + 1) * D
        parameter, moment, master = SIZES[self.precision]
        split = lambda count, yes: count // self.shape.data if yes else count
        return {
            "parameters": split(N, self.zero == 3) * parameter,
            # Without accumulation ZeRO-1 reduces straight into shards, as ZeRO-2.
            "gradients": split(N, self.zero >= 2 or (self.zero == 1 and self.accumulation == 1)) * 4,
            "moments": 2 * split(N, self.zero >= 1) * moment + 4,
            "masters": split(N, self.zero >= 1) * master,
        }

    @property
    def state(self) -> int:
        return sum(self.formula()[name] for name in CLASSES if name != "gradients") + COUNTERS


MEASURED = [
    Row("dp=2", 0, "bf16", 2),
    Row("dp=2", 1, "fp32", 2),
    Row("dp=2", 2, "bf16"),
    Row("dp=2", 3, "fp32"),
    Row("dp=4", 0, "fp32"),
    Row("dp=4,tp=2", 1, "bf16", 2),
    Row("dp=4,tp=2", 2, "fp32", 2),
    Row("dp=4", 3, "bf16", 2),
    Row("dp=8", 0, "pure-bf16"),
    Row("dp=8", 1, "pure-bf16"),
    Row("dp=8", 2, "fp32", 2),
    Row("dp=8", 3, "bf16"),
    Row("replica=2,dp=2,tp=2", 3, "bf16", 2),
]


def bytes_by_device(tree) -> set[int]:
    """Bytes that each device really holds of the arrays of a tree."""
    held = Counter()
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            held[shard.device] += shard.data.nbytes
    return set(held.values()) or {0}


def loop_carries(hlo: str) -> list[Counter]:
    """The arrays that every loop of a compiled program carries, as "f32[2,8]" and their number."""
    return [Counter(re.findall(r"\w+\[[\d,]*\]", found)) for found in re.findall(r"= \(([^)]*)\) while\(", hlo)]


def local_gradients(row: Row) -> Counter:
    """Shapes of one device's accumulated gradients, by the formula: matrices by tp, and the largest dim by dp.

    Data groups (ZeRO-0 and 1) and replicas sum their own: a dim more, of which a device has one.
    """
    tp, dp = row.shape.model, row.shape.data if row.zero >= 2 else 1
    group = [1] if row.shape.replica > 1 or (row.zero <= 1 and row.shape.data > 1) else []
    heads, E = HEADS // tp, D // HEADS
    wide = [F // tp, D] if F // tp > D else [F // tp, D // dp]
    if F // tp > D:
        wide[0] //= dp
    shapes = [[L, D // dp, heads, E]] * 3 + [[L, heads, E, D // dp]] + [[L, *wide]] + [[L, *reversed(wide)]] * 2
    shapes += [[L, D // dp]] * 2 + [[V // dp, D] if tp == 1 else [V // tp, D // dp]] * 2 + [[D // dp]]
    return Counter(f"f32[{','.join(map(str, [*group, *shape]))}]" for shape in shapes)


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: f"{row.mesh} zero {row.zero} {row.precision}")
def test_bytes_equal_the_formula_on_shards_and_in_the_compiled_step(row, capfd):
    program, expected = row.program(), row.formula()
    assert class_bytes(program) == expected
    init = compile_quickly(program.init.lower(), program)
    state = init()
    for name, tree in (("parameters", state.params), ("moments", state.moments), ("masters", state.masters)):
        assert bytes_by_device(tree) == {expected[name]}
    step = compile_quickly(program.step.lower(program.abstract, program.abstract_batch()), program)
    memory = step.memory_analysis()
    batch = 4 * B * T * 4 // row.shape.batch_ways
    assert memory.argument_size_in_bytes == row.state + batch
    # Donation: every byte of the state is reused for the next one.
    assert memory.alias_size_in_bytes == row.state
    if row.accumulation > 1:
        assert any(carry >= local_gradients(row) for carry in loop_carries(step.as_text()))
    placed = program.place(synthetic_batch(V, B, T, True), row.accumulation)
    after, _ = step(state, placed)
    assert bytes_by_device(after) == {row.state}
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert "Involuntary full rematerialization" not in capfd.readouterr().err


ALL = [
    Row(mesh, zero, precision, accumulation)
    for mesh in ("dp=2", "dp=4", "dp=8", "dp=4,tp=2", "dp=2,tp=4", "replica=2,dp=4", "replica=2,dp=2,tp=2")
    for zero in range(4)
    for precision in SIZES
    for accumulation in (1, 2)
]


def test_the_programs_account_equals_the_formula_everywhere():
    for row in ALL:
        assert class_bytes(row.program()) == row.formula(), row


def test_state_is_created_sharded():
    """No device holds more while the state is made than its own share and one weight."""
    row = Row("dp=8", 3)
    whole = Row("dp=8", 0).state
    memory = compile_quickly(row.program().init.lower(), row.program()).memory_analysis()
    assert memory.output_size_in_bytes + memory.temp_size_in_bytes < whole / 4


def test_the_step_is_compiled_once():
    row = Row("dp=2,tp=2", 1, "bf16", 2)
    program = row.program()
    state = compile_quickly(program.init.lower(), program)()
    for seed in range(3):
        state, _ = program.step(state, program.place(synthetic_batch(V, B, T, True, seed), row.accumulation))
    assert program.step._cache_size() == 1


def _no_gradient_table(patch):
    patch.setitem(rules.ZERO_TABLES, 2, frozenset({"optimizer"}))


def _no_mlp_rule(patch):
    patch.delitem(rules.WEIGHT_RULES, "mlp")


def _nothing_shards_over_data(patch):
    patch.setattr(rules, "add_data_axis", lambda *_: None)


SABOTAGES = [
    (_no_gradient_table, Row("dp=8", 2, accumulation=2)),
    (_no_mlp_rule, Row("dp=4,tp=2", 0)),
    (_nothing_shards_over_data, Row("dp=4", 3)),
]


@pytest.mark.parametrize("sabotage, row", SABOTAGES, ids=lambda x: getattr(x, "__name__", None))
def test_a_missing_rule_is_seen_in_bytes(sabotage, row, monkeypatch):
    sabotage(monkeypatch)
    try:
        found = class_bytes(row.program())
    except InputError as error:
        assert "cannot be sharded as --zero asks" in str(error)
    else:
        assert found != row.formula()


def test_what_cannot_shard_is_refused_or_reported():
    row = Row("dp=4", 3)
    uneven = dict(d_model=18, n_heads=3, n_kv_heads=3, head_dim=6, d_ff=45, vocab_size=64)
    with pytest.raises(InputError, match=r"cannot be sharded as --zero asks.*blocks\.attention"):
        row.program(**uneven)
    # Where another dim divides, the weight lies there; norms stay whole, are few, and are listed.
    program = row.program(d_model=66, head_dim=4, d_ff=256)
    query = program.layout.specs["blocks"]["attention"]["query"]
    assert query.parameters == jax.sharding.PartitionSpec(None, None, "data", None)
    assert {leaf.path for leaf in program.replicated} == {
        "blocks.norm1.scale",
        "blocks.norm2.scale",
        "head.norm.scale",
    }
    # A parameter and two moments of each.
    assert {leaf.bytes for leaf in program.replicated} == {3 * 66 * 4, 3 * 66 * 4 * L}
    assert all("data = 4" in leaf.why for leaf in program.replicated)


WIDE = dict(d_model=130, n_heads=32, n_kv_heads=32, head_dim=4, d_ff=256, vocab_size=512)
"""Adafactor factors its weights; of their dims only the width does not divide by 4."""


@pytest.mark.parametrize("zero, precision", [(1, "fp32"), (3, "bf16")])
def test_what_is_listed_as_whole_is_what_lies_whole(zero, precision):
    """Adafactor's rows and columns lack dims of their weights, and are listed where they lack the one that divides."""
    program = Row("dp=4", zero, precision).program(ADAFACTOR, **WIDE)
    asked = [program.abstract.moments, program.abstract.masters]
    asked += [program.abstract.params] if zero == 3 else []
    whole = [x for x in jax.tree.leaves(asked) if x.ndim and not any(x.sharding.spec)]
    size = sum(x.size * x.dtype.itemsize for x in whole)
    assert sum(leaf.bytes for leaf in program.replicated) == size
    assert {leaf.path for leaf in program.replicated} > {"blocks.attention.query", "blocks.mlp.down", "head.out"}
    assert any(leaf.why.startswith("no dim of its moments (2, 130) divides") for leaf in program.replicated)


@pytest.mark.parametrize("optim", [ADAMW, ADAFACTOR], ids=lambda optim: optim.name)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("zero", [1, 3])
def test_one_per_cent_is_that_of_the_whole_state(zero, precision, optim):
    """A run and the planner refuse the same, with the bytes that lie whole of all bytes of the state."""
    row, uneven = Row("dp=4", zero, precision), WIDE | dict(n_heads=2, n_kv_heads=2, head_dim=66, d_ff=258)
    config = row.config(optim, **uneven)
    arch = architecture(config.model)
    said = unsharded(arch, optim, precision, row.shape, zero, ()) or ""
    with pytest.raises(InputError) as refused:
        build_program(config, jax.devices()[:4])
    assert str(refused.value) == said
    names = re.search(r"--parallel.allow_replicated '\[(.*)\]'", said)
    assert names
    allowed = tuple(names[1].split(", "))
    config = config.with_parallel(allow_replicated=allowed)
    program = build_program(config, jax.devices()[:4])
    assert unsharded(arch, optim, precision, row.shape, zero, allowed) is None
    total = class_bytes(replace(program, abstract=jax.tree.map(_everywhere, program.abstract)))
    total = total["parameters"] + total["masters"] + total["moments"]
    whole = sum(leaf.bytes for leaf in program.replicated)
    assert said.startswith(f"{whole:,} of {total:,} bytes of parameters, masters and moments (")


def _everywhere(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    whole = jax.sharding.NamedSharding(leaf.sharding.mesh, jax.sharding.PartitionSpec())
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole)


def test_zero_without_a_data_axis_says_that_it_changes_nothing():
    row = Row("tp=2", 3)
    assert zero_notes(row.program()) == [
        "--zero 3 changes nothing here: it splits state over the data axis, and dp = 1"
    ]
    assert class_bytes(row.program()) == Row("tp=2", 0).formula()
    assert zero_notes(Row("tp=2", 0).program()) == zero_notes(Row("dp=2", 3).program()) == []
