"""Generation: neither cache nor mesh changes a text."""

import functools
import json
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxshard.commands.cli import run
from jaxshard.config import Config, DataConfig, ModelConfig, TrainConfig, grouped
from jaxshard.config.file import run_to_yaml, saved_values
from jaxshard.data.tokenizer import ByteTokenizer, IdTokenizer
from jaxshard.errors import InputError
from jaxshard.inference import decode
from jaxshard.inference.generate import (
    Generator,
    check_prompts,
    continuation,
    generator,
    prompt_ids,
    room_for,
    sample_text,
)
from jaxshard.inference.sampling import Sampling
from jaxshard.models.layers import Context, TokenInfo
from jaxshard.models.transformer import is_slotted, slotted
from jaxshard.training.checkpoint import Checkpoints
from jaxshard.training.invariance import wide_types
from jaxshard.training.program import Program, build_program
from jaxshard.training.start import run_facts, unpadded
from jaxshard.training.state import TrainState

GREEDY = Sampling(greedy=True)
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2]]
LLAMA = dict(family="llama", vocab_size=70, d_model=16, n_layers=4, n_heads=4, n_kv_heads=2, d_ff=24, max_seq_len=64)
GPT2 = LLAMA | dict(family="gpt2", n_kv_heads=4)
GPT2_TIED = GPT2 | dict(tie_embeddings=True, max_seq_len=32)


@functools.cache
def program(
    mesh: str = "dp=1", zero: int = 0, sequence_parallel=False, virtual_stages=None, precision="fp32", **model
) -> Program:
    """A program on part of the faked devices."""
    config = Config(
        model=ModelConfig(**LLAMA | model),
        data=DataConfig(seq_len=32),
        **grouped(
            mesh=mesh,
            zero=zero,
            global_batch=8,
            precision=precision,
            sequence_parallel=sequence_parallel,
            virtual_stages=virtual_stages,
        ),
    )
    devices = np.prod([int(size) for size in re.findall(r"\d+", mesh)])
    return build_program(config, jax.devices()[:devices])


def drawn(program: Program):
    """Random weights that make a model of strong opinions; the vocabulary's padding would win if it were let in."""
    rng = np.random.default_rng(0)
    scale = {"norm": 0.3, "bias": 0.1, "matrix": 0.7, "embedding": 1.0}

    def draw(row):
        a = rng.normal(row.init[0] == "ones", scale[row.role], row.shape)
        a[row.rows :] = 50 if row.axes[0] == "vocab" else 0
        return (a[program.model.layer_order] if row.axes[0] == "layers" else a).astype(np.float32)

    return jax.tree.map(draw, program.model.weights, is_leaf=lambda x: hasattr(x, "axes"))


@functools.cache
def setting(*layout, **more) -> tuple[Generator, dict]:
    """A generator, and parameters in their training layout and order."""
    found = program(*layout, **more)
    return generator(found), jax.device_put(drawn(found), found.layout.parameters)


@functools.cache
def whole_model(program: Program):
    """tokens [1, 32] -> logits [1, 32, V], by the model as it is trained, without a cache, on one device."""
    model, params, ctx = program.model, drawn(program), Context()
    lift = lambda group, weights: jax.tree.map(lambda w: w.value, weights, is_leaf=is_slotted)

    @jax.jit
    def run(tokens):
        info = TokenInfo(jnp.ones_like(tokens), jnp.arange(tokens.shape[1])[None])
        x = model.embed(params["embedding"], tokens, info, ctx)
        x = model.run_blocks(slotted(params["blocks"]), x, info, jnp.arange(4), ctx, lift, lambda body: body)
        out = params["embedding"]["tokens"] if model.arch.tie_embeddings else params["head"]["out"]
        return model.final_norm(params["head"], x, ctx) @ out[: model.arch.vocab_size].T

    return run


def whole_logits(program: Program, tokens: np.ndarray) -> np.ndarray:
    """Logits [T, V] of one sequence without a cache."""
    padded = np.zeros((1, 32), np.int32)  # One length, one compilation; what stands behind is not seen.
    padded[0, : len(tokens)] = tokens
    return np.asarray(whole_model(program)(padded))[0, : len(tokens)]


# --- with and without a cache ---

in_place = pytest.mark.filterwarnings("error:Some donated buffers")
"""The cache is updated where it lies. Other warnings may be about what other tests left behind, collected only now."""


@in_place
@pytest.mark.parametrize(
    "model",
    [
        {},
        dict(n_kv_heads=1, tie_embeddings=True, rope_scaling="llama3", rope_factor=4.0, rope_original_max=16),
        GPT2_TIED,
        GPT2 | dict(tie_embeddings=False, n_kv_heads=2),
    ],
    ids=["llama", "llama tied, one kv head", "gpt2", "gpt2 untied, grouped"],
)
def test_greedy_tokens_are_the_likeliest_by_the_whole_model(model):
    write, params = setting(**model)
    found = program(**model)
    kinds = set()
    for prompt, new in zip(PROMPTS, write(params, PROMPTS, 12, GREEDY), strict=True):
        logits = whole_logits(found, np.array([*prompt, *new]))[len(prompt) - 1 : -1]
        np.testing.assert_array_equal(new, logits.argmax(-1))
        kinds |= set(new.tolist())
    assert len(kinds) > 5, "a model that says one thing shows nothing"


def test_logits_over_the_cache_equal_those_of_the_whole_model():
    write, params = setting()
    prompt = PROMPTS[2]
    tokens = np.array([[0] * 5 + prompt], np.int32)
    cache = write.prefill(64, params, tokens, np.array([5], np.int32))
    expected = whole_logits(program(), np.array([*prompt, 7, 8]))
    run = (write.model, write.layout, write.context, params)
    next_logits = jax.jit(lambda token, cache: decode.read(*run, token, cache))
    for token, row in ((7, expected[-2]), (8, expected[-1])):
        x, cache = next_logits(np.array([[token]]), cache)
        np.testing.assert_allclose(decode.logits(*run, x)[0], row, rtol=2e-5, atol=2e-5)


def test_a_prompt_read_in_parts_gives_the_same_cache(monkeypatch):
    """In fp64: what fp32 rounds away depends on the machine, and these models have large weights."""
    prompts = np.arange(32, dtype=np.int32).reshape(2, 16)
    with wide_types():
        found = program(precision="fp64")
        params = jax.device_put(drawn(found), found.layout.parameters)
        arguments = (64, params, prompts, np.array([0, 6], np.int32))
        whole = generator(found).prefill(*arguments)
        monkeypatch.setattr(decode, "PREFILL_CHUNK", 4)
        parts = generator(found).prefill(*arguments)
        assert parts.length == whole.length == 16 and parts.keys.dtype == np.float64
        for a, b in ((parts.keys, whole.keys), (parts.values, whole.values)):
            np.testing.assert_allclose(a[:, 0], b[:, 0], rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(a[:, 1, 6:], b[:, 1, 6:], rtol=1e-12, atol=1e-12)


# --- meshes ---


@in_place
@pytest.mark.parametrize(
    "layout",
    [
        dict(mesh="tp=2"),
        dict(mesh="tp=4"),
        dict(mesh="dp=2,tp=2", zero=3, sequence_parallel=True),
        dict(mesh="replica=2,dp=2", zero=2),
        dict(mesh="pp=2,dp=2,tp=2", zero=3, virtual_stages=2),
    ],
    ids=lambda layout: f"{layout['mesh']} zero {layout.get('zero', 0)}",
)
def test_text_is_the_same_on_every_mesh(layout):
    one, many = setting(), setting(**layout)
    texts = [write(params, PROMPTS, 8, Sampling(0.8, 20, 0.9), seed=5, eod=11) for write, params in (one, many)]
    for a, b in zip(*texts, strict=True):
        np.testing.assert_array_equal(a, b)


def test_text_under_bf16_follows_the_types_of_training():
    config = replace(program("dp=2,tp=2", 3).config, train=TrainConfig(global_batch=8, precision="bf16"))
    found = build_program(config, jax.devices()[:4])
    params = jax.tree.map(jnp.bfloat16, drawn(found))
    write = generator(found)
    run = (write.model, write.layout, write.context)
    cache = jax.eval_shape(
        functools.partial(decode.prefill, *run, 64), params, np.ones((2, 4), np.int32), np.zeros(2, np.int32)
    )
    x, _ = jax.eval_shape(functools.partial(decode.read, *run), params, np.ones((2, 1), np.int32), cache)
    assert cache.keys.dtype == cache.values.dtype == x.dtype == jnp.bfloat16
    assert jax.eval_shape(functools.partial(decode.logits, *run), params, x).dtype == jnp.float32


def test_cache_lies_on_data_and_model_axes():
    write, params = setting("dp=2,tp=2", 3, True)
    cache = write.prefill(64, params, np.ones((4, 4), np.int32), np.zeros(4, np.int32))
    assert cache.keys.shape == (4, 4, 64, 2, 4)
    assert cache.keys.sharding.shard_shape(cache.keys.shape) == (4, 2, 64, 1, 4)


def test_a_pipeline_mesh_takes_one_layer_at_a_time():
    """No device ever holds the whole stack of any weight."""
    found = program("pp=2,dp=2", 3, n_layers=6)
    tokens, padding = np.ones((2, 8), np.int32), np.zeros(2, np.int32)
    text = generator(found).prefill.lower(64, found.abstract.params, tokens, padding).compile().as_text()
    stacks = {int(layers) for layers in re.findall(r"f32\[(\d+),(?:\d+,)*16(?:,\d+)*\]", text)}
    assert 3 in stacks and 6 not in stacks


def test_one_compilation_for_prompts_of_like_length():
    found = program()
    write, (_, params) = generator(found), setting()
    write(params, [[1, 2, 3, 4, 5, 6]], 4, GREEDY)
    write(params, [[1] * 9], 4, GREEDY, seed=3, eod=5)
    write(params, [[6] * 7], 4, GREEDY)
    assert (write.prefill._cache_size(), write.write._cache_size()) == (1, 1)


# --- ends, seeds, padding ---


def test_a_sample_stops_at_the_end_of_its_document_and_others_go_on():
    write, params = setting()
    free = [new.tolist() for new in write(params, PROMPTS, 12, GREEDY)]
    eod = free[0][4]
    ended = [new.tolist() for new in write(params, PROMPTS, 12, GREEDY, eod=eod)]
    assert ended == [new[: new.index(eod)] if eod in new else new for new in free]
    assert len(ended[0]) == free[0].index(eod) <= 4 and max(map(len, ended)) > len(ended[0])


def test_writing_stops_when_all_samples_have_ended():
    write, params = setting()
    (free,) = write(params, PROMPTS[:1], 12, GREEDY)
    whole = lambda x: jax.device_put(x, write.layout.scalar)
    tokens = np.array([[0] * 12 + PROMPTS[0][:-1]] * 3, np.int32)
    cache = write.prefill(64, params, whole(tokens), whole(np.full(3, 12, np.int32)))
    rest = map(whole, (np.zeros(2, np.uint32), np.array([False, False, True]), free[4]))
    _, cache = write.write(12, GREEDY, params, whole(np.full(3, PROMPTS[0][-1], np.int32)), cache, *rest)
    assert cache.length == 16 + free.tolist().index(free[4]) + 1


def test_draws_depend_on_seed_and_number_of_the_sample_alone():
    write, params = setting()
    draw = lambda count, seed: [a.tolist() for a in write(params, [PROMPTS[0]] * count, 12, Sampling(), seed=seed)]
    assert draw(3, 1)[:2] == draw(2, 1)
    assert draw(2, 1) != draw(2, 2)
    first, second = draw(2, 1)
    assert first != second


def test_padded_ids_are_never_written():
    """At this temperature every id is about as likely as any other, and the padding's own logits are the largest."""
    write, params = setting()
    assert write.model.vocab == 128 > 70
    ids = np.concatenate(write(params, [[1]] * 64, 12, Sampling(temperature=1e4)))
    assert ids.max() < 70 and len(set(ids.tolist())) == 70


# --- prompts ---


@pytest.mark.parametrize(
    "model, prompt, count, message",
    [
        ({}, [1, 70], 1, "token id 70, but the model's vocabulary is 0 to 69"),
        ({}, [-1], 1, "token id -1"),
        ({}, [1] * 65, 1, "the prompt has 65 tokens, more than model.max_seq_len = 64"),
        (GPT2, [1] * 60, 6, "60 tokens and max_new_tokens = 6 go beyond the 64 positions"),
        (GPT2, [1] * 60, 6, "give --max_new_tokens 5"),
    ],
)
def test_a_prompt_that_cannot_be_continued_is_refused_before_compiling(model, prompt, count, message):
    write = generator(program(**model))
    with pytest.raises(InputError, match=re.escape(message)):
        write({}, [[1], prompt], count)
    assert "prefill" not in vars(write)


def test_a_prompt_may_fill_the_model_to_the_last_position():
    write, params = setting(**GPT2_TIED)
    assert room_for(write.model.arch, 21) == 12
    for new in write(params, [np.arange(21)] * 3, 12, GREEDY):
        np.testing.assert_array_equal(new, whole_logits(program(**GPT2_TIED), [*range(21), *new[:-1]])[20:].argmax(-1))
    check_prompts(program().model.arch, [[1] * 64], 1000)  # Rotary positions have no end.


def test_sample_of_the_training_loop_is_cut_to_what_fits():
    """Where the model has 32 positions, and where a text is numbers and so the prompt is none."""
    found = program(**GPT2_TIED)
    texts = sample_text(found, drawn(found), IdTokenizer(), prompt="def ", max_new_tokens=1000, samples=3)
    assert [len(text.split()) for text in texts] == [32, 32, 32]


# --- the command ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run's folder with one checkpoint, step 7, of an interleaved pipeline, which stores its layers shuffled."""
    path = tmp_path_factory.mktemp("run")
    found = program("pp=2,dp=2", 1, virtual_stages=2, vocab_size=257)
    assert found.model.layer_order.tolist() == [0, 2, 1, 3]
    params = jax.device_put(drawn(found), found.layout.parameters)
    only = lambda params: TrainState(None, params, None, None, None, None, None)
    with Checkpoints(path / "checkpoints") as saved:
        padding = dict(axes=only(found.logical_axes.params), sizes=unpadded(found))
        saved.save(7, only(params), run_facts(found), **padding)
    (path / "config.yaml").write_text(run_to_yaml(saved_values(replace(found.config, output=str(path)))))
    return path


def test_command_writes_the_same_on_another_mesh(folder, capsys):
    results = []
    for mesh in ("pp=2,dp=2", "tp=4"):
        options = ["--prompt", "def ", "--max_new_tokens", "6", "--greedy", "--samples", "2", "--mesh", mesh]
        assert run(["generate", "--output", str(folder), "--json", *options]) == 0
        out, err = capsys.readouterr()
        assert "compiling for 2 samples of up to 6 tokens ...\n" in err
        results.append(json.loads(out))
    assert results[0] == results[1]
    assert results[0]["step"] == 7 and results[0]["prompt"] == "def "
    assert [sample["tokens"] for sample in results[0]["samples"]] == [6, 6]
    write, params = setting(vocab_size=257)
    ids = prompt_ids(ByteTokenizer(), "def ")
    assert results[0]["samples"][0]["text"] == continuation(
        ByteTokenizer(), ids, write(params, [ids, ids], 6, GREEDY, eod=256)[0]
    )


@pytest.mark.parametrize(
    "options, message",
    [
        (["--checkpoint", "3"], "--checkpoint 3"),
        (["--prompt", "x" * 65], "the prompt has 65 tokens"),
        (["--temperature", "0"], "--greedy"),
    ],
)
def test_command_refuses_what_it_cannot_do(folder, capsys, options, message):
    assert run(["generate", "--output", str(folder), *options]) == 2
    assert message in capsys.readouterr().err
