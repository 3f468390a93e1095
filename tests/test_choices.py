"""Which strategy when: the situations that users are in, the layout that must be chosen in each, and why.

The rules are those that the papers and guides teach; each case says in words what speaks for its choice, and the test
checks the choice and the figures behind it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import pytest

from jaxshard.config import Config, DataConfig, ModelConfig, TrainConfig
from jaxshard.models.presets import architecture
from jaxshard.parallel.axes import MeshShape
from jaxshard.planner import ranking
from jaxshard.planner.advice import reasons
from jaxshard.planner.search import Candidate, Pins, candidates
from jaxshard.xla.hardware import parse_target

SMALL = ModelConfig(preset="gpt2-124m")
MIDDLE = ModelConfig(preset="tinyllama-1.1b")
LARGE = ModelConfig(preset="llama3-8b")
HUGE = ModelConfig(preset="llama3-70b")
WIDE = ModelConfig(family="llama", vocab_size=32000, d_model=24576, n_layers=8, n_heads=192)
"""A layer of 7.2e9 parameters: with masters and moments more than a device has."""


@cache
def search(
    model: ModelConfig, target: str, batch: int, seq_len: int, gbps: float | None = None, zero: int | None = None
):
    """Gbit/s of each device between hosts; `zero` pins the stage."""
    hardware = parse_target(target)
    if gbps:
        hardware = hardware.with_network(gbps * 1e9 / 8)
    config = Config(
        model=model, data=DataConfig(seq_len=seq_len), train=TrainConfig(precision="bf16", global_batch=batch)
    )
    pins = Pins({}, {} if zero is None else {"zero": zero})
    return ranking.search(config, architecture(model, 257, seq_len), hardware, pins)


def seconds(found: ranking.Search, matches: Callable[[Candidate], bool]) -> float:
    """Predicted time of the best fitting layout of a kind; infinite where none fits."""
    result = found.best(matches)
    return result[1].seconds if result and result[0] else float("inf")


def plain(c: Candidate) -> bool:
    return c.shape.model == c.shape.stage == 1


@dataclass(frozen=True)
class Situation:
    """A model on hardware, the choice that must come first, and the words that must say why."""

    name: str
    arguments: tuple
    chosen: Callable[[Candidate], bool]
    why: str
    said: tuple[str, ...]


SITUATIONS = (
    Situation(
        "one GPU, fits",
        (SMALL, "h100:1", 32, 1024),
        lambda c: (str(c.shape), c.zero, c.offload, c.remat) == ("dp=1", 0, "none", "none"),
        "nothing to share and nothing to save: every split and every recomputation only costs time",
        ("fits into a device's", "nothing is split"),
    ),
    Situation(
        "one GPU, does not fit",
        (ModelConfig(preset="llama2-7b"), "h100:1", 8, 2048),
        lambda c: c.offload == "optimizer" and c.shape.devices == 1,
        "16 bytes a parameter are more than the device has, and only host memory is left to take them",
        ("more than a device's", "host memory (ZeRO-Offload)"),
    ),
    Situation(
        "one node, fits",
        (MIDDLE, "h100:8", 64, 2048),
        lambda c: plain(c) and c.zero <= 1 and c.offload == "none",
        "copies exchange gradients once a step, behind the backward pass; tp would reduce in every layer",
        ("fits into a device's", "tp=2: ", "slower"),
    ),
    Situation(
        "one node, does not fit",
        (LARGE, "h100:8", 64, 8192),
        lambda c: (c.zero >= 2 or c.shape.model * c.shape.stage > 1) and c.offload == "none",
        "eight devices together have the memory, so the state is split over them and nothing goes to the host",
        ("more than a device's", "has to be split"),
    ),
    Situation(
        "a layer larger than a device",
        (WIDE, "h100:64", 64, 2048),
        lambda c: c.shape.model > 1 or c.zero == 3,
        "a stage holds at least one layer, so only what cuts the layer itself helps",
        ("more than a device has", "a pipeline cannot split a layer"),
    ),
    Situation(
        "many nodes, fast network",
        (HUGE, "h100:64", 512, 8192),
        lambda c: c.zero == 3 and c.shape.stage == 1,
        "a device computes longer on its 65,536 tokens than the gathers take, so these hide and nothing else is needed",
        ("a fast network", "ZeRO-3"),
    ),
    Situation(
        "many nodes, slow network, state fits on a few devices",
        (LARGE, "h100:64", 64, 8192, 10),
        lambda c: c.shape.stage > 1 and c.shape.data > 1 and c.zero == 1,
        "stages send activations only, and gradients cross the network once: pipeline, data parallelism and ZeRO-1",
        ("a slow network", "only activations travel", "ZeRO-1"),
    ),
    Situation(
        "many nodes, slow network, state needs all of a node",
        (HUGE, "h100:64", 512, 8192, 25),
        lambda c: c.shape.stage > 1 and c.shape.data * c.shape.model <= 8,
        "stages between the nodes; what shards weights stays inside a node, where gathering them is cheap",
        ("a slow network", "only activations travel", "data parallelism alone: "),
    ),
)


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda s: s.name)
def test_the_choice_and_its_reason(situation):
    found = search(*situation.arguments)
    best = found.fitting[0]
    assert situation.chosen(best.candidate), f"{best.candidate}: {situation.why}"
    words = " ".join(reasons(found, best))
    assert all(part in words for part in situation.said), words


def test_offload_is_the_last_resort():
    """The same model on eight devices keeps everything on them, and is faster per device too."""
    alone = search(*SITUATIONS[1].arguments).fitting[0]
    node = search(ModelConfig(preset="llama2-7b"), "h100:8", 64, 2048).fitting[0]
    assert node.candidate.offload == "none"
    assert node.seconds < alone.seconds


def test_tensor_parallelism_in_a_node_that_does_not_need_it_costs_time():
    found = search(*SITUATIONS[2].arguments)
    copies, split = seconds(found, plain), seconds(found, lambda c: c.shape.model == 8)
    assert 1.1 * copies < split


def test_what_cannot_fit_where_a_layer_with_its_state_is_too_large():
    """Copies and ZeRO-1 keep a layer's weights and gradients whole. ZeRO-2 fits only with stages of few layers."""
    found = search(*SITUATIONS[4].arguments)
    fits = lambda matches: seconds(found, matches) < float("inf")
    assert found.layer_state > found.limit
    assert fits(lambda c: c.shape.model > 1) and fits(lambda c: plain(c) and c.zero == 3)
    assert not fits(lambda c: plain(c) and c.zero <= 2)
    assert not fits(lambda c: c.shape.model == 1 and c.zero == 0)


def test_gathering_over_a_slow_network_is_what_makes_zero_3_lose():
    """ZeRO-3 over all devices sends 8 bytes per parameter and microbatch round; a pipeline does not."""
    everywhere = lambda c: plain(c) and c.zero == 3
    times = {gbps: seconds(search(HUGE, "h100:64", 512, 8192, gbps), everywhere) for gbps in (None, 25)}
    slow = search(*SITUATIONS[7].arguments)
    result = slow.best(everywhere)
    assert result is not None
    assert result[1].parts["data_comm"] > 0.3 * times[25] > 0.45 * times[None]
    assert slow.fitting[0].seconds < 0.8 * times[25]


def test_zero_1_with_a_pipeline_is_close_where_zero_3_within_a_node_is_chosen():
    """What the papers recommend for slow networks, DP + TP + PP + ZeRO-1, is within a quarter of the chosen plan."""
    chosen = search(*SITUATIONS[7].arguments).fitting[0]
    recommended = search(*SITUATIONS[7].arguments, zero=1).fitting[0]
    assert recommended.candidate.shape.stage > 1
    assert chosen.seconds <= recommended.seconds < 1.25 * chosen.seconds


# The search behind the choices, by brute force.

BATCH, COUNT, HOSTS = 48, 16, 2
LAYERS, HEADS, HIDDEN = 8, 6, 384
TOY = ModelConfig(family="llama", vocab_size=320, d_model=96, n_layers=LAYERS, n_heads=HEADS, n_kv_heads=2, d_ff=HIDDEN)


def every_mesh():
    """(replica, stage, data, model) that make 16 GPUs in two hosts and divide heads, MLP, layers and batch."""
    for replica, stage, data, model in product(range(1, COUNT + 1), repeat=4):
        fits = HEADS % model == 0 and HIDDEN % model == 0 and LAYERS % stage == 0
        if replica * stage * data * model == COUNT and fits and BATCH % (replica * data) == 0 and replica <= HOSTS:
            yield MeshShape(replica=replica, stage=stage, data=data, model=model)


def test_every_legal_mesh_is_searched_and_no_other():
    assert {c.shape for c in searched()} == {*every_mesh()}


def test_every_way_to_cut_the_batch_is_searched():
    ways = set()
    for shape in every_mesh():
        own = BATCH // shape.batch_ways
        counts = [n for n in range(1, own + 1) if own % n == 0]
        if shape.stage == 1:
            ways |= {(shape, n, None, None) for n in counts}
        else:
            chunks = [None, *(v for v in (2, 4) if LAYERS % (shape.stage * v) == 0)]
            ways |= {(shape, 1, n, v) for n in counts if n >= min(shape.stage, own) for v in chunks}
    assert {(c.shape, c.accumulation, c.microbatches, c.virtual_stages) for c in searched()} == ways


def test_every_stage_of_zero_recomputation_and_sequence_parallelism_is_searched():
    found = {
        (c.zero, c.remat, c.sequence_parallel) for c in searched() if c.shape == MeshShape(replica=2, data=4, model=2)
    }
    assert found == {*product(range(4), ("none", "dots", "full"), (False, True))}
    hosted = {(c.remat, c.offload) for c in searched(offload=True)}
    assert hosted == {*product(("none", "dots", "full", "offload"), ("optimizer",)), ("offload", "none")}


@cache
def searched(offload: bool = False) -> list[Candidate]:
    config = Config(model=TOY, data=DataConfig(seq_len=64), train=TrainConfig(precision="bf16", global_batch=BATCH))
    return candidates(config, architecture(TOY, 257, 64), parse_target(f"h100:{COUNT}"), Pins({}, {}), offload)


@pytest.mark.parametrize(
    "preset,pins,words",
    [
        ("llama3.2-1b", {"remat": "full"}, "(remat full), as pinned."),
        ("llama3.2-1b", {"offload": "optimizer"}, "(ZeRO-Offload), as pinned."),
        ("llama3.2-1b", {}, ""),
    ],
)
def test_recomputation_and_offload_that_were_asked_for_are_not_called_necessary(preset, pins, words):
    found = with_pins(preset, pins)
    said = " ".join(reasons(found, found.fitting[0]))
    assert words in said and "would not fit" not in said and "no layout of these devices fits" not in said


def test_what_would_not_fit_without_recomputation_is_said_of_that_layout():
    found = with_pins("llama3-8b", {"accumulation": 1, "zero": 3})
    plan = next(plan for plan in found.fitting if plan.candidate.remat == "full")
    assert "(remat full): with less of that this layout would not fit." in " ".join(reasons(found, plan))
    dots = found.best(lambda c: c == replace(plan.candidate, remat="dots"))
    assert dots and not dots[0]
    found = with_pins("llama3.2-1b", {"accumulation": 8, "zero": 3})
    plan = next(plan for plan in found.fitting if plan.candidate.remat == "full")
    assert "Blocks are recomputed in the backward pass (remat full)." in reasons(found, plan)


def with_pins(preset: str, pins: dict) -> ranking.Search:
    model = ModelConfig(preset=preset)
    config = Config(model=model, data=DataConfig(seq_len=8192), train=TrainConfig(precision="bf16", global_batch=64))
    mesh = {"data": 8}
    return ranking.search(config, architecture(model, 257, 8192), parse_target("h100:8"), Pins(mesh, pins))
