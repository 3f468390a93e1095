"""The analytic time model: formulas against hand calculations, what must grow must grow."""

import cProfile
import itertools
from dataclasses import fields, replace

import numpy as np
import pytest

from jaxshard.analysis.arithmetic import flops_per_token, matmul_parameters, mfu
from jaxshard.analysis.cost import Parallelism, StepTime, parameters, stack, step_time
from jaxshard.analysis.efficiency import MEGATRON_DEEPSPEED, XLA, XLA_UNFUSED, Constants
from jaxshard.analysis.kernels import MATRIX_UNITS, Rates, block, machine
from jaxshard.analysis.links import Fabric, all_reduce, fabric, group, reduce_scatter, ring_bytes
from jaxshard.config import ModelConfig
from jaxshard.errors import InputError
from jaxshard.models.presets import architecture
from jaxshard.parallel.schedule import make
from jaxshard.xla.hardware import CHIPS, parse_target

LLAMA = architecture(ModelConfig(preset="llama3-8b"))
GPT2 = architecture(ModelConfig(preset="gpt2-355m"))
H100 = machine(parse_target("h100:64"))
PERFECT = Constants(memory=1.0, fast_links=1.0, slow_links=1.0, hop=0.0)
SILENT = replace(XLA, kernel_gap=0.0, rendezvous=0.0)
ENDLESS = replace(H100, net=Fabric(10**9, 1e30, 1e30))


def seconds(layout: Parallelism, hw=H100, arch=LLAMA, seq_len=4096, **more) -> float:
    return float(step_time(arch, layout, hw, seq_len, **more).total)


# Arithmetic


def test_matmul_parameters_are_all_but_lookup_and_norms():
    norms = LLAMA.d_model * (2 * LLAMA.n_layers + 1)
    assert matmul_parameters(LLAMA) == LLAMA.parameters - norms - LLAMA.vocab_size * LLAMA.d_model


def test_flops_of_a_layer_by_hand():
    # D 4, two heads of 2, one key/value head, F 8 with gate, V 16, T 3.
    model = ModelConfig(
        family="llama", d_model=4, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=2, d_ff=8, vocab_size=16
    )
    arch = architecture(model)
    products = 4 * 4 + 2 * 4 * 2 + 4 * 4 + 3 * 4 * 8 + 16 * 4  # q, k and v, out, MLP, head
    assert matmul_parameters(arch) == products == 208
    assert flops_per_token(arch, 3, causal=False) == 6 * 208 + 3 * (2 * 2 * 4 * 3)
    assert flops_per_token(arch, 3) == 6 * 208 + 3 * (2 * 2 * 4 * 2)  # a token sees two in the mean


def test_mfu_counts_causal_attention_unless_asked():
    causal, full = (mfu(LLAMA, 8192, 6667, 989e12, causal=c) for c in (True, False))
    assert full == pytest.approx(0.39, abs=0.01)  # torchtitan's convention and figure
    assert causal < full


# Links


def test_ring_all_reduce_moves_two_times_n_minus_one_over_n():
    assert ring_bytes(8, 1000) == 1750
    assert ring_bytes(1, 1000) == 0


def test_all_reduce_inside_a_node():
    net = Fabric(node=8, fast=100.0, slow=10.0)
    assert all_reduce(group(net, 4, 1), 1000.0, net, PERFECT, SILENT) == pytest.approx(1500 / 100)
    assert reduce_scatter(group(net, 4, 1), 1000.0, net, PERFECT, SILENT) == pytest.approx(750 / 100)
    assert all_reduce(group(net, 1, 1), 1000.0, net, PERFECT, SILENT) == 0


def test_all_reduce_across_nodes_uses_the_card_of_every_member():
    net = Fabric(node=8, fast=100.0, slow=10.0)
    wide = all_reduce(group(net, 16, 1), 1000.0, net, PERFECT, SILENT)  # two nodes, eight members in each
    assert wide == pytest.approx(2 * 7 / 8 * 1000 / 100 + 2 * 1 / 2 * 1000 / (8 * 10))
    apart = all_reduce(group(net, 2, 8), 1000.0, net, PERFECT, SILENT)  # one member in each node
    assert apart == pytest.approx(1000 / 10)


def test_neighbours_of_an_axis_are_stride_apart():
    net = Fabric(node=8, fast=1.0, slow=1.0)
    assert group(net, 4, 1).inside == 4
    assert group(net, 4, 4).inside == 2 and group(net, 4, 4).nodes == 2
    assert group(net, 4, 16).inside == 1
    assert group(net, 2, net.node - 2).inside == 2  # the two ends of a pipeline in one node


def test_small_all_reduces_take_the_tree():
    net, slow_steps = Fabric(8, 1e12, 1e12), replace(PERFECT, hop=1e-3)
    assert all_reduce(group(net, 8, 1), 8.0, net, slow_steps, SILENT) == pytest.approx(2 * 3 * 1e-3, rel=1e-6)


def test_a_torus_that_does_not_close_has_half_the_bandwidth():
    open_ring, closed = fabric(parse_target("v5e:8x8")), fabric(parse_target("v5e:16x16"))
    assert closed.fast_bandwidth(16) == 2 * open_ring.fast_bandwidth(8) == 2 * CHIPS["v5e"].link.bandwidth
    assert closed.fast_bandwidth(256) == 2 * closed.fast_bandwidth(16)  # both dimensions


# Kernels


def test_a_large_matmul_nears_the_best_known_and_never_passes_it():
    rates = Rates(H100, PERFECT, SILENT, 2)
    best = H100.flops * H100.matrix.best
    speed = lambda n: 2 * n**3 / rates.matmul(n, n, n)
    assert 0.97 * best < speed(16384) < best
    assert speed(512) < speed(2048) < speed(16384)


def test_a_matmul_pays_for_tiles_that_it_does_not_fill():
    rates = Rates(H100, PERFECT, SILENT, 2)
    assert rates.matmul(4096, 4096, 129) == pytest.approx(rates.matmul(4096, 4096, 256))
    assert rates.matmul(4096, 8192, 4096 + 1) > rates.matmul(4096, 8192, 4096)


def test_thin_matmuls_are_bound_by_memory():
    rates = Rates(H100, PERFECT, SILENT, 2)
    assert rates.matmul(8, 16384, 16384) == pytest.approx(2 * 16384**2 / H100.bandwidth, rel=1e-2)


def test_odd_vocabularies_are_slow_where_nothing_pads_them():
    for software, slower in ((MEGATRON_DEEPSPEED, True), (XLA, False)):
        rates = Rates(H100, Constants(), software, 2)
        assert (rates.matmul(8192, 4096, 50257) > 1.5 * rates.matmul(8192, 4096, 50304)) == slower


def test_fused_attention_halves_the_causal_scores_and_recomputes_them_backward():
    rates = Rates(H100, PERFECT, SILENT, 2)
    forward = rates.attention(32, 4096, 128, backward=False)
    assert forward == pytest.approx(2 * 32 * 4096**2 * 128 / (H100.flops * PERFECT.flash))
    assert rates.attention(32, 4096, 128, backward=True) == pytest.approx(2.5 * forward)


def test_chips_without_known_matrix_units_are_refused():
    with pytest.raises(InputError, match="cpu"):
        machine(parse_target("cpu:8"))


# The step


def test_parts_add_up_and_a_stack_equals_its_layouts():
    layouts = [
        Parallelism(data=8, zero=3, sequences=2, remat="dots"),
        Parallelism(stage=4, data=2, model=2, microbatches=8, remat="full", zero=1),
        Parallelism(replica=2, model=4, sequence_parallel=True, offload=True, zero=1, data=2),
        Parallelism(
            stage=2, schedule="interleaved", virtual_stages=2, microbatches=4, accumulation=3, precision="fp32"
        ),
    ]
    together = step_time(LLAMA, stack(layouts), H100, 4096)
    for i, layout in enumerate(layouts):
        alone = step_time(LLAMA, layout, H100, 4096)
        for part in fields(StepTime):
            assert np.broadcast_to(getattr(together, part.name), 4)[i] == pytest.approx(
                float(getattr(alone, part.name))
            )
        inside = sum(float(getattr(alone, f.name)) for f in fields(StepTime)) - float(alone.data_comm_hidden)
        assert float(alone.total) == pytest.approx(inside)


@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize("stages, microbatches", [(2, 2), (4, 8), (8, 8)])
def test_bubble_is_the_formula(stages, microbatches, chunks):
    layout = Parallelism(stage=stages, microbatches=microbatches, virtual_stages=chunks)
    step = step_time(LLAMA, layout, ENDLESS, 2048, SILENT, PERFECT)
    busy = float(step.matmul + step.attention + step.elementwise + step.model_comm)
    assert float(step.bubble) / busy == pytest.approx((stages - 1) / (chunks * microbatches))


def test_the_stage_with_the_head_holds_the_others_up():
    spread = replace(SILENT, head_on_all_stages=True)
    ends = replace(SILENT, head_on_all_stages=False)
    layout = Parallelism(stage=8, microbatches=64)
    assert seconds(layout, ENDLESS, software=ends) > 1.1 * seconds(layout, ENDLESS, software=spread)


def test_full_remat_costs_one_forward_pass():
    none, full = (step_time(LLAMA, Parallelism(remat=r), H100, 4096) for r in ("none", "full"))
    head = 3 * 2 * 4096 * LLAMA.vocab_size * LLAMA.d_model / (3 * 2 * 4096 * matmul_parameters(LLAMA))
    assert float(full.matmul / none.matmul) == pytest.approx(4 / 3 - head / 3, rel=0.02)
    assert float(full.attention / none.attention) == pytest.approx(4.5 / 3.5, rel=1e-3)


def test_dropout_is_drawn_in_every_pass_that_computes_a_block():
    dropping = replace(GPT2, dropout=0.1)

    def more(remat):
        one, other = (step_time(arch, Parallelism(sequences=8, remat=remat), H100, 1024) for arch in (GPT2, dropping))
        return float(other.total - one.total)

    elements = 2 * GPT2.n_layers * 8 * 1024 * GPT2.d_model  # behind two branches of every block
    byte = elements / (3.352e12 * Constants().memory)
    draw = elements * 80 / (33.5e12 / 2) - 8 * byte  # NVIDIA H100 whitepaper: 33.5 int32 TOPS, two an instruction
    assert more("none") == pytest.approx(draw + 6 * byte, rel=0.1)
    assert more("full") == pytest.approx(2 * draw + 2 * byte, rel=0.1)
    assert more("dots") == pytest.approx(more("full"))


def test_bands_compute_the_pairs_above_their_diagonal_for_nothing():
    whole, banded = (step_time(LLAMA, Parallelism(banded=share), H100, 16384) for share in (0.0, 0.125))
    assert banded.attention == pytest.approx(1.125 * whole.attention)
    assert banded.matmul == whole.matmul


def test_zero_bytes():
    """With nothing hidden: 2 x 4 bytes per parameter (0), 4 + 2 (1), and gathers of 2 bytes (3)."""
    late, n = replace(SILENT, overlap=0.0), 8
    comm = lambda zero: float(step_time(LLAMA, Parallelism(data=n, zero=zero), H100, 64, late, PERFECT).data_comm)
    held = parameters(LLAMA, Parallelism(), 64, XLA)
    unit = held * (n - 1) / n / H100.net.fast
    assert [comm(zero) for zero in (0, 1, 2, 3)] == pytest.approx([8 * unit, 6 * unit, 6 * unit, 8 * unit])


def test_zero_3_repeats_its_gathers_for_every_microbatch_and_zero_1_does_not():
    late = replace(SILENT, overlap=0.0)
    comm = lambda **k: float(step_time(LLAMA, Parallelism(data=8, **k), H100, 64, late, PERFECT).data_comm)
    assert comm(zero=3, accumulation=4) == pytest.approx(4 * comm(zero=3))
    assert comm(zero=1, accumulation=4) == pytest.approx(comm(zero=1))


@pytest.mark.parametrize("stages, remat, passes", [(1, "none", 2), (1, "full", 3), (2, "none", 3), (2, "full", 4)])
def test_layers_are_copied_out_of_stacked_arrays_in_every_pass(stages, remat, passes):
    layout = Parallelism(stage=stages, model=2, microbatches=4 if stages > 1 else 1, accumulation=3, remat=remat)
    parts = [step_time(LLAMA, layout, H100, 64, replace(SILENT, stacked=s), PERFECT) for s in (True, False)]
    blocks = (matmul_parameters(LLAMA) - LLAMA.vocab_size * LLAMA.d_model) / (2 * stages)
    copied = 2 * (2 * passes + 4) * blocks * layout.rounds / H100.bandwidth
    assert float(parts[0].elementwise - parts[1].elementwise) == pytest.approx(copied)
    filled = (stages - 1) / layout.microbatches
    assert float(parts[0].total - parts[1].total) == pytest.approx(copied * (1 + filled))


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("stages, microbatches", [(2, 8), (4, 16)])
def test_a_pipeline_gathers_and_reduces_in_every_tick_of_its_table(stages, microbatches, chunks):
    late, n = replace(SILENT, overlap=0.0), 4
    table = make("interleaved" if chunks > 1 else "1f1b", stages, microbatches, chunks)
    layout = Parallelism(stage=stages, data=n, microbatches=microbatches, virtual_stages=chunks)
    comm = lambda zero: float(step_time(LLAMA, replace(layout, zero=zero), H100, 64, late, PERFECT).data_comm)
    held = parameters(LLAMA, layout, 64, XLA)
    unit = held * (n - 1) / n / H100.net.fast
    gathers = (table.forward_halves + 2 * table.backward_halves) / chunks
    assert comm(3) == pytest.approx((2 * gathers + 4 * table.backward_halves / chunks) * unit)
    assert comm(2) == pytest.approx((2 + 4 * table.backward_halves / chunks) * unit)
    assert comm(1) == pytest.approx((2 + 4) * unit)


def test_reductions_hide_behind_the_backward_pass_but_never_whole():
    layout = Parallelism(data=8, zero=1, sequences=4)
    step = step_time(LLAMA, layout, H100, 8192)
    whole = float(step.data_comm + step.data_comm_hidden)
    assert 0 < float(step.data_comm) < 0.3 * whole
    late = step_time(LLAMA, layout, H100, 8192, replace(XLA, overlap=0.0))
    assert float(late.data_comm_hidden) == 0 and float(late.data_comm) > 3 * float(step.data_comm)


@pytest.mark.parametrize(
    "better, worse",
    [
        (dict(remat="none"), dict(remat="dots")),
        (dict(remat="dots"), dict(remat="full")),
        (dict(zero=1, data=8), dict(zero=1, data=8, offload=True)),
        (dict(stage=4, microbatches=16), dict(stage=4, microbatches=16, remat="full")),
        (dict(model=8, sequence_parallel=True), dict(model=8)),
        (dict(precision="bf16"), dict(precision="fp32")),
        (dict(sequences=4), dict(sequences=1, accumulation=4)),
    ],
)
def test_what_must_cost_time_costs_time(better, worse):
    assert seconds(Parallelism(**better)) < seconds(Parallelism(**worse))


def test_a_slower_network_is_never_faster():
    layout = Parallelism(replica=2, data=4, model=8, zero=1)
    speeds = [machine(parse_target("h100:64").with_network(gbps * 1e9 / 8)) for gbps in (400, 100, 25)]
    times = [seconds(layout, hw, software=replace(XLA, overlap=0.0)) for hw in speeds]
    assert times == sorted(times) and times[2] > times[0]


def test_more_devices_and_newer_chips_are_faster():
    layout = Parallelism(data=8, zero=1)
    times = [seconds(layout, machine(parse_target(f"{chip}:8"))) for chip in ("a100", "h100", "b200")]
    assert times[0] > times[1] > times[2]
    assert seconds(Parallelism(model=2)) < seconds(Parallelism())


def test_eager_frameworks_wait_for_the_host_in_small_models_only():
    small = step_time(GPT2, Parallelism(precision="fp16"), H100, 1024, MEGATRON_DEEPSPEED)
    large = step_time(LLAMA, Parallelism(sequences=4, precision="fp16"), H100, 4096, MEGATRON_DEEPSPEED)
    ends = MEGATRON_DEEPSPEED.end_kernels * Constants().dispatch  # no microbatch is spared these
    assert float(small.idle) > 0.3 * float(small.total) and float(large.idle) == pytest.approx(ends)
    assert float(step_time(GPT2, Parallelism(), H100, 1024).idle) == 0


def test_the_host_is_late_in_each_pass_by_itself():
    """A forward pass that waits for the host is not made up for by a backward pass that does not."""
    layout, rates = Parallelism(precision="fp16"), Rates(H100, Constants(), MEGATRON_DEEPSPEED, 2)
    forward, backward = block(GPT2, layout, rates, 1024)
    late = replace(Constants(), engine=0.0, dispatch=float(forward.device) / 8)
    found = step_time(GPT2, layout, H100, 1024, MEGATRON_DEEPSPEED, late)
    host = float(block(GPT2, layout, replace(rates, c=late), 1024)[0].host)
    assert host < float(forward.device + backward.device)  # in sum it would not be late
    waits = GPT2.n_layers * (host - float(forward.device)) + MEGATRON_DEEPSPEED.end_kernels * late.dispatch
    assert float(found.idle) == pytest.approx(waits)


def test_collectives_come_on_top_of_launching():
    """In eager frameworks the device waits for the host as long, however slow the collectives of the model axis are."""
    layout = Parallelism(model=2, sequences=2, precision="fp16")
    slower = replace(Constants(), fast_links=0.3)
    fast, slow = (step_time(GPT2, layout, H100, 1024, MEGATRON_DEEPSPEED, c) for c in (Constants(), slower))
    assert float(fast.idle) > 0 and float(slow.idle) == pytest.approx(float(fast.idle))
    assert float(slow.total - fast.total) == pytest.approx(float(slow.model_comm - fast.model_comm))


@pytest.mark.parametrize("sequences, tp, split", [(1, 4, False), (1, 8, True), (2, 8, False)])
def test_a_fused_softmax_takes_scores_in_fours(sequences, tp, split):
    """Of 16 heads 4 are left for each device 4-way, 2 are left 8-way."""
    layout = Parallelism(model=tp, sequences=sequences, precision="fp16")
    anything = replace(MEGATRON_DEEPSPEED, softmax_heads=1)
    whole, found = (block(GPT2, layout, Rates(H100, Constants(), s, 2), 1024) for s in (anything, MEGATRON_DEEPSPEED))
    for before, after, each in zip(whole, found, (Constants().dispatch, Constants().engine), strict=True):
        assert float(after.host - before.host) == pytest.approx(4 * each if split else 0.0)
        assert (float(after.attention) > float(before.attention)) == split


def test_odd_sizes_slow_matmuls_down_step_by_step():
    rates = Rates(H100, Constants(), MEGATRON_DEEPSPEED, 2)
    shares = [float(rates.matmul(8192, 8192, 8192 * 8 + odd)) for odd in (0, 4, 2, 1)]
    step = Constants().misaligned ** (1 / 3)
    assert [b / a for a, b in itertools.pairwise(shares)] == pytest.approx([1 / step] * 3, rel=0.05)


def test_eager_attention_is_slower_over_long_rows():
    long = replace(Constants(), long_rows=3.0)
    for t, software, more in ((1024, MEGATRON_DEEPSPEED, False), (2048, MEGATRON_DEEPSPEED, True), (2048, XLA, False)):
        before, after = (step_time(GPT2, Parallelism(), H100, t, software, c).attention for c in (Constants(), long))
        assert (float(after) > float(before)) == more


def test_unfused_attention_is_slower():
    assert seconds(Parallelism(), software=XLA_UNFUSED) > seconds(Parallelism())


def test_ten_thousand_layouts_take_hardly_more_calls_than_a_hundred():
    """They are rows of arrays. Calls are counted, since a time would depend on what else the machine does."""
    layouts = [Parallelism(data=2**i, model=2**j, zero=z) for i in range(6) for j in range(4) for z in range(4)]
    calls = []
    for times in (1, 105):
        search, profile = stack(layouts * times), cProfile.Profile()
        profile.runcall(step_time, LLAMA, search, H100, 8192)
        calls.append(sum(entry.callcount for entry in profile.getstats()))
    assert len(layouts) * 105 > 10_000 and calls[1] < 2 * calls[0]  # What a cache or the collector does may differ.


# Constants


def test_the_share_of_a_gpu_is_that_of_the_best_matmul_measured():
    measured = {"a100": 271.2, "h100": 794.5, "h200": 794.5, "b200": 1745}  # TFLOP/s
    assert all(
        MATRIX_UNITS[chip].best == pytest.approx(rate * 1e12 / CHIPS[chip].bf16_flops, abs=1e-3)
        for chip, rate in measured.items()
    )


def test_every_chip_with_a_peak_has_matrix_units():
    assert {name for name, chip in CHIPS.items() if chip.bf16_flops} == set(MATRIX_UNITS)
