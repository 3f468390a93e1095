# ruff: noqa: E501
"""The reader of compiled programs: shapes, instructions, sources, loops and FLOPs."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxshard.xla.flops import computation_flops
from jaxshard.xla.hlo import Array, element_bits, leaves, parse, parse_shape, shape_bytes
from jaxshard.xla.loops import Scope, scopes

# A TPU program: no known trip counts, constants carried into the inner loop through tuples ("wide" parameters).
TPU_LOOPS = """HloModule jit_nested, is_scheduled=true, num_partitions=16

FileNames
1 "/code/model.py"

FunctionNames
1 "step"

FileLocations
1 {file_name_id=1 function_name_id=1 line=37 end_line=37 column=4 end_column=4}

StackFrames
1 {file_location_id=1 parent_frame_id=1}


%inner (p: (s32[], f32[8], s32[])) -> (s32[], f32[8], s32[]) {
  %two = s32[]{:T(128)} constant(2)
  %p = (s32[]{:T(128)}, f32[8]{0:T(128)S(1)}, s32[]{:T(128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %x = f32[8]{0:T(128)S(1)} get-tuple-element(%p), index=1
  %y = f32[8]{0:T(128)S(1)} sine(%x), metadata={op_name="jit(nested)/while/body/while/body/sin" stack_frame_id=1}
  %next = s32[]{:T(128)} add(%i, %two)
  %bound = s32[]{:T(128)} get-tuple-element(%p), index=2
  ROOT %t = (s32[]{:T(128)}, f32[8]{0:T(128)S(1)}, s32[]{:T(128)}) tuple(%next, %y, %bound)
}

%inner_condition (p.1: (s32[], f32[8], s32[])) -> pred[] {
  %p.1 = (s32[]{:T(128)}, f32[8]{0:T(128)S(1)}, s32[]{:T(128)}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%p.1), index=0
  %bound.1 = s32[]{:T(128)} get-tuple-element(%p.1), index=2
  ROOT %less = pred[]{:T(512)} compare(%i.1, %bound.1), direction=LT
}

%outer (q: (s32[], f32[8], s32[])) -> (s32[], f32[8], s32[]) {
  %minus = s32[]{:T(128)} constant(-1)
  %zero = s32[]{:T(128)} constant(0)
  %q = (s32[]{:T(128)}, f32[8]{0:T(128)}, s32[]{:T(128)}) parameter(0)
  %j = s32[]{:T(128)} get-tuple-element(%q), index=0
  %v = f32[8]{0:T(128)} get-tuple-element(%q), index=1
  %ten = s32[]{:T(128)} get-tuple-element(%q), index=2
  %start = s32[]{:T(128)} copy(%zero)
  %into = (s32[]{:T(128)}, f32[8]{0:T(128)S(1)}, s32[]{:T(128)}) tuple(%start, %v, %ten)
  %while.1 = (s32[]{:T(128)}, f32[8]{0:T(128)S(1)}, s32[]{:T(128)}) while(%into), condition=%inner_condition, body=%inner
  %w = f32[8]{0:T(128)} get-tuple-element(%while.1), index=1
  %down = s32[]{:T(128)} add(%j, %minus)
  ROOT %t.1 = (s32[]{:T(128)}, f32[8]{0:T(128)}, s32[]{:T(128)}) tuple(%down, %w, %ten)
}

%outer_condition (q.1: (s32[], f32[8], s32[])) -> pred[] {
  %low = s32[]{:T(128)} constant(4)
  %q.1 = (s32[]{:T(128)}, f32[8]{0:T(128)}, s32[]{:T(128)}) parameter(0)
  %j.1 = s32[]{:T(128)} get-tuple-element(%q.1), index=0
  ROOT %greater = pred[]{:T(512)} compare(%low, %j.1), direction=LE
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %nine = s32[]{:T(128)} constant(9)
  %ten.1 = s32[]{:T(128)} constant(10)
  %a = f32[8]{0:T(128)} parameter(0)
  %pack = (s32[]{:T(128)}, f32[8]{0:T(128)}, s32[]{:T(128)}) tuple(%nine, %a, /*index=2*/%ten.1)
  %while.2 = (s32[]{:T(128)}, f32[8]{0:T(128)}, s32[]{:T(128)}) while(%pack), condition=%outer_condition, body=%outer
  ROOT %out = f32[8]{0:T(128)} get-tuple-element(%while.2), index=1
}
"""


@pytest.mark.parametrize(
    ("text", "arrays", "size"),
    [
        ("f32[]", [Array("f32", ())], 4),
        ("bf16[8,128]{1,0:T(8,128)(2,1)S(1)}", [Array("bf16", (8, 128), 1)], 2048),
        ("f32[4,4]{1,0:S(5)}", [Array("f32", (4, 4), 5)], 64),
        (
            "(s32[2]{0}, (pred[3], f8e4m3fn[5]{0}))",
            [Array("s32", (2,)), Array("pred", (3,)), Array("f8e4m3fn", (5,))],
            16,
        ),
        (
            "(f32[2]{0}, /*index=1*/s4[3]{0}, u32[]{:S(2)})",
            [Array("f32", (2,)), Array("s4", (3,)), Array("u32", (), 2)],
            14,
        ),
        ("()", [], 0),
        ("token[]", [Array("token", ())], 0),
        ("c64[2]{0}", [Array("c64", (2,))], 16),
    ],
)
def test_shapes(text, arrays, size):
    shape = parse_shape(text)
    assert list(leaves(shape)) == arrays
    assert shape_bytes(shape) == size


def test_element_bits():
    assert [element_bits(dtype) for dtype in ("pred", "s4", "bf16", "f8e5m2", "u64")] == [8, 4, 16, 8, 64]


def test_instructions_and_sources():
    module = parse(TPU_LOOPS)
    assert (module.name, module.partitions, module.scheduled) == ("jit_nested", 16, True)
    assert set(module.computations) == {"inner", "inner_condition", "outer", "outer_condition", "main"}
    loop = module.entry.by_name["while.2"]
    assert (loop.opcode, loop.operands, loop.called) == ("while", ("pack",), ("outer_condition", "outer"))
    assert module.entry.by_name["pack"].operands == ("nine", "a", "ten.1")
    sine = module.computations["inner"].by_name["y"]
    assert sine.op_name == "jit(nested)/while/body/while/body/sin"
    assert module.source(sine) == "/code/model.py:37"
    assert module.computations["outer"].root.name == "t.1"


def test_other_spellings():
    text = """HloModule old
add { a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] add(a, b)
}
ENTRY main {
  x = f32[4]{0} parameter(0)
  say = f32[4]{0} custom-call(f32[4]{0} x), custom_call_target="f)(", metadata={op_name="a\\"b" source_file="m.py" source_line=7}
  ROOT r = f32[4]{0} all-reduce(f32[4]{0} say), replica_groups={}, to_apply=add
}
"""
    module = parse(
        text.replace("add {", "add (a: f32[]) -> f32[] {").replace("ENTRY main {", "ENTRY main (x: f32[4]) -> f32[4] {")
    )
    assert module.entry.root.operands == ("say",)
    say = module.entry.by_name["say"]
    assert say.operands == ("x",)
    assert module.source(say) == "m.py:7"


def test_text_that_is_not_hlo():
    with pytest.raises(ValueError, match="no ENTRY"):
        parse("module @jit_f { }")


def loops_by_kind(module):
    return [(scope.kind, [loop.trips for loop in scope.loops]) for scope in scopes(module)]


def test_trip_counts_are_derived_where_the_compiler_does_not_say():
    assert loops_by_kind(parse(TPU_LOOPS)) == [
        ("entry", []),
        ("condition", [7]),  # 9 down to 4 is six runs; the condition is looked at once more
        ("body", [6]),
        ("condition", [6, 6]),
        ("body", [6, 5]),  # 0 to 10 by twos
    ]


def test_a_bound_from_data_is_unknown():
    text = TPU_LOOPS.replace("%ten.1 = s32[]{:T(128)} constant(10)", "%ten.1 = s32[]{:T(128)} parameter(1)")
    assert loops_by_kind(parse(text))[-1] == ("body", [6, None])


@pytest.mark.parametrize(
    ("direction", "first", "trips"), [("LT", 0, 5), ("LE", 0, 6), ("NE", 2, 4), ("LT", 9, 1), ("LT", 10, 0)]
)
def test_directions(direction, first, trips):
    text = TPU_LOOPS.replace("direction=LT", f"direction={direction}").replace(
        "%zero = s32[]{:T(128)} constant(0)", f"%zero = s32[]{{:T(128)}} constant({first})"
    )
    assert loops_by_kind(parse(text))[-1] == ("body", [6, trips])


def compiled_text(function, *args):
    return jax.jit(function).lower(*args).compile().as_text()


def test_loops_of_real_programs_known_and_derived():
    def nested(x):
        def outer(carry, _):
            inner = lax.fori_loop(2, 9, lambda i, c: jnp.sin(c) * i, carry)
            return lax.scan(lambda c, w: (jnp.cos(c) + w, None), inner, jnp.arange(4.0))[0], None

        return lax.scan(outer, x, None, length=3)[0]

    text = compiled_text(nested, jnp.ones((64,)))
    known = sorted(trips for kind, trips in loops_by_kind(parse(text)) if kind == "body")
    derived = sorted(
        trips for kind, trips in loops_by_kind(parse(text.replace("known_trip_count", "x"))) if kind == "body"
    )
    assert known == derived == [[3], [3, 4], [3, 7]]


def test_while_with_a_condition_on_data():
    def halve(x):
        return lax.while_loop(lambda c: c.sum() > 1, lambda c: c / 2, x)

    assert ("body", [None]) in loops_by_kind(parse(compiled_text(halve, jnp.ones((8,)))))


def test_branches():
    def pick(x, k):
        return lax.switch(k, [jnp.sin, lambda v: lax.fori_loop(0, 5, lambda _, c: c * c, v), jnp.tanh], x)

    module = parse(compiled_text(pick, jnp.ones((2048, 64)), 1))
    found = [scope for scope in scopes(module) if scope.branches]
    assert {scope.branches[0].split(" ", 1)[1] for scope in found} == {f"branch {k} of 3" for k in (1, 2, 3)}


def module_flops(text):
    module = parse(text)
    return computation_flops(Scope(module, module.entry))


def test_flops_of_dots_in_loops():
    """[B,D] x [D,F] and its transpose, three layers, on top of one batched product [B,H,T,D] x [B,H,D,T]."""
    b, d, f, h, t = 16, 32, 64, 4, 8

    def step(x, w, q):
        x, _ = lax.scan(lambda c, k: ((c @ k) @ k.T, None), x, w)
        return x, jnp.einsum("bhtd,bhsd->bhts", q, q)

    text = compiled_text(step, jnp.ones((b, d)), jnp.ones((3, d, f)), jnp.ones((b, h, t, d)))
    assert module_flops(text) == 3 * 2 * (2 * b * d * f) + 2 * b * h * t * t * d


@pytest.mark.parametrize(
    ("line", "flops"),
    [
        # [8,2048,4096] = [8,2048,2048] x [2048,4096]: batch as a spatial dim of size 1 in the kernel
        (
            "f32[8,2048,4096]{2,1,0} convolution(%a, %b), window={size=1}, dim_labels=0bf_io0->0bf",
            ((8, 2048, 2048), (2048, 4096, 1), 2 * 8 * 2048 * 2048 * 4096),
        ),
        # [2048,4096] = sum over 8 x 2048 rows: the spatial dim is contracted
        (
            "f32[2048,4096,1]{1,0,2} convolution(%a, %b), window={size=8}, dim_labels=0fb_0io->bf0",
            ((8, 2048, 2048), (8, 2048, 4096), 2 * 8 * 2048 * 2048 * 4096),
        ),
        # a batched product [4,16,32] x [4,32,64]: each output position meets one kernel position
        (
            "f32[4,16,64]{2,1,0} convolution(%a, %b), window={size=4 stride=3 pad=0_0 lhs_dilate=4}, dim_labels=0bf_0io->0bf",
            ((4, 16, 32), (4, 32, 64), 2 * 4 * 16 * 32 * 64),
        ),
    ],
)
def test_flops_of_tpu_convolutions(line, flops):
    left, right, expected = flops
    shape = lambda dims: f"f32[{','.join(map(str, dims))}]"
    text = (
        f"HloModule m\n\nENTRY %main (a: {shape(left)}, b: {shape(right)}) -> f32[] {{\n"
        f"  %a = {shape(left)} parameter(0)\n  %b = {shape(right)} parameter(1)\n  ROOT %c = {line}\n}}\n"
    )
    assert module_flops(text) == expected


def test_flops_of_library_calls():
    text = """HloModule m

ENTRY %main (a: bf16[128,64], b: bf16[64,32]) -> bf16[128,32] {
  %a = bf16[128,64]{1,0} parameter(0)
  %b = bf16[64,32]{1,0} parameter(1)
  ROOT %c = (bf16[128,32]{1,0}, s8[1024]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
}
"""
    assert module_flops(text) == 2 * 128 * 64 * 32
