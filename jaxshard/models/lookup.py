"""Rows of a table by number, for tables that are split by rows over devices: the embedding and its gradient.

Left to itself the compiler picks how a split table is read and, worse, how its gradient is scattered: it may gather the
table, or every device's activations. Here both are sums over an explicit dim, so that exactly these travel: the rows
[B, T, D], once, in the compute type; and the gradient [V, D], summed over the data groups as any other weight's.

Shapes: B batch, T sequence, D model width, V rows, P parts that the rows are split into, G data groups.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxshard.models.products import sum_groups
from jaxshard.names import WEIGHT_GRAD


@dataclass(frozen=True, eq=False)
class LookupSpec:
    """How a table is read.

    Attributes:
        parts: parts that the rows are split into.
        groups: data groups; each sums its own gradient, reduced once at the end.
        dtype: type of the result.
        shard: constrains an array by logical axes.
    """

    parts: int
    groups: int
    dtype: Any
    shard: Callable[..., jax.Array]


def lookup(spec: LookupSpec, table_VxD: jax.Array, ids_BxT: jax.Array) -> jax.Array:
    """Returns rows [B, T, D] of the table in `spec.dtype`; the gradient is summed in the table's type."""
    return _lookup(spec, table_VxD, ids_BxT)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _lookup(spec: LookupSpec, table_VxD: jax.Array, ids_BxT: jax.Array) -> Any:
    V, D = table_VxD.shape
    table = table_VxD.astype(spec.dtype)
    if spec.parts == 1:
        return jnp.take(table, ids_BxT, axis=0, mode="clip")
    parts_PxRxD = spec.shard(table.reshape(spec.parts, V // spec.parts, D), ("vocab", None, "embed"))
    ids_PxBxT = _local(spec, ids_BxT, V)
    rows = jax.vmap(lambda part, ids: jnp.take(part, ids, axis=0, mode="clip"))(parts_PxRxD, ids_PxBxT)
    mine = (ids_PxBxT >= 0) & (ids_PxBxT < V // spec.parts)
    rows = spec.shard(jnp.where(mine[..., None], rows, 0), ("vocab", "batch", "sequence", "embed"))
    # One summand is not zero, so the sum is exact in any type; `jnp.sum` would widen what travels.
    return jax.lax.reduce(rows, jnp.zeros((), rows.dtype), jax.lax.add, (0,))


def _local(spec: LookupSpec, ids: jax.Array, V: int) -> jax.Array:
    """Row numbers within every part [P, ...]; out of range where the row is another part's."""
    each = V // spec.parts
    first = jnp.arange(spec.parts, dtype=ids.dtype) * each
    return ids[None] - first.reshape(-1, *[1] * ids.ndim)


def _forward(spec, table, ids):
    return _lookup(spec, table, ids), (ids, jnp.zeros((table.shape[0], 0), table.dtype))


def _backward(spec, saved, dy_BxTxD):
    ids_BxT, like_Vx0 = saved
    V, dtype = like_Vx0.shape[0], like_Vx0.dtype
    B, _, D = dy_BxTxD.shape
    dy = spec.shard(dy_BxTxD, ("batch", "sequence", "embed")).astype(dtype)
    split = lambda a: a.reshape(spec.groups, B // spec.groups, *a.shape[1:])
    ids_PxGxbxT = _local(spec, split(ids_BxT), V)
    each = V // spec.parts
    # A row of another part is dropped; below zero it would count from the end.
    ids_PxGxbxT = jnp.where(ids_PxGxbxT < 0, each, ids_PxGxbxT)
    add = lambda ids, dy: jnp.zeros((each, D), dtype).at[ids].add(dy, mode="drop")
    of_group = jax.vmap(jax.vmap(add, in_axes=(0, None)), in_axes=(1, 0))
    with jax.named_scope(WEIGHT_GRAD):
        sums_GxPxRxD = spec.shard(of_group(ids_PxGxbxT, split(dy)), ("batch", "vocab", None, "embed"))
        return sum_groups(sums_GxPxRxD).reshape(V, D), None


_lookup.defvjp(_forward, _backward)
