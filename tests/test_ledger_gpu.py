"""Found = expected on absent H100s, layout by layout: no byte missing, none unexpected."""

import time

import pytest
from ledger_layouts import TESTED, agreeing, config, pipeline

from jaxshard.config import Config, DataConfig, ModelConfig, grouped

TARGET = "h100:8"
QUICK = "zero 3 with tp"
EACH = [pytest.param(name, marks=[] if name == QUICK else [pytest.mark.slow], id=name) for name in TESTED]


@pytest.mark.parametrize("name", EACH)
def test_found_is_expected(name):
    check = agreeing(TESTED[name], TARGET).check
    assert check is not None and check.expected
    # A sum that leaves its loop moves less; GPUs have no other excuse.
    assert all("moved out of its loop" in text for text in check.rewrites)


REPLICAS = {
    "zero 3": config("replica=2,dp=8", 3, global_batch=64, accumulation=4),
    "zero 2": config("replica=2,dp=8", 2, global_batch=64, accumulation=4),
    "zero 2, replicas alone": config("replica=8,tp=2", 2, global_batch=64, accumulation=4),
    "pipeline": pipeline("replica=2,pp=2,dp=4", 3, global_batch=64, accumulation=2),
}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in REPLICAS if name != "zero 3"]


@pytest.mark.parametrize("name", ["zero 3", *SLOW])
def test_replicas_sum_their_shards_once_a_step(name):
    """Over the slow network go the gradients of a device's shards, in no loop, however many parts the batch has."""
    found = agreeing(REPLICAS[name], "h100:16")
    across = [row for row in found.rows if "replica" in row.axes and row.family != "bookkeeping"]
    assert across and {(row.axes, row.count) for row in across} == {(("replica",), 1)}
    assert found.facts is not None
    shards = sum(4 * w.total // (found.facts.mesh.data if w.spread else 1) for w in found.facts.weights)
    assert sum(row.total for row in across) == shards


@pytest.mark.slow
def test_a_replicas_own_sum_takes_no_more_memory_than_its_shard():
    alone = agreeing(config("dp=4", 3, accumulation=2), "h100:4").memory
    assert agreeing(config("replica=2,dp=4", 3, global_batch=32, accumulation=2), TARGET).memory.peak <= alone.peak


@pytest.mark.slow
def test_the_ledger_of_a_large_model_on_512_gpus_takes_seconds():
    """Of one processor, and so at most as long on two: 30 s is what is promised."""
    case = Config(
        model=ModelConfig(preset="llama3-8b"),
        data=DataConfig(seq_len=8192),
        **grouped(mesh="dp=512", zero=3, global_batch=512, precision="bf16", remat="full"),
    )
    start = time.process_time()
    found = agreeing(case, "h100:512")
    assert time.process_time() - start < 30
    parameters = 2 * 8.03e9
    assert found.to_dict()["bytes_by_axis"]["data"] == pytest.approx(4 * parameters, rel=0.05)  # 3 Psi, gradients fp32
