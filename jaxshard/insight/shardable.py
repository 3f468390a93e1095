"""Whether ZeRO can split the state of a model over the data axis of a mesh."""

import math
from functools import lru_cache

from jaxshard.config import OptimConfig
from jaxshard.errors import InputError
from jaxshard.insight.state_bytes import table_of
from jaxshard.models.presets import Architecture
from jaxshard.models.transformer import describe, padded_vocab
from jaxshard.parallel.mesh import MeshShape
from jaxshard.parallel.rules import check_replicated, replicated
from jaxshard.training.program import weight_paths


@lru_cache(maxsize=4096)
def unsharded(
    arch: Architecture, optim: OptimConfig, precision: str, shape: MeshShape, allowed: tuple[str, ...]
) -> str | None:
    """What `check_replicated` says, or None."""
    found, total = [], 0
    ways = shape.stage * shape.model
    for path, row in zip(_paths(arch), table_of(arch, optim, precision).weights, strict=True):
        sizes = [padded_vocab(n, ways) if a == "vocab" else n for n, a in zip(row.shape, row.axes, strict=True)]
        found += replicated(path, sizes, row.axes, shape, 1, row.itemsize)
        total += row.itemsize * math.prod(sizes)
    try:
        check_replicated(found, total, allowed)
    except InputError as error:
        return str(error)
    return None


@lru_cache(maxsize=32)
def _paths(arch: Architecture) -> list[str]:
    return weight_paths(describe(arch).weights)
