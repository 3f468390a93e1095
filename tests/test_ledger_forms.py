"""The two forms in which the embedding's rows are summed over stages and split over model, and what single layers save.

Nothing is compiled here: found traffic is made from expected traffic. Compiled: test_ledger_gpu.py.
"""

from dataclasses import replace

import pytest
from ledger_layouts import LLAMA, PIPELINES, SMALL, SP, config, pipeline, program_for

from jaxshard.analysis.compare import check
from jaxshard.analysis.expected import Expected, chosen, expected
from jaxshard.analysis.facts import Facts, facts_of
from jaxshard.analysis.ledger import Row, rows
from jaxshard.analysis.reasons import FAMILIES
from jaxshard.xla.hlo import parse

STREAM = 4 * 64 * 128 * 2
"""Bytes of the residual stream: 4 sequences of a microbatch, 64 positions, 128 wide, bf16."""
BOTH = ("stage", "model")


def facts_on_cpu(case) -> Facts:
    return facts_of(program_for(case, "cpu:8"))


@pytest.fixture(scope="module")
def wide() -> Facts:
    return facts_on_cpu(PIPELINES["1f1b, wide tp sp"])


def as_found(wanted: list[Expected]) -> list[Row]:
    """Rows of a ledger that does just what is expected."""
    same = {"exact": True, "phase": "", "source": "", "parameters": (), "is_async": False, "overlap": ""}
    same |= {"note": "", "name": "", "form": "plain", "dtype": "bf16"}
    return [Row(w.kind, w.axes, w.bytes, w.count, family=w.family, reason=w.reason, **same) for w in wanted]


def in_two(facts: Facts, calls: int) -> list[Row]:
    """The ledger of a compiler that does so many calls of the embedding's sum in two, of five."""
    told = lambda family, axes: calls * STREAM if (family, axes) == ("embedding", ("model",)) else 0
    return as_found([row for row in chosen(expected(facts), told) if row.family != "vector"])


def unexpected(rows: list[Row], facts: Facts) -> dict[tuple[str, ...], int]:
    return {item.axes: item.bytes for item in check(rows, facts, "gpu").unexpected}


@pytest.mark.parametrize("calls", [0, 3, 5])
def test_each_form_is_exact_and_more_of_either_is_unexpected(wide, calls):
    rows = in_two(wide, calls)
    judged = check(rows, wide, "gpu")
    assert judged.unexpected == ()
    assert [item.reason for item in judged.missing] == [FAMILIES["vector"]]  # has only bounds: left out above
    sums = {row.axes: (row.kind, row.bytes, row.count) for row in rows if row.family == "embedding"}
    both, first = ("all-reduce", STREAM, 5 - calls), ("reduce-scatter", STREAM, calls)
    assert sums == {axes: form for axes, form in ((BOTH, both), (("model",), first)) if form[2]}
    then = [row for row in judged.expected if row.text.endswith("then over stages")]
    assert [(row.bytes, row.count) for row in then] == ([(STREAM // 4, calls)] if calls else [])
    for row in rows:
        if row.family in ("embedding", "stage"):  # the same once more
            # One that stands for a call of the other form is not found out by itself: the other form is too much.
            found = unexpected([*rows, row], wide)
            assert sum(found.values()) >= row.total and found.keys() <= {BOTH, row.axes}, (row, found)


def test_half_of_a_form_is_unexpected(wide):
    """A scatter without the sum over stages lacks it; an all-reduce over model alone moves twice the bytes."""
    rows = in_two(wide, 5)
    stages = [row for row in rows if row.family == "stage"]
    without = [row for row in rows if not row.reason.endswith("then over stages")]
    missing = {item.axes: item.bytes for item in check(without, wide, "gpu").missing}
    assert len(without) == len(rows) - 1 and missing[("stage",)] == 5 * STREAM // 4
    assert sum(row.total for row in stages) == missing[("stage",)] + (4 + 5) * STREAM // 4
    other = [replace(row, kind="all-reduce") if row.family == "embedding" else row for row in rows]
    assert unexpected(other, wide) == {("model",): 5 * STREAM}


def test_the_second_half_is_recognised_where_it_bears_the_embeddings_name(wide):
    """Over stages alone the rows are summed after a scatter over model; where nothing lies over model, it is all."""
    made = 'metadata={op_name="jit(f)/jvp(embedding)/embedding.tokens/reduce"}'
    body = f"""HloModule m, num_partitions=8

%add (x: f32[], y: f32[]) -> f32[] {{
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %s = f32[] add(%x, %y)
}}

ENTRY %e (a: bf16[4,16,128]) -> bf16[4,16,128] {{
  %a = bf16[4,16,128]{{2,1,0}} parameter(0)
  ROOT %r = bf16[4,16,128]{{2,1,0}} all-reduce(%a), replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%add, {made}
}}
"""
    alone = facts_on_cpu(PIPELINES["gpipe"])
    family = lambda facts: rows(parse(body), wide.sizes, facts)[0].family
    assert (family(wide), family(alone)) == ("stage", "embedding")


@pytest.mark.parametrize(("remat", "optional"), [("full", 2), ("names:residual", 1), ("dots", 0)])
def test_a_single_layer_that_runs_again_without_a_loss_needs_no_inputs(remat, optional):
    case = pipeline("pp=2,tp=4", model=SMALL, schedule="gpipe", remat=remat, **SP)
    found = [row for row in expected(facts_on_cpu(case)) if row.family == "sequence" and row.text.endswith("vain")]
    assert sum(row.count for row in found) == optional  # one tick of five has no loss


@pytest.mark.parametrize("layers", [1, 2])
def test_one_layer_may_be_gathered_once(layers):
    found = expected(facts_on_cpu(config("dp=8", 3, LLAMA | {"n_layers": layers}, remat="full")))
    (forward,) = (row for row in found if row.text == "layers, forward")
    assert forward.optional == (layers == 1)
