"""The tables: which dim of which weight lies on which mesh axis, and what stays whole."""

import io
from dataclasses import replace

import jax
import pytest
import rich.console
from jax.sharding import PartitionSpec as P

from jaxshard.config import Config, ModelConfig, grouped
from jaxshard.console import Console
from jaxshard.errors import InputError
from jaxshard.parallel.axes import MeshShape
from jaxshard.parallel.rules import (
    Held,
    Replicated,
    activation_spec,
    base_axes,
    check_replicated,
    local_shape,
    replicated,
    weight_specs,
)
from jaxshard.training.describe import show_program
from jaxshard.training.program import build_program

QUERY = (12, 64, 8, 16), ("layers", "embed", "heads", "head_dim")
MESH = MeshShape(data=4, model=2)


def test_zero_is_a_table():
    whole, spread = P(None, None, "model", None), P(None, "data", "model", None)
    rows = {
        0: (whole, whole, whole),
        1: (whole, whole, spread),
        2: (whole, spread, spread),
        3: (spread, spread, spread),
    }
    for zero, row in rows.items():
        specs = weight_specs(*QUERY, MESH, zero)
        assert (specs.parameters, specs.gradients, specs.optimizer) == row
        assert specs.base == whole


def test_layers_lie_on_stages_and_never_on_data():
    specs = weight_specs(*QUERY, MeshShape(stage=2, data=4, model=2), 3)
    assert specs.parameters == P("stage", "data", "model", None)
    assert weight_specs((12, 3), ("layers", "embed"), MeshShape(data=4), 3).parameters == P(None, None)


def test_vocabulary_lies_on_stages_and_model():
    assert base_axes((512, 64), ("vocab", "embed"), MeshShape(stage=2, model=2)) == [("stage", "model"), ()]


def test_a_dim_that_is_split_already_may_be_split_further():
    assert weight_specs((8, 3), ("mlp", "embed"), MESH, 3).parameters == P(("model", "data"), None)


def test_kv_heads_that_do_not_divide_stay_whole_and_are_listed():
    mesh = MeshShape(model=4)
    assert base_axes((12, 64, 2, 16), ("layers", "embed", "kv_heads", "head_dim"), mesh)[2] == ()
    key = Held("blocks.attention.key", "parameters", (12, 64, 2, 16), ("layers", "embed", "kv_heads", "head_dim"), 4)
    (leaf,) = replicated([key, replace(key, kind="optimizer")], mesh, 0)
    assert leaf.bytes == 12 * 64 * 2 * 16 * 4 and "kv_heads = 2 does not divide by model = 4" in leaf.why


def test_what_zero_cannot_split_is_refused_by_name_unless_allowed():
    weight = Held("odd", "parameters", (3, 5), ("embed", None), 2)
    state = [weight, *3 * [replace(weight, kind="optimizer", itemsize=4)]]  # a master and two moments
    sizes = {zero: [leaf.bytes for leaf in replicated(state, MeshShape(data=4), zero)] for zero in range(4)}
    assert sizes == {0: [], 1: [180], 2: [180], 3: [210]}
    assert replicated(state, MeshShape(replica=4, model=2), 3) == []
    leaf = Replicated("odd", 60, replicated(state, MeshShape(data=4), 1)[0].why, by_zero=True)
    assert "(3, 5)" in leaf.why
    check_replicated([leaf], 60 * 101, ())
    with pytest.raises(InputError, match=r"odd: no dim of \(3, 5\) divides by data = 4.*allow_replicated '\[odd\]'"):
        check_replicated([leaf], 60 * 99, ())
    check_replicated([leaf], 60, ("odd",))
    with pytest.raises(InputError, match=r"60 of 60 bytes.*allow_replicated '\[other, odd\]'"):
        check_replicated([leaf], 60, ("other",))
    check_replicated([Replicated("kv", 60, "kv_heads = 2 does not divide by model = 4")], 60, ())


def test_moments_that_lack_the_dim_that_divides_are_listed_by_their_own_shape():
    mesh = MeshShape(data=4)
    weight = Held("up", "parameters", (2, 130, 256), ("layers", "embed", "mlp"), 4)
    rows = Held("up", "optimizer", (2, 130), ("layers", "embed"), 4)
    columns = Held("up", "optimizer", (2, 256), ("layers", "mlp"), 4)
    count = Held("", "optimizer", (), (), 4)
    (leaf,) = replicated([weight, count, rows, columns], mesh, 3)
    assert leaf == Replicated("up", 1040, "no dim of its moments (2, 130) divides by data = 4 (ZeRO-3)", by_zero=True)


def test_activations():
    mesh = MeshShape(replica=2, data=2, model=2)
    axes = ("batch", "sequence", "heads", "head_dim")
    assert activation_spec(axes, (8, 16, 4, 8), mesh, {}) == P(("replica", "data"), None, "model", None)
    assert activation_spec(axes, (2, 16, 3, 8), mesh, {}) == P("data", None, None, None)
    stream = ("batch", "residual_sequence", "embed")
    assert activation_spec(stream, (8, 16, 4), mesh, {"residual_sequence": ("model",)}) == P(
        ("replica", "data"), "model", None
    )


def test_local_shape():
    assert local_shape((8, 6, 5), P(("replica", "data"), "model"), MeshShape(replica=2, data=2, model=2)) == (2, 3, 5)


def test_weights_that_may_stay_whole_are_checked_by_name():
    groups = grouped(mesh="dp=2", global_batch=2, allow_replicated=("blocks.mlp.upp",))
    with pytest.raises(InputError, match=r"mlp.upp', but the model has no such weight \(did you mean 'blocks.mlp.up'"):
        build_program(Config(model=ModelConfig(vocab_size=16), **groups), jax.devices()[:2])


def test_a_narrow_terminal_shows_the_weights_without_breaking_words():
    config = Config(
        model=ModelConfig(family="llama", d_model=64, n_layers=2, n_heads=4), **grouped(mesh="pp=2,dp=2,tp=2", zero=1)
    )
    program = build_program(config, jax.devices()[:8], tokenizer_size=257)
    said = {}
    for width in (80, 140):
        console = Console(file := io.StringIO())
        console._rich = rich.console.Console(file=file, force_terminal=True, color_system=None, width=width)
        show_program(program, console)
        said[width] = file.getvalue()
        assert max(map(len, said[width].splitlines())) <= width
        for word in ("blocks.attention.query", "layers on pp, heads on tp", "2 x 64 x 4 x 16", "1 x 64 x 2 x 16"):
            assert word in said[width], (width, word)
    assert "state: layers on pp, embed on dp, heads on tp" in said[80] and "state: " not in said[140]
