"""What names say, and how the reader finds them where compilers move, merge or drop them."""

from collections.abc import Mapping

import pytest
from ledger_layouts import config, program_for

from jaxshard.analysis.compare import check
from jaxshard.analysis.equivalences import EQUIVALENCES
from jaxshard.analysis.expected import expected
from jaxshard.analysis.facts import Facts, WeightFact, facts_of
from jaxshard.analysis.ledger import Row, rows
from jaxshard.analysis.purposes import Piece, Reader, family, read
from jaxshard.analysis.reasons import FAMILIES
from jaxshard.xla.collectives import module_collectives
from jaxshard.xla.hlo import parse

CPU = "cpu:8"
PATHS = frozenset({"blocks.mlp.up", "blocks.mlp.down", "blocks.attention.key", "blocks.norm1.scale", "head.out"})
MESH = {"replica": 1, "stage": 1, "data": 4, "model": 2}


@pytest.fixture(scope="module")
def facts() -> Facts:
    return facts_of(program_for(config("dp=4,tp=2", 3), CPU))


@pytest.fixture(scope="module")
def weights(facts) -> Mapping[str, WeightFact]:
    return {weight.path: weight for weight in facts.weights}


IN = "jit(train_step)/jvp()/while/body/closed_call"
BACK = "jit(train_step)/transpose(jvp())/while/body/closed_call/checkpoint"
DATA, MODEL = ("data",), ("model",)


@pytest.mark.parametrize(
    ("op_name", "kind", "axes", "expected"),
    [
        (f"{IN}/weight_gather/blocks.mlp.up/sharding_constraint", "all-gather", DATA, "gather"),
        (f"{BACK}/rematted_computation/weight_gather/blocks.mlp.up/x", "all-gather", DATA, "gather"),
        (f"{IN}/attention/blocks.norm1.scale/reduce_precision", "all-reduce", DATA, "gather"),
        ("state.params['blocks']['mlp']['up']", "all-gather", DATA, "gather"),
        (f"{IN}/mlp/blocks.mlp.down/btf,fd->btd/dot_general", "all-reduce", MODEL, "row"),
        (f"{IN}/mlp/blocks.mlp.down/btf,fd->btd/dot_general", "collective-permute", MODEL, "row"),
        (f"{IN}/mlp/blocks.mlp.up/btd,df->btf/dot_general", "collective-permute", MODEL, "sequence"),
        (f"{IN}/mlp/blocks.mlp.up/btd,df->btf/dot_general", "collective-permute", DATA, "gather"),
        (f"{BACK}/mlp/blocks.mlp.up/input_grad/dot_general", "collective-permute", MODEL, "column"),
        (f"{BACK}/mlp/blocks.mlp.up/input_grad/dot_general", "reduce-scatter", MODEL, "column"),
        (f"{BACK}/mlp/blocks.mlp.up/weight_grad/dot_general", "reduce-scatter", DATA, "gradient"),
        (f"{BACK}/mlp/blocks.norm1.scale/reduce_sum", "all-reduce", DATA, "vector"),
        (f"{IN}/mlp/layout/batch,sequence,embed/sharding_constraint", "all-gather", MODEL, "sequence"),
        (f"{BACK}/attention/layout/batch,sequence,kv_heads,head_dim/x", "all-gather", MODEL, "kv"),
        ("jit(train_step)/optimizer/blocks.mlp.up/select_n", "all-gather", DATA, "update"),
        ("jit(train_step)/param_update/blocks.mlp.up/sharding_constraint", "all-gather", DATA, "update"),
        ("jit(train_step)/optimizer/mul", "all-reduce", DATA, "optimizer"),
        ("jit(train_step)/grad_norm/reduce_sum", "all-reduce", DATA, "bookkeeping"),
        ("jit(train_step)/jvp(loss)/reduce_max", "all-reduce", MODEL, "loss"),
        ("jit(train_step)/jvp(loss)/input_grad/head.out/dot_general", "all-reduce", MODEL, "loss-input"),
        ("jit(train_step)/jvp(loss)/weight_grad/head.out/dot_general", "reduce-scatter", DATA, "gradient"),
        ("jit(train_step)/jvp(embedding)/embedding.tokens/reduce", "all-reduce", MODEL, "embedding"),
        ("jit(train_step)/while/body/pipeline_send/concatenate", "collective-permute", ("stage",), "send"),
        ("jit(train_step)/jvp()/sort", "all-reduce", DATA, ""),
    ],
)
def test_a_name_says_what_for(op_name, kind, axes, expected, weights):
    assert family(read(op_name, frozenset(weights)), kind, axes, weights) == expected


def test_a_name_says_when_and_of_what():
    name = read(f"{BACK}/rematted_computation/weight_gather/blocks.mlp.up/sharding_constraint", PATHS)
    assert (name.phase, name.marks, name.path) == ("recomputed", ("weight_gather",), "blocks.mlp.up")
    assert read(f"{BACK}/mlp/blocks.mlp.up/weight_grad/dot_general", PATHS).phase == "backward"
    assert not read("jit(train_step)/convert_element_type", PATHS).speaks


def pieces(body: str) -> list[Piece]:
    """Of the one collective in a program with this body."""
    module = parse(f"HloModule m, num_partitions=8\n{body}")
    (found,) = module_collectives(module, MESH)
    return Reader(module, PATHS).pieces(found)


GROUPS = "replica_groups=[2,4]<=[4,2]T(1,0)"


def test_merged_names_are_taken_apart():
    made = "metadata={op_name=\"state.params['head']['out']\"}"
    body = f"""
ENTRY %e (a: f32[8], b: f32[8]) -> (f32[32], f32[32]) {{
  %a = f32[8]{{0}} parameter(0), {made}
  %b = f32[8]{{0}} parameter(1), {made}
  ROOT %g = (f32[32]{{0}}, f32[32]{{0}}) all-gather(%a, %b), {GROUPS}, dimensions={{0}}, \
metadata={{op_name="jit(f)/weight_gather/(blocks.mlp.up/convert:blocks.mlp.down/convert)"}}
}}
"""
    assert [piece.name.path for piece in pieces(body)] == ["blocks.mlp.up", "blocks.mlp.down"]


def test_a_combined_sum_is_named_by_what_it_sums_and_a_joined_array_is_taken_apart():
    """The call bears the first name only; its second array is two norms' gradients, end to end, out of a fusion."""
    body = f"""
%f (p: f32[4], q: f32[2]) -> (f32[4], f32[2]) {{
  %p = f32[4]{{0}} parameter(0)
  %q = f32[2]{{0}} parameter(1)
  %x = f32[4]{{0}} negate(%p), metadata={{op_name="jit(f)/transpose(jvp())/blocks.norm1.scale/reduce_sum"}}
  %y = f32[2]{{0}} negate(%q), metadata={{op_name="jit(f)/transpose(jvp())/blocks.attention.key/weight_grad/dot"}}
  ROOT %t = (f32[4]{{0}}, f32[2]{{0}}) tuple(%x, %y)
}}

ENTRY %e (a: f32[4], b: f32[2]) -> (f32[4], f32[6]) {{
  %a = f32[4]{{0}} parameter(0)
  %b = f32[2]{{0}} parameter(1)
  %u = f32[4]{{0}} negate(%a), metadata={{op_name="jit(f)/transpose(jvp())/blocks.mlp.up/weight_grad/dot_general"}}
  %m = (f32[4]{{0}}, f32[2]{{0}}) fusion(%a, %b), kind=kLoop, calls=%f, metadata={{op_name="jit(f)/head.out/add"}}
  %x = f32[4]{{0}} get-tuple-element(%m), index=0
  %y = f32[2]{{0}} get-tuple-element(%m), index=1
  %c = f32[6]{{0}} concatenate(%x, %y), dimensions={{0}}
  ROOT %r = (f32[4]{{0}}, f32[6]{{0}}) all-reduce(%u, %c), {GROUPS}, to_apply=%f, \
metadata={{op_name="jit(f)/transpose(jvp())/blocks.mlp.up/weight_grad/dot_general"}}
}}
"""
    found = [(piece.name.path, piece.bytes) for piece in pieces(body)]
    assert found == [("blocks.mlp.up", 16), ("blocks.norm1.scale", 16), ("blocks.attention.key", 8)]


def test_a_part_among_zeros_is_a_gather_of_what_the_loop_was_given():
    """TPUs gather a norm's scale so; the sum bears the name of what reads it, or none."""
    body = f"""
%body (t: (s32[], f32[2])) -> (s32[], f32[2]) {{
  %t = (s32[], f32[2]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %p = f32[2]{{0}} get-tuple-element(%t), index=1
  %z = f32[] constant(0)
  %zeros = f32[8]{{0}} broadcast(%z), dimensions={{}}
  %d = f32[8]{{0}} dynamic-update-slice(%zeros, %p, %i)
  %r = f32[8]{{0}} all-reduce(%d), {GROUPS}, metadata={{op_name="jit(f)/jvp()/while/body/head.out/dot_general"}}
  ROOT %o = (s32[], f32[2]{{0}}) tuple(%i, %p)
}}

%cond (t: (s32[], f32[2])) -> pred[] {{
  %t = (s32[], f32[2]{{0}}) parameter(0)
  ROOT %k = pred[] constant(false)
}}

ENTRY %e (i: s32[], s: f32[2]) -> (s32[], f32[2]) {{
  %i = s32[] parameter(0)
  %s = f32[2]{{0}} parameter(1), metadata={{op_name="state.params['blocks']['norm1']['scale']"}}
  %t = (s32[], f32[2]{{0}}) tuple(%i, %s)
  ROOT %w = (s32[], f32[2]{{0}}) while(%t), condition=%cond, body=%body
}}
"""
    (piece,) = pieces(body)
    assert (piece.kind, piece.name.path) == ("all-gather", "blocks.norm1.scale")
    assert pieces(body.replace("constant(0)", "constant(1)"))[0].kind == "all-reduce"


def test_a_buffer_is_named_by_what_the_loop_puts_there():
    """The sum of a loop's gradients: its zeros, what is carried along, what comes out; the update alone has a name."""
    body = f"""HloModule m
%body (t: (s32[], f32[3,8])) -> (s32[], f32[3,8]) {{
  %t = (s32[], f32[3,8]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %p = f32[3,8]{{1,0}} get-tuple-element(%t), index=1
  %g = f32[1,8]{{1,0}} constant(1), metadata={{op_name="{BACK}/mlp/blocks.mlp.up/weight_grad/dot_general"}}
  %d = f32[3,8]{{1,0}} dynamic-update-slice(%p, %g, %i, %i), metadata={{op_name="{BACK}/dynamic_update_slice"}}
  ROOT %o = (s32[], f32[3,8]{{1,0}}) tuple(%i, %d)
}}

%cond (t: (s32[], f32[3,8])) -> pred[] {{
  %t.1 = (s32[], f32[3,8]{{1,0}}) parameter(0)
  ROOT %k = pred[] constant(false)
}}

ENTRY %e (i: s32[]) -> (s32[], f32[3,8]) {{
  %n = s32[] parameter(0)
  %z = f32[] constant(0)
  %zeros = f32[3,8]{{1,0}} broadcast(%z), dimensions={{}}
  %s = (s32[], f32[3,8]{{1,0}}) tuple(%n, %zeros)
  ROOT %w = (s32[], f32[3,8]{{1,0}}) while(%s), condition=%cond, body=%body
}}
"""
    reader = Reader(parse(body), PATHS)
    for value in ("d", "t{1}", "w{1}", "zeros"):
        name = reader.of_value(value)
        assert name is not None and (name.path, name.marks) == ("blocks.mlp.up", ("weight_grad",)), value
    assert reader.of_value("n") is reader.of_value("t{0}") is reader.of_value("none") is None


@pytest.mark.parametrize(("size", "expected"), [(1, "bookkeeping"), (4096, "")])
def test_a_norm_is_a_number_and_what_it_is_made_from_is_not_bookkeeping(facts, size, expected):
    body = f"""HloModule m, num_partitions=8
ENTRY %e (a: f32[{size}]) -> f32[{4 * size}] {{
  %a = f32[{size}]{{0}} parameter(0)
  ROOT %g = f32[{4 * size}]{{0}} all-gather(%a), {GROUPS}, dimensions={{0}}, metadata={{op_name="jit(f)/grad_norm/mul"}}
}}
"""
    (found,) = rows(parse(body), facts.sizes, facts)
    assert found.family == expected
    assert bool(check([found], facts, "gpu", 0).failures) == (not expected)


def test_a_number_in_a_combined_call_is_not_what_the_call_is_named_after(facts):
    body = f"""HloModule m, num_partitions=8
%add (x: f32[], y: f32[]) -> f32[] {{
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %s = f32[] add(%x, %y)
}}

ENTRY %e (a: f32[512], b: f32[]) -> (f32[512], f32[]) {{
  %a = f32[512]{{0}} parameter(0)
  %b = f32[] parameter(1)
  ROOT %r = (f32[512]{{0}}, f32[]) all-reduce(%a, %b), {GROUPS}, to_apply=%add, \
metadata={{op_name="jit(f)/param_update/blocks.norm1.scale/convert"}}
}}
"""
    found = {row.family: row.bytes for row in rows(parse(body), facts.sizes, facts)}
    assert found == {"update": 2048, "bookkeeping": 4}


def row(family: str, kind: str, axes: tuple[str, ...], size: int, count: int, **more) -> Row:
    plain = {"exact": True, "reason": FAMILIES[family], "phase": "", "source": "", "parameters": (), "name": ""}
    plain |= {"is_async": False, "overlap": "", "dtype": "bf16", "note": "", "form": "plain"}
    return Row(kind, axes, size, count, family=family, **(plain | more))


def as_asked(facts: Facts) -> list[Row]:
    return [row(each.family, each.kind, each.axes, each.bytes, each.count) for each in expected(facts)]


def other(rows: list[Row], family: str, **change) -> list[Row]:
    return [Row(**{**vars(each), **change}) if each.family == family else each for each in rows]


@pytest.mark.parametrize(
    ("family", "change", "said"),
    [
        ("gradient", {"kind": "all-reduce"}, "keeps a part"),
        ("row", {"kind": "collective-permute"}, "a collective matmul"),
    ],
)
def test_equivalent_forms_count_alike_and_are_said(family, change, said):
    facts = facts_of(program_for(config("dp=4,tp=2", 2, sequence_parallel=True), CPU))
    changed = check(other(as_asked(facts), family, **change), facts, "tpu")
    assert not changed.unexpected and said in " ".join(changed.rewrites)
    on_gpu = check(other(as_asked(facts), family, **change), facts, "gpu")
    assert bool(on_gpu.unexpected) == (family == "gradient")  # twice the bytes


def test_cpus_sum_each_product_and_once_more_is_too_much(facts):
    wide = [each for each in as_asked(facts) if each.family != "column"]
    stream = next(each.bytes for each in expected(facts) if each.family == "column")
    products = ("attention.query", "attention.key", "attention.value", "mlp.gate", "mlp.up")
    each = [row("column", "all-reduce", MODEL, stream, 3, path=f"blocks.{path}") for path in products]
    judged = check([*wide, *each], facts, "cpu")
    assert not judged.unexpected and "one sum for each product" in " ".join(judged.rewrites)
    again = check([*wide, *each, each[0]], facts, "cpu")
    assert sum(item.bytes for item in again.unexpected) == 3 * stream
    assert sum(item.bytes for item in check([*wide, *each], facts, "gpu").unexpected) == 3 * 3 * stream


def test_every_equivalence_names_known_platforms():
    known = {"cpu", "gpu", "tpu", "tpu-f16"}
    assert all(set(each.platforms) <= known for each in EQUIVALENCES)
    assert len({each.text for each in EQUIVALENCES}) == len(EQUIVALENCES)
