"""Named model sizes, and the complete description of a model that everything else reads."""

import math
from dataclasses import dataclass, fields

from jaxshard.config import ModelConfig
from jaxshard.errors import InputError, nearest


@dataclass(frozen=True)
class Architecture:
    """A model, complete; the fields are those of `ModelConfig` with nothing left open."""

    family: str
    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_ff: int
    max_seq_len: int
    tie_embeddings: bool
    head_dim: int
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: str = "none"
    rope_factor: float = 1.0
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    rope_original_max: int = 8192
    dropout: float = 0.0
    attention: str = "auto"
    init_std: float = 0.02
    """Standard deviation of the initial weights (GPT-2, Radford et al. 2019; residual outputs get it / sqrt(2 L))."""

    @property
    def parameters(self) -> int:
        """Number of parameters, the padding of the vocabulary left out."""
        D, F, E = self.d_model, self.d_ff, self.head_dim
        attention = D * E * (2 * self.n_heads + 2 * self.n_kv_heads)
        if self.family == "gpt2":
            block = attention + E * (self.n_heads + 2 * self.n_kv_heads) + D + 2 * D * F + F + D + 4 * D
            rest = self.max_seq_len * D + 2 * D
        else:
            block, rest = attention + 3 * D * F + 2 * D, D
        return self.n_layers * block + rest + self.vocab_size * D * (1 if self.tie_embeddings else 2)


def _gpt2(d_model: int, n_layers: int, n_heads: int, vocab_size: int = 50257, max_seq_len: int = 1024) -> dict:
    return dict(
        family="gpt2", vocab_size=vocab_size, d_model=d_model, n_layers=n_layers, n_heads=n_heads, n_kv_heads=n_heads,
        d_ff=4 * d_model, max_seq_len=max_seq_len, tie_embeddings=True,
    )  # fmt: skip


def _llama(
    vocab_size: int, d_model: int, n_layers: int, n_heads: int, n_kv_heads: int, d_ff: int, max_seq_len: int, **more
) -> dict:
    return dict(
        family="llama", vocab_size=vocab_size, d_model=d_model, n_layers=n_layers, n_heads=n_heads,
        n_kv_heads=n_kv_heads, d_ff=d_ff, max_seq_len=max_seq_len, tie_embeddings=False,
    ) | more  # fmt: skip


_LLAMA31 = dict(
    norm_eps=1e-5, rope_theta=500000.0, rope_scaling="llama3", rope_factor=8.0, rope_low_freq_factor=1.0,
    rope_high_freq_factor=4.0, rope_original_max=8192,
)  # fmt: skip

_LLAMA32 = _LLAMA31 | dict(tie_embeddings=True, rope_factor=32.0)

PRESETS: dict[str, dict] = {
    # Toys, for byte tokens.
    "toy-1m": _llama(257, 128, 4, 4, 4, 384, 1024, tie_embeddings=True),
    "toy-3m": _llama(257, 192, 6, 6, 6, 576, 1024, tie_embeddings=True),
    "toy-gpt2-1m": _gpt2(128, 4, 4, 257),
    "toy-10m": _gpt2(384, 6, 6, 257, 256),
    # GPT-2 (Radford et al. 2019; totals as in the released weights).
    "gpt2-124m": _gpt2(768, 12, 12),
    "gpt2-355m": _gpt2(1024, 24, 16),
    "gpt2-774m": _gpt2(1280, 36, 20),
    "gpt2-1.5b": _gpt2(1600, 48, 25),
    # Llama (Touvron et al. 2023; Grattafiori et al. 2024; configurations of the released weights).
    "tinyllama-1.1b": _llama(32000, 2048, 22, 32, 4, 5632, 2048),
    "llama3.2-1b": _llama(128256, 2048, 16, 32, 8, 8192, 131072, **_LLAMA32),
    "llama3.2-3b": _llama(128256, 3072, 28, 24, 8, 8192, 131072, **_LLAMA32 | dict(head_dim=128)),
    "llama2-7b": _llama(32000, 4096, 32, 32, 32, 11008, 4096),
    "llama2-13b": _llama(32000, 5120, 40, 40, 40, 13824, 4096),
    "llama2-70b": _llama(32000, 8192, 80, 64, 8, 28672, 4096),
    "llama3-8b": _llama(128256, 4096, 32, 32, 8, 14336, 8192, rope_theta=500000.0),
    "llama3-70b": _llama(128256, 8192, 80, 64, 8, 28672, 8192, rope_theta=500000.0),
    "llama3.1-8b": _llama(128256, 4096, 32, 32, 8, 14336, 131072, **_LLAMA31),
    "llama3.1-70b": _llama(128256, 8192, 80, 64, 8, 28672, 131072, **_LLAMA31),
}  # fmt: skip

DEFAULT_PRESET = "toy-1m"


def architecture(model: ModelConfig, tokenizer_size: int | None = None, seq_len: int | None = None) -> Architecture:
    """Completes a model description: preset, then the given fields, then what follows from them.

    Args:
        model: as configured.
        tokenizer_size: vocabulary of the tokenizer, taken when neither preset nor field says otherwise.
        seq_len: training length, which `max_seq_len` must cover.

    Raises:
        InputError: unknown preset, fields missing, heads that do not divide, sequence longer than the model allows.
    """
    given = {f.name: getattr(model, f.name) for f in fields(model) if f.name != "preset"}
    given = {name: value for name, value in given.items() if value is not None}
    preset = model.preset
    if preset is None and "d_model" not in given:
        preset = DEFAULT_PRESET
    if preset is not None and preset not in PRESETS:
        raise InputError(f"model.preset {preset!r} is not known{nearest(preset, PRESETS)}; known: {', '.join(PRESETS)}")
    if preset is None:
        given.setdefault("family", "llama")
        given.setdefault("tie_embeddings", given["family"] == "gpt2")
        missing = [name for name in ("n_layers", "n_heads") if name not in given]
        if missing:
            raise InputError(f"model.{missing[0]} is missing: give it, or start from a preset (--model.preset)")
        if "vocab_size" not in given and tokenizer_size is None:
            raise InputError("model.vocab_size is missing: give it, or start from a preset (--model.preset)")
        given.setdefault("vocab_size", tokenizer_size)
        given.setdefault("max_seq_len", max(seq_len or 0, 1024))
    base = _without_unread(PRESETS[preset] if preset else {}, given)
    return _complete(base | given, set(given), seq_len)


_SCALED = ("rope_factor", "rope_low_freq_factor", "rope_high_freq_factor", "rope_original_max")
"""Fields that only a rope_scaling reads."""


def _without_unread(base: dict, given: dict) -> dict:
    """A preset without the fields of rotary positions that nothing reads; refuses those that are given."""
    values = base | given
    if values["family"] == "gpt2":
        unread, why = ("rope_theta", "rope_scaling", *_SCALED), "gpt2 has learned positions"
    elif values.get("rope_scaling", "none") == "none":
        unread, why = _SCALED, "model.rope_scaling is none"
    else:
        return base
    for name in unread:
        if given.get(name, default := getattr(Architecture, name)) != default:
            raise InputError(f"model.{name} = {given[name]} changes nothing: {why}; leave it out")
    return {name: value for name, value in base.items() if name not in unread}


def _complete(values: dict, given: set[str], seq_len: int | None) -> Architecture:
    D, H = values["d_model"], values["n_heads"]
    if "n_kv_heads" not in given and ("n_heads" in given or "n_kv_heads" not in values):
        values["n_kv_heads"] = H
    K = values["n_kv_heads"]
    if H % K:
        raise InputError(
            f"model.n_heads = {H} does not divide by model.n_kv_heads = {K}; try n_kv_heads = {math.gcd(H, K)}"
        )
    if "head_dim" not in given and ("d_model" in given or "n_heads" in given or "head_dim" not in values):
        if D % H:
            near = next(n for n in range(H, 0, -1) if D % n == 0)
            raise InputError(
                f"model.d_model = {D} does not divide by model.n_heads = {H}; try n_heads = {near} or give head_dim"
            )
        values["head_dim"] = D // H
    if "d_ff" not in given and ("d_model" in given or "d_ff" not in values):
        # Llama's MLP has three matrices, so 8/3 D rounded up keeps the size of GPT-2's 4 D (Shazeer 2020).
        values["d_ff"] = 4 * D if values["family"] == "gpt2" else 64 * math.ceil(8 * D / 3 / 64)
    if values["family"] == "llama" and values["head_dim"] % 2:
        raise InputError(
            f"model.head_dim = {values['head_dim']} is odd: rotary positions turn pairs; choose an even number"
        )
    if seq_len is not None and seq_len > values["max_seq_len"]:
        raise InputError(
            f"data.seq_len = {seq_len} is longer than the model's max_seq_len = {values['max_seq_len']}; "
            f"shorten it or give --model.max_seq_len {seq_len}"
        )
    return Architecture(**values)
