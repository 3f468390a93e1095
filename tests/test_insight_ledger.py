"""Found = expected on faked CPU devices, and mistakes that the comparison names; `benchmarks/ledger.py` compares many
layouts for absent GPUs and TPUs."""

from ledger_layouts import FULL_KV, config

from jaxshard.insight.check import check
from jaxshard.insight.expected import expected
from jaxshard.insight.explain import explain_config
from jaxshard.parallel.layout import Layout


def test_cpu():
    found = explain_config(config("dp=4,tp=2", 3), "cpu:8")
    assert found.check is not None
    assert found.check.missing == () and found.check.unexpected == () and found.warnings == ()
    words = " ".join(found.check.rewrites)
    assert "for reduce-scatter" in words
    assert "f32" in words


def test_a_dropped_activation_constraint(monkeypatch):
    whole, stream = Layout.shard, ("batch", "residual_sequence", "embed")
    dropped = lambda axes: (None, None, "embed") if axes == stream else axes
    monkeypatch.setattr(Layout, "shard", lambda self, x, axes, name=None: whole(self, x, dropped(axes), name))
    found = explain_config(config("dp=8", precision="fp32"), "cpu:8")
    assert not found.ok and found.check is not None
    reasons = [item.reason for item in found.check.failures]
    assert any("an activation travels over data" in reason for reason in reasons), reasons


def test_a_sum_where_a_scatter_would_do_is_no_excuse_on_gpus():
    """A GPU program that all-reduces ZeRO gradients is reported, with the bytes."""
    found = explain_config(config("dp=8", 1, precision="fp32"), "cpu:8")  # the CPU compiler does just that
    assert found.ok and found.facts is not None
    judged = check(found.rows, found.facts, "gpu")
    assert any("twice the bytes" in item.reason for item in judged.unexpected)


def test_full_kv_heads_differ_from_shared_ones():
    families = []
    for model in (None, FULL_KV):
        facts = explain_config(config("tp=8", model=model, precision="fp32"), "cpu:8").facts
        assert facts is not None
        families.append({row.family for row in expected(facts)})
    assert "kv" in families[0] and "kv" not in families[1]
