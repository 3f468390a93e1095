"""The models against published sizes, and against a second implementation written from the papers' formulas."""

import functools
import math
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxshard.config import ModelConfig
from jaxshard.errors import InputError
from jaxshard.models.layers import Context, TokenInfo
from jaxshard.models.presets import PRESETS, Architecture, architecture
from jaxshard.models.transformer import Model, WeightRow, describe, is_slotted, slotted
from jaxshard.training.loss import LossSpec, cross_entropy

PUBLISHED = {
    # Sums over the tensors of the released weights (Hugging Face: openai-community/gpt2*, meta-llama/*, TinyLlama/*).
    "gpt2-124m": 124_439_808,
    "gpt2-355m": 354_823_168,
    "gpt2-774m": 774_030_080,
    "gpt2-1.5b": 1_557_611_200,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "tinyllama-1.1b": 1_100_048_384,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
}


def rows_of(model: Model) -> list[WeightRow]:
    return jax.tree.leaves(model.weights, is_leaf=lambda x: isinstance(x, WeightRow))


@pytest.mark.parametrize("name", PRESETS)
def test_the_table_of_weights_has_the_published_number_of_parameters(name):
    arch = architecture(ModelConfig(preset=name))
    model = describe(arch, vocab_ways=16)
    assert model.vocab % 16 == 0 and model.vocab >= arch.vocab_size
    assert sum(row.rows * math.prod(row.shape[1:]) for row in rows_of(model)) == arch.parameters
    if not name.startswith("toy"):
        assert arch.parameters == PUBLISHED[name]


def test_a_weight_s_axes_say_what_its_dims_are():
    arch = architecture(ModelConfig(family="llama", vocab_size=300, d_model=24, n_layers=2, n_heads=4, n_kv_heads=2))
    model = describe(arch, vocab_ways=1)
    sizes = dict(layers=2, embed=24, heads=4, kv_heads=2, head_dim=6, mlp=arch.d_ff, vocab=320)
    for row in rows_of(model):
        assert row.shape == tuple(sizes[name] for name in row.axes)


# --- the second implementation, float64, one token and one head at a time ---


def reference_logits(arch: Architecture, params, tokens, segments, positions) -> np.ndarray:
    """Logits [T, V] of one sequence, from plain numpy arrays named as in the released models."""
    x = params["embedding"]["tokens"][tokens]
    if arch.family == "gpt2":
        x = x + params["embedding"]["positions"][positions]
    for layer in range(arch.n_layers):
        weights = jax.tree.map(lambda a, layer=layer: a[layer], params["blocks"])
        normed = reference_norm(arch, weights["norm1"], x)
        x = x + reference_attention(arch, weights["attention"], normed, segments, positions)
        normed = reference_norm(arch, weights["norm2"], x)
        x = x + reference_mlp(arch, weights["mlp"], normed)
    out = params["embedding"]["tokens"] if arch.tie_embeddings else params["head"]["out"]
    return reference_norm(arch, params["head"]["norm"], x) @ out[: arch.vocab_size].T


def reference_norm(arch, weights, x):
    """LayerNorm (Ba et al. 2016, eq. 4), or RMSNorm (Zhang and Sennrich 2019, eq. 4)."""
    result = np.empty_like(x)
    for t, a in enumerate(x):
        if arch.family == "gpt2":
            result[t] = weights["scale"] * (a - np.mean(a)) / np.sqrt(np.var(a) + arch.norm_eps) + weights["bias"]
        else:
            result[t] = weights["scale"] * a / np.sqrt(np.mean(a**2) + arch.norm_eps)
    return result


def reference_frequencies(arch) -> np.ndarray:
    """theta_i (Su et al. 2021, section 3.2.2), rescaled by wavelength as Llama 3.1 does."""
    frequencies = []
    for i in range(arch.head_dim // 2):
        frequency = arch.rope_theta ** (-2 * i / arch.head_dim)
        wavelength = 2 * math.pi / frequency
        if arch.rope_scaling == "linear":
            frequency /= arch.rope_factor
        elif arch.rope_scaling == "llama3":
            longest_kept = arch.rope_original_max / arch.rope_high_freq_factor
            shortest_stretched = arch.rope_original_max / arch.rope_low_freq_factor
            if wavelength > shortest_stretched:
                frequency /= arch.rope_factor
            elif wavelength >= longest_kept:
                smooth = (arch.rope_original_max / wavelength - arch.rope_low_freq_factor) / (
                    arch.rope_high_freq_factor - arch.rope_low_freq_factor
                )
                frequency = (1 - smooth) * frequency / arch.rope_factor + smooth * frequency
        frequencies.append(frequency)
    return np.array(frequencies)


def rotated(arch, vector, position):
    """Multiplies the complex numbers (v_i, v_{i + E/2}) by exp(i m theta_i)."""
    half = arch.head_dim // 2
    z = (vector[:half] + 1j * vector[half:]) * np.exp(1j * position * reference_frequencies(arch))
    return np.concatenate([z.real, z.imag])


def reference_attention(arch, weights, x, segments, positions):
    """softmax(q k / sqrt(E)) v over earlier tokens of the same document (Vaswani et al. 2017, eq. 1), head by head."""
    T, E = len(x), arch.head_dim
    y = np.zeros_like(x)
    for head in range(arch.n_heads):
        group = head // (arch.n_heads // arch.n_kv_heads)  # Ainslie et al. 2023, figure 2
        q, k, v = x @ weights["query"][:, head], x @ weights["key"][:, group], x @ weights["value"][:, group]
        if arch.family == "gpt2":
            q, k, v = q + weights["query_bias"][head], k + weights["key_bias"][group], v + weights["value_bias"][group]
        else:
            q = np.stack([rotated(arch, q[t], positions[t]) for t in range(T)])
            k = np.stack([rotated(arch, k[t], positions[t]) for t in range(T)])
        for t in range(T):
            seen = [u for u in range(t + 1) if segments[u] == segments[t]]
            scores = np.exp(np.array([q[t] @ k[u] / math.sqrt(E) for u in seen]))
            y[t] += (scores / scores.sum()) @ v[seen] @ weights["out"][head]
    return y + weights["out_bias"] if arch.family == "gpt2" else y


def reference_mlp(arch, weights, x):
    """GELU in its tanh form (Hendrycks and Gimpel 2016), or SwiGLU (Shazeer 2020, eq. 6)."""
    if arch.family == "gpt2":
        h = x @ weights["up"] + weights["up_bias"]
        h = 0.5 * h * (1 + np.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
        return h @ weights["down"] + weights["down_bias"]
    gate = x @ weights["gate"]
    return (gate / (1 + np.exp(-gate)) * (x @ weights["up"])) @ weights["down"]


# --- the comparison ---

SIZES = dict(vocab_size=70, d_model=24, n_layers=2, n_heads=4, d_ff=40, max_seq_len=32)
LLAMA3 = dict(rope_scaling="llama3", rope_factor=8.0, rope_original_max=40, rope_theta=20.0)
"""The three frequencies of a head are one that is kept, one in between, and one that is stretched."""
CASES = {
    "gpt2": dict(family="gpt2", tie_embeddings=True),
    "gpt2 untied, grouped": dict(family="gpt2", tie_embeddings=False, n_kv_heads=2),
    "llama tied": dict(family="llama", tie_embeddings=True, norm_eps=1e-6),
    "llama grouped": dict(family="llama", n_kv_heads=2),
    "llama one kv head, wide heads": dict(family="llama", n_kv_heads=1, head_dim=10),
    "llama linear": dict(family="llama", rope_scaling="linear", rope_factor=4.0),
    "llama3": dict(family="llama", n_kv_heads=2, tie_embeddings=True, **LLAMA3),
}
SEGMENTS = np.array([[1] * 13, [1] * 5 + [2] * 4 + [3] * 4, [1] * 6 + [2] * 3 + [0] * 4], np.int32)
POSITIONS = np.array([[*range(13)], [*range(5), *range(4), *range(4)], [*range(6), *range(3), *[0] * 4]], np.int32)


def random_params(model: Model, seed: int = 0):
    """Every weight random, biases, norms and the vocabulary's padding included."""
    rng = np.random.default_rng(seed)
    scale = {"norm": 0.3, "bias": 0.3, "matrix": 0.4, "embedding": 1.0}
    draw = lambda row: rng.normal(row.role == "norm", scale[row.role], row.shape)
    return jax.tree.map(draw, model.weights, is_leaf=lambda x: isinstance(x, WeightRow))


def last_hidden(model: Model, params, tokens, segments, positions, ctx: Context):
    """The model's own final activations [B, T, D]."""
    lift = lambda group, weights: jax.tree.map(lambda w: w.value, weights, is_leaf=is_slotted)
    info = TokenInfo(segments, positions)
    x = model.embed(params["embedding"], tokens, info, ctx)
    layers = jnp.arange(model.arch.n_layers, dtype=jnp.int32)
    x = model.run_blocks(slotted(params["blocks"]), x, info, layers, ctx, lift, lambda body: body)
    return model.final_norm(params["head"], x, ctx)


def inputs_of(case: dict, packed: bool):
    """Returns a case's architecture, table, weights, and tokens, targets, segments, positions [B, T]."""
    arch = architecture(ModelConfig(**SIZES | case))
    model = describe(arch)
    rng = np.random.default_rng(1)
    segments, positions = (SEGMENTS, POSITIONS) if packed else (SEGMENTS[:1], POSITIONS[:1])
    tokens, targets = rng.integers(0, arch.vocab_size, (2, *segments.shape))
    targets[(rng.random(targets.shape) < 0.2) | (segments == 0)] = -1
    return arch, model, random_params(model), (tokens, targets, segments, positions)


@functools.cache
def ours(name: str, packed: bool):
    """Returns our logits [N, V] where there is no padding, and the sums: objective (with z-loss), cross-entropy."""
    arch, model, params, (tokens, targets, segments, positions) = inputs_of(CASES[name], packed)
    with jax.enable_x64(True):
        ctx = Context(dtype=jnp.float64, packed=packed)
        x = jax.jit(lambda p: last_hidden(model, p, tokens, segments, positions, ctx))(params)
        out = params["embedding"]["tokens"] if arch.tie_embeddings else params["head"]["out"]
        logits = np.asarray(x) @ out[: arch.vocab_size].T
        spec = LossSpec(arch.vocab_size, chunk=5, z_loss=0.01, groups=1, shard=lambda x, axes, name=None: x)
        losses = [float(loss) for loss in cross_entropy(spec, x, jnp.asarray(out), jnp.asarray(targets))]
    return logits[segments > 0], losses


def reference(case: dict, packed: bool):
    """Returns the same by the second implementation."""
    arch, _, params, (tokens, targets, segments, positions) = inputs_of(case, packed)
    rows = zip(tokens, segments, positions, strict=True)
    logits = np.stack([reference_logits(arch, params, *row) for row in rows])
    normaliser = np.log(np.exp(logits).sum(-1))
    valid = targets >= 0
    chosen = np.take_along_axis(logits, np.maximum(targets, 0)[..., None], -1)[..., 0]
    entropy = (normaliser - chosen)[valid].sum()
    return logits[segments > 0], [entropy + 0.01 * (normaliser[valid] ** 2).sum(), entropy]


@pytest.mark.parametrize("name, packed", [*((name, True) for name in CASES), ("gpt2", False), ("llama3", False)])
def test_model_and_loss_equal_the_papers_formulas(name, packed):
    (logits, losses), (expected, expected_losses) = ours(name, packed), reference(CASES[name], packed)
    np.testing.assert_allclose(logits, expected, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-10)


@pytest.mark.parametrize(
    "wrong",
    [
        dict(norm_eps=1.1e-5),
        dict(rope_theta=20.1),
        dict(rope_factor=8.1),
        dict(rope_low_freq_factor=1.1),
        dict(rope_high_freq_factor=3.9),
        dict(rope_original_max=41),
        dict(rope_scaling="linear"),
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_the_comparison_sees_a_constant_that_is_slightly_off(wrong):
    logits, _ = reference(CASES["llama3"] | wrong, packed=True)
    assert np.abs(logits - ours("llama3", True)[0]).max() > 1e-7


def test_llama3_case_case_covers_kept_stretched_and_interpolated_frequencies():
    arch = architecture(ModelConfig(**SIZES | CASES["llama3"]))
    plain = arch.rope_theta ** (-np.arange(0, arch.head_dim, 2) / arch.head_dim)
    ratio = plain / reference_frequencies(arch)
    assert ratio[0] == 1 and 1 < ratio[1] < 8 and ratio[2] == 8


def test_attention_does_not_cross_documents_and_padding_changes_nothing():
    """A change of one document's tokens moves no logit of another."""
    arch = architecture(ModelConfig(**SIZES | CASES["llama grouped"]))
    model = describe(arch)
    params = jax.tree.map(jnp.float32, random_params(model))
    tokens = np.random.default_rng(2).integers(0, arch.vocab_size, SEGMENTS.shape)
    run = jax.jit(lambda tokens: last_hidden(model, params, tokens, SEGMENTS, POSITIONS, Context()))
    changed = np.where(SEGMENTS == 1, (tokens + 1) % arch.vocab_size, tokens)
    before, after = np.asarray(run(tokens)), np.asarray(run(changed))
    np.testing.assert_array_equal(before[SEGMENTS > 1], after[SEGMENTS > 1])
    assert (before[SEGMENTS == 1] != after[SEGMENTS == 1]).any(-1).all()


def test_initial_values_do_not_depend_on_the_padding_of_the_vocabulary():
    arch = architecture(ModelConfig(**SIZES | CASES["llama grouped"]))
    small, large = (jax.jit(lambda ways=ways: describe(arch, ways).initialise(3))() for ways in (1, 96))
    assert small["head"]["out"].shape[0] == 128 and large["head"]["out"].shape[0] == 192
    for group, name in (("embedding", "tokens"), ("head", "out")):
        a, b = small[group][name], large[group][name]
        np.testing.assert_array_equal(a[:70], b[:70])
        assert not a[70:].any() and not b[70:].any()
    jax.tree.map(np.testing.assert_array_equal, small["blocks"], large["blocks"])


def test_initial_values_are_the_same_bits_in_narrow_slices():
    """At full optimisation, as a run draws them: XLA's CPU compiler computes a slice of 4 unlike one of 32."""
    arch = architecture(ModelConfig(family="llama", d_model=32, n_layers=4, n_heads=4, head_dim=8, vocab_size=70))
    draw = lambda: describe(arch).initialise(3)
    mesh = jax.make_mesh((8,), ("data",))
    last = lambda a: NamedSharding(mesh, PartitionSpec(*[None] * (a.ndim - 1), "data"))
    whole = jax.jit(draw)()
    jax.tree.map(np.testing.assert_array_equal, whole, jax.jit(draw, out_shardings=jax.tree.map(last, whole))())


def test_initial_values_have_the_declared_spread():
    arch = architecture(ModelConfig(preset="toy-gpt2-1m"))
    params = jax.jit(lambda: describe(arch).initialise(0))()
    attention = params["blocks"]["attention"]
    assert float(attention["query"].std()) == pytest.approx(0.02, rel=0.02)
    assert float(attention["out"].std()) == pytest.approx(0.02 / math.sqrt(2 * arch.n_layers), rel=0.02)
    assert 3.5 < float(jnp.abs(attention["query"]).max()) / 0.02 < 4.25 and abs(float(attention["query"].mean())) < 3e-4
    assert not attention["out_bias"].any() and (params["head"]["norm"]["scale"] == 1).all()
    matrices = [np.asarray(a).ravel()[:100] for a in jax.tree.leaves(params) if np.asarray(a).std() > 0]
    assert all((a != b).any() for a, b in pairwise(matrices))


# --- what a model description may not be ---


@pytest.mark.parametrize(
    "model, seq_len, message",
    [
        (dict(preset="gpt2-124"), None, "'gpt2-124' is not known (did you mean 'gpt2-124m'?)"),
        (dict(preset="lama3-8b"), None, "did you mean 'llama3-8b'?"),
        (dict(preset="zzz"), None, "known: toy-1m, "),
        (dict(d_model=48, n_layers=1, n_heads=5, vocab_size=9), None, "try n_heads = 4 or give head_dim"),
        (dict(d_model=48, n_layers=1, n_heads=6, n_kv_heads=4, vocab_size=9), None, "try n_kv_heads = 2"),
        (dict(preset="gpt2-124m", n_heads=10), None, "768 does not divide by model.n_heads = 10; try n_heads = 8"),
        (dict(d_model=6, n_layers=1, n_heads=2, vocab_size=9), None, "model.head_dim = 3 is odd"),
        (dict(d_model=6, n_heads=2, vocab_size=9), None, "model.n_layers is missing"),
        (dict(d_model=6, n_layers=1, vocab_size=9), None, "model.n_heads is missing"),
        (dict(d_model=8, n_layers=1, n_heads=2), None, "model.vocab_size is missing"),
        (dict(preset="toy-gpt2-1m", rope_theta=5.0), None, "model.rope_theta = 5.0 changes nothing: gpt2 has learned"),
        (dict(rope_factor=4.0), None, "model.rope_factor = 4.0 changes nothing: model.rope_scaling is none"),
        (dict(preset="toy-10m"), 512, "data.seq_len = 512 is longer than the model's max_seq_len = 256"),
    ],
)
def test_a_wrong_model_is_refused_with_the_fix(model, seq_len, message):
    with pytest.raises(InputError) as caught:
        architecture(ModelConfig(**model), seq_len=seq_len)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "model, seq_len, expected",
    [
        (dict(), None, dict(d_model=128, n_layers=4, vocab_size=257)),
        (dict(preset="llama3-8b", n_layers=2), None, dict(n_layers=2, n_kv_heads=8, d_ff=14336)),
        (dict(preset="llama3-8b", n_heads=16), None, dict(n_kv_heads=16, head_dim=256)),
        (dict(preset="llama3.2-3b", n_layers=1), None, dict(head_dim=128)),
        (dict(preset="llama3.2-3b", rope_scaling="none"), None, dict(rope_factor=1.0, rope_theta=500000.0)),
        (dict(preset="gpt2-124m", d_model=96), None, dict(head_dim=8, d_ff=384)),
        (
            dict(d_model=48, n_layers=1, n_heads=6),
            2000,
            dict(family="llama", vocab_size=300, max_seq_len=2000, d_ff=128),
        ),
        (dict(d_model=6, n_layers=1, n_heads=2, family="gpt2"), None, dict(head_dim=3, d_ff=24, tie_embeddings=True)),
        (dict(d_model=48, n_layers=1, n_heads=5, head_dim=8), None, dict(head_dim=8, tie_embeddings=False)),
    ],
)
def test_what_is_left_open_follows_from_the_rest(model, seq_len, expected):
    arch = architecture(ModelConfig(**model), 300, seq_len)
    assert {name: getattr(arch, name) for name in expected} == expected
