"""Products with weights whose gradients are summed in the weight's type, and where gradients are brought together.

Shapes: B batch, T sequence, D model width.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxshard.names import INPUT_GRAD, WEIGHT_GRAD


def einsum(spec: str, x: jax.Array, w: jax.Array) -> jax.Array:
    """`jnp.einsum` in the type of x, whose gradient for w is summed and returned in the type of w.

    A weight arrives in fp32 (or wider) whatever the compute type, so the sum over tokens, and with it the reduction
    over the data axis, happens in fp32 also when activations are 16 bit wide.
    """
    return _einsum(spec, x, w)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _einsum(spec: str, x: jax.Array, w: jax.Array) -> Any:
    return jnp.einsum(spec, x, w.astype(x.dtype))


def _einsum_forward(spec, x, w):
    return _einsum(spec, x, w), (x, w)


def _einsum_backward(spec, saved, dy):
    x, w = saved
    inputs, out = spec.split("->")
    left, right = inputs.split(",")
    with jax.named_scope(INPUT_GRAD):
        dx = jnp.einsum(f"{out},{right}->{left}", dy, w.astype(dy.dtype))
    with jax.named_scope(WEIGHT_GRAD):
        dw = jnp.einsum(f"{left},{out}->{right}", x, dy, preferred_element_type=w.dtype)
    return dx, dw


_einsum.defvjp(_einsum_forward, _einsum_backward)


def add_bias(x: jax.Array, bias: jax.Array) -> jax.Array:
    """Adds a bias in the bias's type, so that its gradient is summed there too."""
    return (x.astype(bias.dtype) + bias).astype(x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def whole_gradient(shard: Callable[..., jax.Array], axes: tuple[str, ...], y: jax.Array) -> jax.Array:
    """Identity; the gradient is brought into a layout here, once, for all that read it afterwards."""
    return y


whole_gradient.defvjp(lambda shard, axes, y: (y, None), lambda shard, axes, _, dy: (shard(dy, axes),))


def sum_groups(x_Gx: jax.Array) -> jax.Array:
    """Sums over the leading dim of data groups.

    Written as a product: of a product's partial sums a compiler scatters those over `data` and reduces only the parts
    over `replica`; of a plain sum over both axes it reduces the whole.
    """
    if x_Gx.shape[0] == 1:
        return x_Gx[0]
    ones = jnp.ones(x_Gx.shape[:1], x_Gx.dtype)
    return jnp.tensordot(ones, x_Gx, 1, precision=jax.lax.Precision.HIGHEST)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def repeat_heads(k_BxTxKxE: jax.Array, each: int) -> Any:
    """Every head `each` times: [B, T, each K, E].

    The gradient is summed as a product over all heads. Where the copies of one head lie on several devices, and a
    device has copies of several, a compiler gathers the gradients of all copies for a plain sum; of a product it sums
    the parts, which are `each` times smaller.
    """
    return jnp.repeat(k_BxTxKxE, each, axis=2)


def _repeat_heads_backward(each: int, _: None, dy_BxTxHxE: jax.Array) -> tuple[jax.Array]:
    H = dy_BxTxHxE.shape[2]
    of_HxK = jnp.repeat(jnp.eye(H // each, dtype=dy_BxTxHxE.dtype), each, axis=0)
    return (jnp.einsum("bthe,hk->btke", dy_BxTxHxE, of_HxK, precision=jax.lax.Precision.HIGHEST),)


repeat_heads.defvjp(lambda k_BxTxKxE, each: (repeat_heads(k_BxTxKxE, each), None), _repeat_heads_backward)
