"""Found = expected on absent H100s, layout by layout: no byte missing, none unexpected."""

import time

import pytest
from ledger_layouts import TESTED, agreeing

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
