"""From logits to a token: temperature, top-k, top-p, in this order, as pure functions.

Shapes: B sequences, V vocabulary (its padding left out).
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen.

    Attributes:
        temperature: divides the logits.
        top_k: draw from the k likeliest tokens only; 0 from all.
        top_p: draw from the smallest set of likeliest tokens whose probabilities, after temperature and top-k, sum to
            at least this (nucleus sampling, Holtzman et al. 2020).
        greedy: take the likeliest token; the other fields do not matter then.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    greedy: bool = False

    def __post_init__(self):
        assert self.temperature > 0 and self.top_k >= 0 and 0 < self.top_p <= 1, self


PLAIN = Sampling()
"""Draws from the model's own distribution."""


def choose(logits_BxV: jax.Array, keys_B: jax.Array, sampling: Sampling) -> jax.Array:
    """Returns one token a sequence, int32 [B]; a draw depends on its key and its logits only.

    Args:
        logits_BxV: of the next token.
        keys_B: one PRNG key a sequence, not used before.
        sampling: how to choose. Of equal logits the lower id is the likelier.
    """
    if sampling.greedy:
        return jnp.argmax(logits_BxV, -1).astype(jnp.int32)
    logits = restrict(logits_BxV.astype(jnp.float32) / sampling.temperature, sampling)
    # Gumbel noise goes with the token's id, not with its rank: where rounding swaps two near ranks, nothing changes.
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:], jnp.float32))(keys_B)
    return jnp.argmax(logits + noise, -1).astype(jnp.int32)


def restrict(logits_BxV: jax.Array, sampling: Sampling) -> jax.Array:
    """Sets the logits that top-k and top-p leave out to -inf. The likeliest token always stays."""
    if sampling.top_k == 0 and sampling.top_p == 1:
        return logits_BxV
    ranks = jnp.arange(logits_BxV.shape[-1])
    count = sampling.top_k or logits_BxV.shape[-1]

    def one(logits_V):
        order = jnp.argsort(logits_V, descending=True, stable=True)
        keep = ranks < count
        if sampling.top_p < 1:
            share = jax.nn.softmax(jnp.where(keep, logits_V[order], -jnp.inf))
            keep &= jnp.cumsum(share) - share < sampling.top_p
        return jnp.where(jnp.zeros_like(keep).at[order].set(keep), logits_V, -jnp.inf)

    return jax.vmap(one)(logits_BxV)
