"""Text from a model: the prompts are read once, then one token at a time follows from a KV cache.

Two programs are compiled: one reads prompts of a padded length, up to the last token; the other reads that and writes.
Draws depend on the seed, the number of the sample and the place of the token, so a text is the same on every mesh (up
to rounding of the logits).
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxshard.data.tokenizer import IdTokenizer, Tokenizer, started
from jaxshard.errors import InputError
from jaxshard.inference import decode
from jaxshard.inference.sampling import PLAIN, Sampling, choose
from jaxshard.models.layers import Context
from jaxshard.models.presets import Architecture
from jaxshard.models.transformer import Model
from jaxshard.parallel.layout import Layout
from jaxshard.training.program import Program

SLOTS = 64
"""The cache's length is rounded up to a multiple, so that prompts of like length share a compiled program."""
PRNG = "threefry2x32"
"""Its bits at an index depend on key and index alone, whatever the mesh."""


@dataclass(frozen=True, eq=False)
class Generator:
    """Writes with a model on a layout; what it compiles is kept for further calls.

    Attributes:
        model: what is computed.
        layout: where the parameters lie.
        context: how activations are computed and constrained.
    """

    model: Model
    layout: Layout
    context: Context

    @cached_property
    def prefill(self):
        """(slots, params, tokens [B, P], padding [B]) -> cache."""

        def read_prompts(slots, params, tokens, padding):
            return decode.prefill(self.model, self.layout, self.context, slots, params, tokens, padding)

        return jax.jit(read_prompts, static_argnums=0)

    @cached_property
    def write(self):
        """(count, sampling, params, last [B], cache, seed, done [B], eod) -> (tokens [B, count], cache)."""

        def write_tokens(count, sampling, *arguments):
            return self._write(count, sampling, *arguments)

        # The cache is donated, and returned only so that it can be: then it is updated in place.
        return jax.jit(write_tokens, static_argnums=(0, 1), donate_argnums=4)

    def _write(self, count: int, sampling: Sampling, params, last_B, cache, seed, done_B, eod):
        """Reads the last token of each sequence and chooses the next, until all are done or `count` are written."""
        run = (self.model, self.layout, self.context, params)
        row_key = partial(jax.random.fold_in, jax.random.wrap_key_data(seed, impl=PRNG))
        keys_B = jax.vmap(row_key)(jnp.arange(last_B.shape[0], dtype=jnp.uint32))

        def more(carry):
            i, _, done, _, _ = carry
            return (i < count) & ~done.all()

        def body(carry):
            i, last, done, tokens, cache = carry
            x, cache = decode.read(*run, last[:, None], cache)
            chosen = choose(decode.logits(*run, x), jax.vmap(lambda key: jax.random.fold_in(key, i))(keys_B), sampling)
            tokens = jax.lax.dynamic_update_slice(tokens, jnp.where(done, eod, chosen)[:, None], (0 * i, i))
            done = done | (chosen == eod)
            # What a finished sequence reads does not matter; 0 is a token.
            return i + 1, jnp.where(done, 0, chosen), done, tokens, cache

        tokens = jnp.full((last_B.shape[0], count), eod, jnp.int32)
        start = (jnp.zeros((), jnp.int32), last_B, done_B, tokens, cache)
        _, _, _, tokens, cache = jax.lax.while_loop(more, body, start)
        return jax.lax.with_sharding_constraint(tokens, self.layout.scalar), cache

    def __call__(
        self,
        params: Any,
        prompts: Sequence[Sequence[int] | np.ndarray],
        max_new_tokens: int,
        sampling: Sampling = PLAIN,
        seed: int = 0,
        eod: int | None = None,
    ) -> list[np.ndarray]:
        """Continues each prompt; returns the new ids of each, int32, without the end-of-document token.

        Args:
            params: parameters as training stores them.
            prompts: token ids, at least one each; of any lengths.
            max_new_tokens: most tokens that are written.
            sampling: how tokens are chosen.
            seed: of the draws.
            eod: id at which a sequence ends, or None.

        Raises:
            InputError: an id is not in the vocabulary, or the model does not reach so far; see `check_prompts`.
        """
        check_prompts(self.model.arch, prompts, max_new_tokens)
        # Rows that are not asked for fill up the data axes, so that the batch always splits; they are done at once.
        ways = self.layout.groups
        rows = -(-len(prompts) // ways) * ways
        length = _power_of_two(max(len(prompt) for prompt in prompts) - 1)
        tokens, padding = np.zeros((rows, length), np.int32), np.full(rows, length, np.int32)
        last = np.zeros(rows, np.int32)
        for row, (*before, last[row]) in enumerate(prompts):
            padding[row] -= len(before)
            tokens[row, padding[row] :] = before
        slots = -(-(length + max_new_tokens) // SLOTS) * SLOTS
        whole = partial(jax.device_put, device=self.layout.scalar)
        cache = self.prefill(slots, params, whole(tokens), whole(padding))
        rest = map(whole, (_seed_bits(seed), np.arange(rows) >= len(prompts), np.int32(-1 if eod is None else eod)))
        written, _ = self.write(max_new_tokens, sampling, params, whole(last), cache, *rest)
        return [_until(row, eod) for row in np.asarray(written)[: len(prompts)]]


def _power_of_two(n: int) -> int:
    """The smallest power of two that is n or more, and at least 1."""
    return 1 << max(n - 1, 0).bit_length()


def _seed_bits(seed: int) -> np.ndarray:
    """The seed of all draws, apart from those of initial weights and dropout."""
    root = jax.random.fold_in(jax.random.key(seed, impl=PRNG), zlib.crc32(b"generate"))
    return np.asarray(jax.random.key_data(root))


def _until(ids: np.ndarray, eod: int | None) -> np.ndarray:
    ends = np.flatnonzero(ids == (-1 if eod is None else eod))
    return ids[: ends[0]] if ends.size else ids


def check_prompts(arch: Architecture, prompts: Sequence[Sequence[int] | np.ndarray], max_new_tokens: int) -> None:
    """Refuses what the model cannot continue, before anything is compiled.

    Rotary positions go on beyond `max_seq_len`, though the model has not learnt them; learned positions end there.

    Raises:
        InputError: an id outside the vocabulary, a prompt longer than the model's longest sequence, or more tokens than
            it has learned positions.
    """
    assert prompts and max_new_tokens > 0 and all(len(prompt) for prompt in prompts), "an empty prompt"
    for prompt in prompts:
        ids = np.asarray(prompt)
        wrong = ids[(ids < 0) | (ids >= arch.vocab_size)]
        if len(wrong):
            raise InputError(
                f"the prompt has the token id {wrong[0]}, but the model's vocabulary is 0 to {arch.vocab_size - 1:,}: "
                "write the prompt with the model's own tokenizer (data.tokenizer)"
            )
        if len(ids) > arch.max_seq_len:
            raise InputError(
                f"the prompt has {len(ids):,} tokens, more than model.max_seq_len = {arch.max_seq_len:,}; shorten it"
            )
        room = room_for(arch, len(ids))
        if arch.family == "gpt2" and max_new_tokens > room:
            raise InputError(
                f"a prompt of {len(ids):,} tokens and max_new_tokens = {max_new_tokens:,} go beyond the "
                f"{arch.max_seq_len:,} positions that the model has learned (model.max_seq_len); "
                f"give --max_new_tokens {room}"
            )


def room_for(arch: Architecture, prompt_length: int) -> int:
    """New tokens that fit behind a prompt; the last one is not read again and so needs no position."""
    return arch.max_seq_len - prompt_length + 1


def prompt_ids(tokenizer: Tokenizer, prompt: str) -> np.ndarray:
    """Ids to continue, at least one: the tokenizer's start and the prompt; else its end of document; else 0."""
    ids = started(tokenizer, tokenizer.encode(prompt)).astype(np.int32)
    return ids if len(ids) else np.array([tokenizer.eod or 0], np.int32)


def generator(program: Program) -> Generator:
    """The generator of a run's program."""
    layout = replace(program.layout, apart=())
    plain = program.recipe.context.without_dropout()
    return Generator(program.model, layout, replace(plain, shard=layout.shard, groups=layout.groups, vmapped=False))


def sample_text(
    program: Program,
    params: Any,
    tokenizer: Tokenizer,
    prompt: str = "",
    *,
    max_new_tokens: int = 120,
    samples: int = 1,
    sampling: Sampling = PLAIN,
) -> list[str]:
    """Returns texts that go on from the prompt (included).

    Nothing is refused: more tokens than the model has room for are cut down, and where text is token ids the prompt is
    left out.
    """
    arch = program.model.arch
    prompt = "" if isinstance(tokenizer, IdTokenizer) else prompt
    ids = prompt_ids(tokenizer, prompt)[: arch.max_seq_len]
    count = min(max_new_tokens, room_for(arch, len(ids)))
    written = generator(program)(params, [ids] * samples, count, sampling, program.config.train.seed, tokenizer.eod)
    return [prompt + continuation(tokenizer, ids, new) for new in written]


def continuation(tokenizer: Tokenizer, ids: np.ndarray, new: np.ndarray) -> str:
    """Text of new ids. They are decoded behind the prompt, since spaces and split characters depend on it."""
    before, both = tokenizer.decode(ids), tokenizer.decode(np.concatenate([ids, new]))
    return both[len(before) :] if both.startswith(before) else tokenizer.decode(new)
