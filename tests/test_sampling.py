"""How tokens are drawn, and the way from text to ids and back; without a model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxshard.data.tokenizer import ByteTokenizer, IdTokenizer
from jaxshard.inference.generate import continuation, prompt_ids
from jaxshard.inference.sampling import Sampling, choose, restrict

LOGITS = np.log(np.array([0.05, 0.3, 0.1, 0.25, 0.02, 0.2, 0.07, 0.01]))


def nucleus(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """The probabilities that are asked for, one token at a time from the likeliest."""
    weights = np.exp(logits / sampling.temperature)
    order = sorted(range(len(weights)), key=lambda i: -weights[i])[: sampling.top_k or None]
    kept, total = [], sum(weights[i] for i in order)
    for i in order:
        kept.append(i)
        if sum(weights[j] for j in kept) / total >= sampling.top_p:
            break
    probabilities = np.zeros(len(weights))
    probabilities[kept] = weights[kept] / weights[kept].sum()
    return probabilities


@pytest.mark.parametrize(
    "sampling, kept",
    [
        (Sampling(), 8),
        (Sampling(temperature=0.5), 8),
        (Sampling(top_k=3), 3),
        (Sampling(top_p=0.74), 3),
        (Sampling(top_p=0.76), 4),
        (Sampling(temperature=2.0, top_k=5, top_p=0.6), 3),
        (Sampling(top_k=100), 8),
    ],
    ids=str,
)
def test_draws_have_the_renormalised_distribution(sampling, kept):
    expected = nucleus(LOGITS, sampling)
    assert (expected > 0).sum() == kept
    allowed = np.isfinite(np.asarray(restrict(jnp.asarray(LOGITS / sampling.temperature)[None], sampling)))[0]
    np.testing.assert_array_equal(allowed, expected > 0)
    count = 20_000
    keys = jax.random.split(jax.random.key(1), count)
    tokens = jax.jit(lambda keys: choose(jnp.tile(LOGITS, (count, 1)), keys, sampling))(keys)
    found = np.bincount(tokens, minlength=8) / count
    spread = np.sqrt(expected * (1 - expected) / count)
    assert (np.abs(found - expected) <= 4.5 * spread).all(), (found, expected)


@pytest.mark.parametrize("sampling", [Sampling(top_k=1), Sampling(top_p=1e-6), Sampling(temperature=1e-4)], ids=str)
def test_a_choice_of_one_is_greedy(sampling):
    logits = jax.random.normal(jax.random.key(0), (50, 40))
    keys = jax.random.split(jax.random.key(1), 50)
    greedy = choose(logits, keys, Sampling(greedy=True))
    np.testing.assert_array_equal(greedy, logits.argmax(-1))
    np.testing.assert_array_equal(choose(logits, keys, sampling), greedy)


def test_of_equal_logits_the_lower_ids_are_kept():
    allowed = np.isfinite(np.asarray(restrict(jnp.zeros((1, 6)), Sampling(top_k=2))))[0]
    assert allowed.tolist() == [True, True, False, False, False, False]


# --- text and ids ---


@pytest.mark.parametrize(
    "tokenizer, prompt, ids",
    [
        (ByteTokenizer(), "ab", [97, 98]),
        (ByteTokenizer(), "", [256]),
        (IdTokenizer(eod=5), "", [5]),
        (IdTokenizer(), "", [0]),
        (IdTokenizer(), "7 8", [7, 8]),
    ],
)
def test_generation_begins_with_the_prompt_or_the_end_of_a_document(tokenizer, prompt, ids):
    assert prompt_ids(tokenizer, prompt).tolist() == ids


def test_generation_begins_with_the_tokenizer_s_own_start():
    class Starting(IdTokenizer):
        start = np.array([3], np.int32)

    assert prompt_ids(Starting(), "7").tolist() == [3, 7]
    assert prompt_ids(Starting(), "").tolist() == [3]


@pytest.mark.parametrize(
    "prompt, new, text",
    [
        ("é", [*"ü!".encode()], "ü!"),
        ("", [*"ü".encode()][:1], "\ufffd"),
        ("a", [0xFF, 0x41], "\ufffdA"),
        ("7", [256, 0x42], "B"),
    ],
)
def test_broken_utf8_becomes_the_replacement_character(prompt, new, text):
    tokenizer = ByteTokenizer()
    assert continuation(tokenizer, prompt_ids(tokenizer, prompt), np.array(new)) == text


def test_continuation_is_decoded_behind_its_prompt():
    assert continuation(IdTokenizer(), np.array([15496]), np.array([995, 1])) == " 995 1"
