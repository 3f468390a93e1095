"""The planner: the six situations that users are in, the search and its pins, and host memory."""

from dataclasses import replace
from itertools import pairwise

import pytest

from jaxshard.commands import cli
from jaxshard.config import Config, DataConfig, ModelConfig, TrainConfig
from jaxshard.models.presets import architecture
from jaxshard.planner import host_memory, ranking
from jaxshard.planner.advice import reasons
from jaxshard.planner.search import Pins, apply, candidates
from jaxshard.training.pipeline_plan import plan_pipeline
from jaxshard.training.program import check_fit
from jaxshard.xla.hardware import CHIPS, parse_target

GIB = 2**30


def settings(preset, batch, seq_len, **model):
    return Config(
        model=ModelConfig(preset=preset, **model) if preset else ModelConfig(**model),
        data=DataConfig(seq_len=seq_len),
        train=TrainConfig(precision="bf16", global_batch=batch),
    )


def search(config, target, network=None, **pins):
    hardware = parse_target(target)
    if network:
        hardware = hardware.with_network(network)
    arch = architecture(config.model, 257, config.data.seq_len)
    return ranking.search(config, arch, hardware, Pins(pins.pop("mesh", {}), pins))


def best(config, target, network=None):
    """The first plan and its reasons as one text."""
    found = search(config, target, network)
    return found.fitting[0].candidate, " ".join(reasons(found, found.fitting[0]))


# The six situations.


def test_one_gpu_that_fits_splits_nothing():
    plan, why = best(settings("gpt2-124m", 32, 1024), "h100:1")
    assert (str(plan.shape), plan.zero, plan.offload, plan.remat) == ("dp=1", 0, "none", "none")
    assert "nothing is split" in why
    assert "fits into a device's" in why


def test_one_gpu_that_does_not_fit_offloads():
    plan, why = best(settings("llama2-7b", 8, 2048), "h100:1")
    assert plan.offload == "optimizer"
    assert "host memory (ZeRO-Offload)" in why
    assert "of 209.55 GiB in host memory for each device" in why
    assert "more than a device's" in why


def test_one_node_that_fits_copies_the_model():
    plan, why = best(settings("gpt2-355m", 64, 1024), "h100:8")
    assert str(plan.shape) == "dp=8"
    assert plan.zero <= 1
    assert "tp=2: " in why
    assert "slower" in why


def test_one_node_that_does_not_fit_splits_the_state():
    plan, why = best(settings("llama3-8b", 64, 8192), "h100:8")
    assert plan.zero >= 2 or plan.shape.model * plan.shape.stage > 1
    assert plan.offload == "none"
    assert "has to be split" in why


def test_a_layer_larger_than_a_device_leaves_tensor_parallelism_and_zero_3():
    wide = settings(None, 16, 2048, family="llama", vocab_size=32000, d_model=24576, n_layers=4, n_heads=192)
    found = search(wide, "h100:64")
    assert found.layer_state > found.limit
    assert all(plan.candidate.shape.model > 1 or plan.candidate.zero == 3 for plan in found.fitting)
    assert "a pipeline cannot split a layer" in " ".join(reasons(found, found.fitting[0]))


def test_many_nodes_choose_by_their_network():
    model = settings("llama3-70b", 512, 8192)
    fast, why_fast = best(model, "h100:64")
    slow, why_slow = best(model, "h100:64", network=10e9 / 8)
    assert fast.zero == 3
    assert fast.shape.stage == 1
    assert "a fast network" in why_fast
    # ZeRO-3 over the slow network would gather every layer across it: stages take its place between hosts.
    assert slow.shape.stage > 1
    assert slow.shape.data * slow.shape.model <= 8
    assert "a slow network" in why_slow
    assert "data parallelism alone: " in why_slow


# The search.


def test_every_candidate_passes_the_checks_of_training_and_none_is_double():
    config = settings("toy-gpt2-1m", 48, 128)
    arch = architecture(config.model)
    target = parse_target("h100:16")
    found = candidates(config, arch, target, Pins({}, {}), offload=False)
    assert len(set(found)) == len(found)
    pipelines = set()
    for candidate in found:
        assert candidate.shape.devices == 16
        laid = apply(config, candidate)
        check_fit(laid, arch, candidate.shape)
        key = (candidate.shape, laid.parallel.microbatches, laid.parallel.schedule, laid.parallel.virtual_stages)
        if key not in pipelines:
            pipelines.add(key)
            plan_pipeline(laid, candidate.zero, arch, candidate.shape)
    assert {c.zero for c in found} == {0, 1, 2, 3}
    assert {c.shape.model for c in found} == {1, 2, 4}
    assert {c.shape.stage for c in found} == {1, 2, 4}


def test_the_order_is_the_same_every_time_and_faster_plans_come_first():
    config = settings("llama3-8b", 64, 8192)
    first, second = search(config, "h100:8"), search(config, "h100:8")
    assert first.order == second.order
    seconds = [plan.seconds for plan in first.fitting]
    assert all(later > earlier * 0.97 for earlier, later in pairwise(seconds))
    assert all(plan.memory.total <= first.limit for plan in first.fitting)


def test_pins_hold():
    config = settings("llama3-8b", 64, 8192).with_parallel(zero=1)
    found = search(config, "h100:8", mesh={"model": 2, "data": -1}, zero=1, remat="full")
    for plan in found.fitting:
        c = plan.candidate
        assert (c.shape.model, c.shape.data, c.zero, c.remat) == (2, 4, 1, "full")


def test_memory_limit_moves_the_choice():
    config = settings("llama3-8b", 64, 8192)
    arch, target = architecture(config.model), parse_target("h100:8")
    tight = ranking.search(config, arch, target, Pins({}, {}), memory_limit=40 * GIB)
    free = ranking.search(config, arch, target, Pins({}, {}))
    assert tight.fitting[0].memory.total <= 40 * GIB < free.fitting[0].memory.total
    assert tight.fitting[0].seconds > free.fitting[0].seconds


def test_an_unknown_machine_gets_an_order_without_seconds():
    found = search(settings("toy-1m", 32, 128), "cpu:8")
    assert not found.timed
    assert found.mfu(found.fitting[0]) is None
    assert "No time is predicted" in " ".join(reasons(found, found.fitting[0]))


def test_the_smallest_is_the_least_of_all():
    found = search(settings("llama3-8b", 64, 8192), "h100:8", mesh={"data": 4, "model": 2})
    least = min(found.at(place).memory.total for place in range(len(found.order)))
    again = replace(found, limit=0, scored={})
    assert again.smallest().memory.total == least
    assert len(again.scored) < len(again.order)  # without looking at all of them
    for zero in (0, 3):
        matches = [place for place, c in enumerate(found.order) if c.zero == zero and c.remat == "none"]
        fits, other = again.best(lambda c, zero=zero: c.zero == zero and c.remat == "none")
        assert (fits, other.memory.total) == (False, min(found.at(place).memory.total for place in matches))


def test_what_fits_nowhere_is_sought_with_and_without_host_memory():
    found = search(settings("llama3-70b", 64, 8192), "h100:1")
    assert not found.fitting
    assert {candidate.offload for candidate in found.order} == {"none", "optimizer"}
    on_host = [scored.memory.host > 0 for scored in found.above(float("inf"))]
    assert on_host == [False, True]  # the least of both kinds, the plain one first


@pytest.mark.parametrize("batch", [2_000_000_000, 2**31 - 1])
def test_a_huge_batch_is_answered_soon(batch, monkeypatch):
    seen = []
    searched = host_memory.search
    monkeypatch.setattr(
        host_memory,
        "search",
        lambda config, arch, target, *rest: (seen.append(target.name), searched(config, arch, target, *rest))[1],
    )
    config = settings("toy-1m", batch, 1024)
    target = parse_target("h100:1")
    host_memory.smallest_fitting(config, architecture(config.model), target, Pins({}, {}), None)
    assert "h100:64" not in seen  # the batch alone is more than those have


# Host memory.


def test_offloaded_plans_must_fit_into_the_hosts_memory(monkeypatch, capsys):
    found = search(settings("llama2-7b", 8, 2048), "h100:1")
    host = found.fitting[0].memory.host
    assert host > 70 * GIB
    assert host_memory.within_host(found)[0] is found.fitting[0]
    monkeypatch.setitem(host_memory.HOST_BYTES, "h100", host)  # of which a tenth stays free
    assert all(plan.memory.host < 0.9 * host + 1 for plan in host_memory.within_host(found))
    monkeypatch.setitem(host_memory.HOST_BYTES, "h100", 8 * GIB)
    line = "--model.preset llama2-7b --train.global_batch 8 --data.seq_len 2048 --target h100:1 --confirm 0"
    assert cli.run(["plan", *line.split()]) == 2
    err = capsys.readouterr().err
    assert "of host memory for each device" in err
    assert "7.20 GiB to use; the smallest h100 target that fits is h100:2" in err


def test_every_known_accelerator_has_host_memory():
    assert {name for name, chip in CHIPS.items() if chip.bf16_flops} == set(host_memory.HOST_BYTES)
    assert host_memory.host_limit(parse_target("cpu:8")) == float("inf")
    assert 2**28 < host_memory.host_limit(parse_target("local")) < 2**50
