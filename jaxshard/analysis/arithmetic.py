"""Arithmetic of a model: FLOPs per token of training, and the share of the chips' peak that they use (MFU)."""

from typing import Any

from jaxshard.models.presets import Architecture


def matmul_parameters(arch: Architecture) -> int:
    """Parameters that a token is multiplied with: blocks and head; the embedding is a lookup.

    L (2 D Dh (H + K) + 2 D F, or 3 D F with a gate) + V D. Biases, norms and positions multiply nothing worth counting.
    """
    D = arch.d_model
    attention = 2 * D * arch.head_dim * (arch.n_heads + arch.n_kv_heads)
    mlp = (3 if arch.family == "llama" else 2) * D * arch.d_ff
    return arch.n_layers * (attention + mlp) + arch.vocab_size * D


def flops_per_token(arch: Architecture, seq_len: int, causal: bool = True) -> float:
    """FLOPs of forward and backward pass per token: 6 x matmul parameters + 12 L H Dh T, attention halved when causal.

    A parameter costs a multiply and an add forward and two of each backward; scores and their use cost
    2 x 2 H Dh T forward (Chowdhery et al. 2022, PaLM, appendix B, with full attention). A causal token sees (T + 1) / 2
    others in the mean. Recomputation does not count. MaxText reports causal, torchtitan and Megatron-LM full attention.
    """
    seen = (seq_len + 1) / 2 if causal else seq_len
    return 6 * matmul_parameters(arch) + 12 * arch.n_layers * arch.n_heads * arch.head_dim * seen


def mfu(arch: Architecture, seq_len: int, tokens_per_second: Any, peak_flops: float, causal: bool = True) -> Any:
    """Model FLOPs utilisation: the model's own arithmetic over the peak of all devices together."""
    return tokens_per_second * flops_per_token(arch, seq_len, causal) / peak_flops
