"""Found = expected on absent H100s, layout by layout: no byte missing, none unexpected."""

import pytest
from ledger_layouts import ALL, agreeing

TARGET = "h100:8"
QUICK = ("zero 3 with tp", "1f1b, zero 1")
EACH = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow], id=name) for name in ALL]


@pytest.mark.parametrize("name", EACH)
def test_found_is_expected(name):
    check = agreeing(ALL[name], TARGET).check
    assert check is not None and check.expected
    # A sum that leaves its loop moves less; GPUs have no other excuse.
    assert all("moved out of its loop" in text for text in check.rewrites)
