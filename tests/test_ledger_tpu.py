"""Found = expected on absent TPUs (v5e), layout by layout; what their compiler does in another way is named."""

import pytest
from ledger_layouts import CUT, FAST, LLAMA, PADDED, PIPELINES, TESTED, agreeing, config

TARGET = "v5e:2x4"
QUICK = "hsdp zero 3, accumulation, sp"
LEFT_OUT = (
    "gpipe",
    "1f1b, zero 2",
    "interleaved, tp",
    "1f1b, zero 3",
    "1f1b, tp sp, full",
    "1f1b, wide tp sp",
    "gpipe, wide tp sp, single layers",
    "gpt2 1f1b, zero 1",
)
"""Compiled for H100s, and by benchmarks/ledger.py."""
NAMES = [name for name in TESTED if name not in LEFT_OUT]
EACH = [pytest.param(name, marks=[] if name == QUICK else [pytest.mark.slow], id=name) for name in NAMES]


@pytest.mark.parametrize("name", EACH)
def test_found_is_expected(name):
    agreeing(TESTED[name], TARGET)


def test_rewrites_are_named():
    check = agreeing(FAST["zero 3 with tp"], TARGET).check
    assert check is not None
    words = " ".join(check.rewrites)
    assert "all-reduce of which every device keeps a part, for reduce-scatter" in words
    assert "short vectors by an all-reduce of parts among zeros" in words


@pytest.mark.slow
def test_an_asynchronous_gather_carried_through_a_loop_counts_once():
    found = agreeing(PIPELINES["1f1b, zero 3 gathered once"], TARGET)
    table = [row for row in found.rows if row.family == "gather" and row.form == "async fused"]
    assert table and all(row.count == 1 for row in table)


@pytest.mark.slow
def test_a_table_is_gathered_in_parts_side_by_side():
    found = agreeing(config("dp=8", 1, CUT), TARGET)
    assert any(row.family == "update" and row.bytes == 2 * 2560 * 200 for row in found.rows)


@pytest.mark.slow
def test_a_table_whose_rows_are_no_whole_tiles_is_padded_and_recognised():
    """On dp=8 its gradient travels as [129600, 512] for [128256, 512]."""
    model = LLAMA | {"n_layers": 1, "vocab_size": 128256, "d_model": 512, "head_dim": 64, "tie_embeddings": True}
    case = config("dp=8", 2, model, accumulation=2, remat="full")
    check = agreeing(case, TARGET).check
    assert check is not None and any("parts padded to whole tiles" in text for text in check.rewrites)


@pytest.mark.slow
def test_padding_of_scattered_parts_is_counted_out():
    case = config("replica=2,dp=4", 1, PADDED, global_batch=32, precision="fp16", remat="dots")
    check = agreeing(case, TARGET).check
    assert check is not None and any("parts padded to whole tiles" in text for text in check.rewrites)
