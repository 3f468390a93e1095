"""Whether ZeRO can split the state of a model over the data axis of a mesh."""

from dataclasses import replace
from functools import lru_cache

import jax.numpy as jnp

from jaxshard.analysis.state_bytes import padded, table_of
from jaxshard.config import OptimConfig
from jaxshard.errors import InputError
from jaxshard.models.presets import Architecture
from jaxshard.parallel.axes import MeshShape
from jaxshard.parallel.precision import POLICIES
from jaxshard.parallel.rules import Held, check_replicated, replicated


@lru_cache(maxsize=4096)
def unsharded(
    arch: Architecture, optim: OptimConfig, precision: str, shape: MeshShape, zero: int, allowed: tuple[str, ...]
) -> str | None:
    """What `check_replicated` says of a state, or None; the same as a run says that is built on the mesh."""
    table, policy = table_of(arch, optim, precision), POLICIES[precision]
    held = lambda kind, row: Held(row.path, kind, padded(row, shape), row.axes, row.itemsize)
    parameters = [held("parameters", row) for row in table.weights]
    wide = jnp.dtype(policy.gradients).itemsize
    masters = [replace(weight, kind="optimizer", itemsize=wide) for weight in parameters] if policy.masters else []
    arrays = parameters + masters + [held("optimizer", row) for row in table.moments]
    try:
        check_replicated(replicated(arrays, shape, zero), sum(array.bytes for array in arrays), allowed)
    except InputError as error:
        return str(error)
    return None
