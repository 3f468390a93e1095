"""The share of a GPU's memory that jax's pool may take, and how a command asks for it: the one place of this rule.

A step lives in the pool that jax takes when it starts. Outside it lie CUDA's context and kernels, and NCCL's buffers (4
MiB for each channel and peer: NCCL_BUFFSIZE), whose sum no document states for a mesh; so the reserve is the share that
NVIDIA leaves free in its own runs.
"""

VARIABLE = "XLA_PYTHON_CLIENT_MEM_FRACTION"
DEFAULT = 0.75
"""Share of a GPU's memory that jax takes where nothing is said (docs.jax.dev, GPU memory allocation)."""
MOST = 0.9
"""Largest share that is asked for: "we typically set it to 0.9 or 0.8", the rest being for NVIDIA's libraries and the
framework (docs.nvidia.com/jax-toolbox, Tips for High-Performance LLMs with JAX and XLA)."""


def pool_bytes(memory: int, share: float = MOST) -> int:
    """Bytes of a GPU that a program may use.

    Args:
        memory: bytes of the GPU.
        share: of the pool.
    """
    return int(memory * share)


def setting(platform: str, memory: int, peak: float) -> str:
    """What stands before the command of a step: "env XLA_PYTHON_CLIENT_MEM_FRACTION=0.9 " where jax's own share is too
    little, or nothing.

    Args:
        platform: of the device; only GPUs have such a pool.
        memory: bytes of the device.
        peak: bytes that the step takes.
    """
    return f"env {VARIABLE}={MOST:g} " if platform == "gpu" and peak > pool_bytes(memory, DEFAULT) else ""
