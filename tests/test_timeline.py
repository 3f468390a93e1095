"""Step times from compiled programs: single instructions, what runs beside what, whole steps against formulas."""

from dataclasses import replace

import pytest

from jaxshard.analysis.arithmetic import flops_per_token, matmul_parameters
from jaxshard.analysis.links import all_reduce, group, reduce_scatter
from jaxshard.analysis.roofline import roofline, traffic
from jaxshard.analysis.timeline import SLOWED, walk
from jaxshard.config import Config, DataConfig, ModelConfig, grouped
from jaxshard.models.presets import architecture
from jaxshard.planner.confirm import compile_step
from jaxshard.xla.compile import Compiled
from jaxshard.xla.flops import computation_flops
from jaxshard.xla.hardware import parse_target
from jaxshard.xla.hlo import parse
from jaxshard.xla.loops import Scope

MESH = {"replica": 1, "stage": 1, "data": 8, "model": 2}
H100 = parse_target("h100:16")
COSTS = roofline(H100, MESH)

# One program: a gather over data that runs beside a matmul, a loop of eight turns with an all-reduce over model in it.
PROGRAM = """HloModule step, is_scheduled=true, num_partitions=16

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%condition (p: (s32[], bf16[4096,4096])) -> pred[] {
  %p = (s32[], bf16[4096,4096]{1,0}) parameter(0)
  %turn = s32[] get-tuple-element(%p), index=0
  %eight = s32[] constant(8)
  ROOT %less = pred[] compare(%turn, %eight), direction=LT
}

%body (q: (s32[], bf16[4096,4096])) -> (s32[], bf16[4096,4096]) {
  %q = (s32[], bf16[4096,4096]{1,0}) parameter(0)
  %turn.1 = s32[] get-tuple-element(%q), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%turn.1, %one)
  %x.1 = bf16[4096,4096]{1,0} get-tuple-element(%q), index=1
  %product.1 = bf16[4096,4096]{1,0} dot(%x.1, %x.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %reduced = bf16[4096,4096]{1,0} all-reduce(%product.1), channel_id=2, replica_groups=[8,2]<=[16], to_apply=%add
  ROOT %out = (s32[], bf16[4096,4096]{1,0}) tuple(%next, %reduced)
}

ENTRY %main (a: bf16[512,4096], b: bf16[4096,4096]) -> bf16[4096,4096] {
  %a = bf16[512,4096]{1,0} parameter(0)
  %b = bf16[4096,4096]{1,0} parameter(1)
  %gather = (bf16[512,4096]{1,0}, bf16[4096,4096]{1,0}) all-gather-start(%a), channel_id=1, replica_groups=[2,8]<=[8,2]T(1,0), dimensions={0}
  %product = bf16[4096,4096]{1,0} dot(%b, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %gathered = bf16[4096,4096]{1,0} all-gather-done(%gather)
  %zero = s32[] constant(0)
  %begin = (s32[], bf16[4096,4096]{1,0}) tuple(%zero, %gathered)
  %loop = (s32[], bf16[4096,4096]{1,0}) while(%begin), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"8"}}
  ROOT %end = bf16[4096,4096]{1,0} get-tuple-element(%loop), index=1
}
"""  # noqa: E501


def test_a_step_is_its_instructions_with_loops_and_what_is_exposed():
    found = walk(parse(PROGRAM), COSTS)
    rates, net = COSTS.rates, COSTS.rates.hw.net
    payload = 2 * 4096 * 4096
    product = rates.matmul(4096, 4096, 4096)
    gather = reduce_scatter(group(net, 8, 2), payload, net, rates.c, rates.software)
    reduction = all_reduce(group(net, 2, 1), payload, net, rates.c, rates.software)
    assert gather > product  # so that a part of it is exposed
    assert found.parts["matmuls"] == pytest.approx(9 * product)
    assert found.parts["collectives over dp"] == pytest.approx(gather - product)
    assert found.hidden == {"collectives over dp": pytest.approx(product)}
    assert found.parts["collectives over tp"] == pytest.approx(8 * reduction)
    assert found.parts[SLOWED] == pytest.approx(rates.c.borrowed * product)
    assert found.exposed == pytest.approx(gather - product + 8 * reduction)
    step, loop = found.blocks
    assert step.seconds == pytest.approx(found.seconds) == pytest.approx(sum(found.parts.values()), rel=1e-3)
    assert (loop.name, loop.what, loop.runs) == ("loop", "loop", 8)
    assert [span.kind for span in step.spans] == ["collectives over dp", "matmul", "loop"]
    assert [span.kind for span in loop.spans] == ["memory", "matmul", "collectives over tp"]
    assert loop.seconds == pytest.approx(product + reduction + rates.gap, rel=1e-4)  # the counter has a kernel too


def test_what_the_compiler_rematerialises_is_told_apart():
    line = "  %product.1 = bf16[4096,4096]{1,0} dot(%x.1, %x.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n"
    twice = PROGRAM.replace(line, line + line.replace("%product.1", "%product.1.remat2"))
    assert walk(parse(twice), COSTS).again == pytest.approx(8 * COSTS.rates.matmul(4096, 4096, 4096))
    assert walk(parse(PROGRAM), COSTS).again == 0
    moved = PROGRAM.replace("%product.1", "%product.1.remat2")  # the copy alone is left
    assert walk(parse(moved), COSTS).again == 0


QUEUE = """HloModule queue, is_scheduled=true, num_partitions=16

ENTRY %main (a: bf16[512,4096], b: bf16[4096,4096]) -> bf16[4096,4096] {
  %a = bf16[512,4096]{1,0} parameter(0)
  %b = bf16[4096,4096]{1,0} parameter(1)
  %first = (bf16[512,4096]{1,0}, bf16[4096,4096]{1,0}) all-gather-start(%a), channel_id=1, replica_groups=[2,8]<=[8,2]T(1,0), dimensions={0}
  %second = (bf16[512,4096]{1,0}, bf16[4096,4096]{1,0}) all-gather-start(%a), channel_id=2, replica_groups=[2,8]<=[8,2]T(1,0), dimensions={0}
  %late = bf16[4096,4096]{1,0} all-gather-done(%second)
  %early = bf16[4096,4096]{1,0} all-gather-done(%first)
  ROOT %end = bf16[4096,4096]{1,0} bitcast(%early)
}
"""  # noqa: E501


def test_waiting_for_another_collective_hides_nothing():
    rates, net = COSTS.rates, COSTS.rates.hw.net
    gather = reduce_scatter(group(net, 8, 2), 2 * 4096 * 4096, net, rates.c, rates.software)
    found = walk(parse(QUEUE), COSTS)
    assert (found.hidden, found.parts[SLOWED]) == ({}, 0)
    assert found.seconds == pytest.approx(2 * gather)
    product = "  %product = bf16[4096,4096]{1,0} dot(%b, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n"
    found = walk(parse(QUEUE.replace("  %late", f"{product}  %late")), COSTS)
    behind = rates.matmul(4096, 4096, 4096)  # of the first alone: the second has not begun
    assert found.hidden == {"collectives over dp": pytest.approx(behind)}
    assert found.seconds == pytest.approx(2 * gather + rates.c.borrowed * behind)


BRANCH = """%branch.{trips} (r: (s32[], bf16[4096,4096])) -> (s32[], bf16[4096,4096]) {{
  %r = (s32[], bf16[4096,4096]{{1,0}}) parameter(0)
  ROOT %loop.{trips} = (s32[], bf16[4096,4096]{{1,0}}) while(%r), condition=%condition, body=%body, backend_config={{"known_trip_count":{{"n":"{trips}"}}}}
}}

"""  # noqa: E501
CHOICE = """  %choice = (s32[], bf16[4096,4096]{1,0}) conditional(%zero, %loop, %loop, %loop), branch_computations={%branch.2, %branch.4, %branch.3}
"""  # noqa: E501
BRANCHES = PROGRAM.replace(
    "ENTRY %main", "".join(BRANCH.format(trips=trips) for trips in (2, 4, 3)) + "ENTRY %main"
).replace("  ROOT %end", CHOICE + "  ROOT %end")


def test_of_branches_the_longest_is_taken_and_shown():
    found = walk(parse(BRANCHES), COSTS)
    assert [(block.name, block.runs) for block in found.blocks] == [("step", 1), ("loop", 8), ("loop.4", 4)]
    assert found.parts["matmuls"] == pytest.approx((9 + 4) * COSTS.rates.matmul(4096, 4096, 4096))


DRAW = """HloModule draw, is_scheduled=true

%round (bits: u32[1048576], key: u32[1048576]) -> u32[1048576] {
  %bits = u32[1048576]{0} parameter(0)
  %key = u32[1048576]{0} parameter(1)
  %sum = u32[1048576]{0} add(%bits, %key)
  %up = u32[1048576]{0} shift-left(%sum, %key)
  %down = u32[1048576]{0} shift-right-logical(%sum, %key)
  %turned = u32[1048576]{0} or(%up, %down)
  ROOT %mixed = u32[1048576]{0} xor(%turned, %sum)
}

ENTRY %main (bits: u32[1048576], key: u32[1048576]) -> u32[1048576] {
  %bits = u32[1048576]{0} parameter(0)
  %key = u32[1048576]{0} parameter(1)
  ROOT %fusion = u32[1048576]{0} fusion(%bits, %key), kind=kLoop, calls=%round
}
"""


@pytest.mark.parametrize("slow", [False, True])
def test_random_bits_take_their_integer_instructions_where_these_are_longer_than_their_bytes(slow):
    """A round of Threefry: sum, rotation (two shifts and an or) and xor are three instructions."""
    module = parse(DRAW)
    matrix = replace(COSTS.rates.hw.matrix, integer=6000 if slow else 60)
    costs = replace(COSTS, rates=replace(COSTS.rates, hw=replace(COSTS.rates.hw, matrix=matrix)))
    found = costs.instruction(module, module.entry, module.entry.root)
    seconds = 3 * 2**20 * 6000 / 989e12 if slow else 3 * 4 * 2**20 / COSTS.rates.memory
    assert found.seconds == pytest.approx(seconds + COSTS.rates.gap)


def test_a_slower_network_never_makes_a_step_faster():
    seconds = [walk(parse(PROGRAM), roofline(H100.with_network(1e9 * rate), MESH)).seconds for rate in (400, 50, 5, 1)]
    assert seconds == sorted(seconds)
    assert seconds[-1] > 2 * seconds[0]
    inside = [roofline(replace(H100, chip=replace(H100.chip, link=replace(H100.chip.link, bandwidth=bandwidth))), MESH)
              for bandwidth in (900e9, 450e9, 45e9)]  # fmt: skip
    seconds = [walk(parse(PROGRAM), costs).seconds for costs in inside]
    assert seconds == sorted(seconds)


STACKS = """HloModule stacks, is_scheduled=true

%take (s0: bf16[32,1024], s1: s32[]) -> bf16[1,1024] {
  %s0 = bf16[32,1024]{1,0} parameter(0)
  %s1 = s32[] parameter(1)
  %none = s32[] constant(0)
  %same = bf16[32,1024]{1,0} bitcast(%s0)
  ROOT %slice = bf16[1,1024]{1,0} dynamic-slice(%same, %s1, %none), dynamic_slice_sizes={1,1024}
}

%put (u0: bf16[32,1024], u1: bf16[1,1024], u2: s32[]) -> bf16[32,1024] {
  %u0 = bf16[32,1024]{1,0} parameter(0)
  %u1 = bf16[1,1024]{1,0} parameter(1)
  %u2 = s32[] parameter(2)
  %none.1 = s32[] constant(0)
  ROOT %update = bf16[32,1024]{1,0} dynamic-update-slice(%u0, %u1, %u2, %none.1)
}

ENTRY %main (stack: bf16[32,1024], index: s32[]) -> bf16[32,1024] {
  %stack = bf16[32,1024]{1,0} parameter(0)
  %index = s32[] parameter(1)
  %taken = bf16[1,1024]{1,0} fusion(%stack, %index), kind=kLoop, calls=%take
  %begun = ((bf16[32,1024]{1,0}, s32[]), bf16[1,1024]{1,0}, u32[]) fusion-start(%stack, %index), kind=kLoop, calls=%take
  %copied = bf16[1,1024]{1,0} fusion-done(%begun)
  %onchip = bf16[1,1024]{1,0:S(1)} negate(%taken)
  %host = bf16[1,1024]{1,0:S(5)} copy(%onchip)
  ROOT %stored = bf16[32,1024]{1,0} fusion(%stack, %taken, %index), kind=kLoop, calls=%put
}
"""


@pytest.mark.parametrize(
    ("name", "device", "host"),
    [
        ("taken", 2 * 2048 + 4, 0),  # the slice read and written, and the index; not the stack
        ("begun", 2 * 2048 + 4, 0),
        ("onchip", 2048, 0),
        ("host", 0, 2048),
        ("stored", 2 * 2048 + 4, 0),
    ],
)
def test_slices_and_updates_count_as_what_they_touch(name, device, host):
    module = parse(STACKS)
    assert traffic(module, module.entry, module.entry.by_name[name]) == (device, host)


@pytest.mark.parametrize(
    ("line", "shape"),
    [
        ("bf16[64,16] dot(%l, %r), lhs_contracting_dims={1}, rhs_contracting_dims={0}", ((64, 32), (32, 16), 1)),
        (
            "bf16[4,64,16] dot(%l, %r), lhs_batch_dims={0}, rhs_batch_dims={0}, lhs_contracting_dims={2}, "
            "rhs_contracting_dims={1}",
            ((4, 64, 32), (4, 32, 16), 4),
        ),
        ("bf16[64,16] convolution(%l, %r), dim_labels=bf_io->bf", ((64, 32), (32, 16), 1)),
    ],
)
def test_sizes_of_a_product_follow_from_its_arrays(line, shape):
    left, right, batch = shape
    dims = lambda sizes: ",".join(map(str, sizes))
    text = (
        "HloModule one, is_scheduled=true\n\nENTRY %main (l: bf16[1], r: bf16[1]) -> bf16[1] {\n"
        f"  %l = bf16[{dims(left)}] parameter(0)\n  %r = bf16[{dims(right)}] parameter(1)\n  ROOT %p = {line}\n}}\n"
    )
    module = parse(text)
    cost = COSTS.instruction(module, module.entry, module.entry.root)
    assert cost.kind == "matmul"
    assert cost.seconds == pytest.approx(float(COSTS.rates.matmul(64, 32, 16, batch)))


# Whole steps.


def tiny(family, mesh, zero=0, **train):
    kv = {"n_kv_heads": 2} if family == "llama" else {}
    model = ModelConfig(family=family, vocab_size=256, d_model=64, n_layers=4, n_heads=4, d_ff=128, **kv)
    return Config(model=model, data=DataConfig(seq_len=32), **grouped(mesh=mesh, zero=zero, global_batch=16, **train))


def forward(config, arch):
    """FLOPs per token of (matmuls of the blocks, attention over all positions, the head), one way."""
    head = 2 * arch.vocab_size * arch.d_model
    attention = 4 * arch.n_layers * arch.n_heads * arch.head_dim * config.data.seq_len
    return 2 * matmul_parameters(arch) - head, attention, head


def recomputed_whole(config, arch):
    blocks, attention, _ = forward(config, arch)
    return blocks + attention - 2 * arch.n_layers * arch.d_model * arch.d_ff  # no gradient needs the last product again


def recomputed_between(config, arch):
    return forward(config, arch)[1] / 2  # the scores


def recomputed_by_stages(config, arch):
    """A pipeline of S stages and M microbatches: M + S - 1 ticks of each half, whose backward half begins anew."""
    blocks, attention, _ = forward(config, arch)
    ticks = (config.parallel.microbatches + 2 - 1) / config.parallel.microbatches
    return (4 * ticks - 3) * (blocks + attention)


STEPS = [
    (tiny("llama", "dp=2,tp=2", zero=3, remat="full", accumulation=2), recomputed_whole),
    (tiny("gpt2", "dp=2,tp=2", remat="dots"), recomputed_between),
    pytest.param(tiny("llama", "dp=2,pp=2", microbatches=4), recomputed_by_stages, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("config", "again"), STEPS, ids=["recomputed whole", "between matmuls", "by stages"])
def test_flops_of_a_compiled_step_are_the_formula_and_what_is_recomputed(config, again):
    compiled, arch = compiled_for(config, "cpu:4")
    tokens = config.train.global_batch * config.data.seq_len
    found = 4 * computation_flops(Scope(compiled.module, compiled.module.entry)) / tokens
    assert found == flops_per_token(arch, config.data.seq_len, causal=False) + again(config, arch)


def compiled_for(config, target) -> tuple[Compiled, object]:
    compiled = compile_step(config, parse_target(target)).result
    assert isinstance(compiled, Compiled)
    return compiled, architecture(config.model, None, config.data.seq_len)
