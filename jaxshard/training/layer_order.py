"""Checkpoints hold the layers as their run stored them; another pipeline stores them in another order."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxshard.models.transformer import dealt_order


def in_layer_order(tree: Any, axes: Any, layers: int, saved: Sequence[int], wanted: Sequence[int]) -> Any:
    """Reorders stacked layers from the order in which a checkpoint holds them to the order of another run.

    Args:
        tree: arrays, placed as the new run places them; they are donated.
        axes: tree like it of tuples of logical axes.
        layers: number of layers.
        saved, wanted: `Model.dealt` of the two runs.
    """
    order = np.argsort(dealt_order(layers, saved))[dealt_order(layers, wanted)]
    if np.array_equal(order, np.arange(layers)):
        return tree
    leaves, structure = jax.tree.flatten(tree)
    names = structure.flatten_up_to(axes)
    move = lambda a, logical: _move(a, logical.index("layers"), order) if "layers" in logical else a
    return structure.unflatten([move(a, logical) for a, logical in zip(leaves, names, strict=True)])


def _move(a: jax.Array, dim: int, order: np.ndarray) -> jax.Array:
    """Takes one array's layers in another order, one array at a time, wherever it lies."""

    def take(a):
        # What waits in host memory passes through the device.
        return jnp.take(jax.device_put(a, jax.memory.Space.Device), order, axis=dim)

    return jax.jit(take, out_shardings=a.sharding, donate_argnums=0)(a)
