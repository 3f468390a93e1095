"""Number types: what is stored, what is computed in, and the dynamic loss scale of fp16.

| policy    | parameters | fp32 masters | compute | gradients | moments |
|-----------|------------|--------------|---------|-----------|---------|
| fp32      | fp32       |              | fp32    | fp32      | fp32    |
| bf16      | bf16       | yes          | bf16    | fp32      | fp32    |
| fp16      | fp16       | yes          | fp16    | fp32      | fp32    |
| pure-bf16 | bf16       |              | bf16    | fp32      | bf16    |
| fp64      | fp64       |              | fp64    | fp64      | fp64    |

Softmax, norm statistics, loss and every gradient reduction are in fp32 or wider under every policy.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Policy:
    """Types of each class of state.

    Attributes:
        parameters: what the devices compute from.
        compute: activations and matmul inputs.
        gradients: accumulation and reduction.
        masters: whether a copy of the parameters in the gradients' type stands beside the moments.
        scaled: whether the loss is scaled (fp16).
    """

    name: str
    parameters: Any
    compute: Any
    gradients: Any = jnp.float32
    masters: bool = False
    scaled: bool = False

    @property
    def moments(self) -> Any:
        return self.gradients if self.masters else self.parameters

    def describe(self) -> str:
        """One line that names the type of each class of state."""
        short = lambda dtype: jnp.dtype(dtype).name
        masters = short(self.gradients) if self.masters else "none"
        return (
            f"parameters {short(self.parameters)}, masters {masters}, moments {short(self.moments)}, "
            f"gradients {short(self.gradients)}, compute {short(self.compute)}"
        )


POLICIES: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        Policy("fp32", jnp.float32, jnp.float32),
        Policy("bf16", jnp.bfloat16, jnp.bfloat16, masters=True),
        Policy("fp16", jnp.float16, jnp.float16, masters=True, scaled=True),
        Policy("pure-bf16", jnp.bfloat16, jnp.bfloat16),
        Policy("fp64", jnp.float64, jnp.float64, jnp.float64),
    )
}


class LossScale(NamedTuple):
    """Dynamic loss scale (Micikevicius et al. 2018, section 3.2): fp32 scale, int32 good updates in a row."""

    scale: jax.Array
    good: jax.Array


SMALLEST_SCALE = 1.0


def next_loss_scale(state: LossScale, finite: jax.Array, interval: int) -> LossScale:
    """Halves the scale on overflow (never below 1), doubles it after `interval` good updates in a row.

    Args:
        state: current scale.
        finite: bool, whether the unscaled global gradient was finite.
        interval: good updates before the scale doubles.
    """
    good = jnp.where(finite, state.good + 1, 0)
    grow = good >= interval
    # Doubling stops where the scale itself would overflow fp32's exponent range by a wide margin.
    larger = jnp.minimum(state.scale * 2, 2.0**32)
    scale = jnp.where(finite, jnp.where(grow, larger, state.scale), jnp.maximum(state.scale / 2, SMALLEST_SCALE))
    return LossScale(scale, jnp.where(grow, 0, good).astype(jnp.int32))
