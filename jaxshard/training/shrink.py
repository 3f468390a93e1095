"""A configuration made small enough to compute twice in fp64, with everything kept that decides how it is sharded."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import islice
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxshard.config import Config, ModelConfig, ParallelConfig, TrainConfig
from jaxshard.models.presets import Architecture
from jaxshard.models.transformer import describe, padded_vocab
from jaxshard.parallel.axes import MeshShape
from jaxshard.parallel.resolve import zero_stage
from jaxshard.parallel.rules import weight_specs
from jaxshard.training.optimizer import SMALLEST_FACTORED, is_factored, matrix_dims
from jaxshard.training.pipeline_plan import plan_pipeline
from jaxshard.training.program import weight_paths


def alike(size: int, small: int, *ways: int) -> int:
    """Smallest number from min(size, small) on that shares with every one of `ways` the factor that `size` shares."""
    return next(_alike(size, small, *ways))


def _alike(size: int, small: int, *ways: int) -> Iterator[int]:
    """All of them, ascending, and then smaller ones."""
    start = min(size, small)
    same = lambda n: all(math.gcd(n, way) == math.gcd(size, way) for way in ways)
    return filter(same, (*range(start, min(size, start + LARGEST) + 1), size, *range(start - 1, 0, -1)))


LARGEST = 4096
"""No more than that is added to a size in search of one that lies as the full one; beyond, `check` says so."""
TRIED = 48
"""Values that are tried of a size."""


def shrink(config: Config, arch: Architecture, shape: MeshShape) -> Config:
    """Returns the configuration with sizes reduced and number types set to fp64.

    Mesh, ZeRO stage, family, ties, dropout, optimizer, accumulation, rematerialisation, sequence parallelism, pipeline
    and offload stay. Every size keeps the factor that it shares with the mesh axes it lies on: what divides still
    divides, what is kept whole or padded still is. Query heads per kv head stay; fewer kv heads than tp stay fewer.
    Of such sizes the smallest are taken with which every weight and every moment has its dims on the mesh axes on which
    the full one has them; ZeRO takes the largest dim that divides, so they depend on which size is the largest too.
    Where none are found, some lie otherwise, which `check` shows.

    Args:
        config: of the user, which fits the mesh.
        arch: its model, completed.
        shape: the mesh.
    """
    train, parallel, T = config.train, config.parallel, config.data.seq_len
    plan = plan_pipeline(config, zero_stage(config, shape), arch, shape)
    microbatches = plan.schedule.microbatches if plan else 1
    length = alike(T, 12, shape.model)
    rows = shape.batch_ways * parallel.accumulation * microbatches
    small = replace(
        train,
        global_batch=rows * min(train.global_batch // rows, 2),
        precision="fp64",
        loss_scale=TrainConfig.loss_scale,
        loss_scale_interval=TrainConfig.loss_scale_interval,
    )
    alike_parts = replace(
        parallel,
        loss_chunk=length if parallel.loss_chunk >= T else length // 2 + (1 if T % parallel.loss_chunk else 0),
        microbatches=microbatches if plan else None,
        # Small models have relatively more in norms and biases; what the real one keeps whole is reported from it.
        allow_replicated=tuple(weight_paths(describe(arch).weights)),
    )
    return replace(
        config,
        model=_model(config, arch, shape, plan.schedule.chunks if plan else 1, length),
        data=replace(config.data, seq_len=length),
        train=small,
        parallel=alike_parts,
    )


def alone(config: Config) -> Config:
    """The same computation on one device: nothing cut, nothing recomputed, nothing offloaded."""
    return replace(config, parallel=ParallelConfig(mesh="dp=1", zero=0, loss_chunk=config.data.seq_len))


@dataclass(frozen=True)
class _Places:
    """Where weights and moments lie, as a function of sizes by logical axis ("positions" for gpt2's learned ones)."""

    rows: tuple[Any, ...]
    shape: MeshShape
    zero: int
    adafactor: bool
    full: dict[str, int]

    @cached_property
    def wanted(self) -> list[tuple[PartitionSpec, ...]]:
        return [self.of(row, self.full) for row in self.rows]

    def of(self, row: Any, sizes: dict[str, int]) -> tuple[PartitionSpec, ...]:
        """Specs of one weight and, where Adafactor factors its moments, of their rows and columns."""
        ways = self.shape.stage * self.shape.model
        true = [(name, sizes[name or "positions"]) for name in row.axes]
        whole = [padded_vocab(n, ways) if name == "vocab" else n for name, n in true]
        kept = [tuple(range(len(whole)))]
        if self.adafactor:
            dims = matrix_dims(row.role, row.axes, tuple(whole), sizes)
            gone = (dims.outputs, dims.inputs) if is_factored(dims) else ()
            kept += [tuple(i for i in kept[0] if i not in some) for some in gone]
        spec = lambda dims: weight_specs([whole[i] for i in dims], [row.axes[i] for i in dims], self.shape, self.zero)
        return tuple(spec(dims).optimizer for dims in kept)

    def same(self, sizes: dict[str, int], last: str | None) -> bool:
        """Whether all weights lie as the full ones that have these axes only, and the last one among them."""
        known = lambda row: all((name or "positions") in sizes for name in row.axes)
        has = lambda row: last is None or last in [name or "positions" for name in row.axes]
        rows = zip(self.rows, self.wanted, strict=True)
        return all(self.of(row, sizes) == wanted for row, wanted in rows if known(row) and has(row))


def _sizes(arch: Architecture, shape: MeshShape, layers: int, length: int, places: _Places) -> Iterator[dict[str, int]]:
    """Sizes by logical axis that lie as the full ones, smaller ones first; then the smallest, however they lie."""
    each, split = arch.n_heads // arch.n_kv_heads, shape.data * shape.model
    pad = math.lcm(64, shape.stage * shape.model)
    fewer = 0 if arch.vocab_size % pad == 0 else 5
    ways = lambda k: (each * k) % shape.model == 0
    kv = lambda: filter(ways, _alike(arch.n_kv_heads, 2, shape.model))
    # Adafactor factors large matrices only, so small models of it are not that small.
    factored = SMALLEST_FACTORED if places.adafactor else 0
    heads = lambda k: _alike(arch.head_dim, max(4, -(-factored // k)), 2, shape.data)
    widths = lambda: _alike(arch.d_model, max(16, factored), split)
    first = max(length, factored)
    rest = {
        "mlp": lambda D: _alike(arch.d_ff, D + 8, split),
        "vocab": lambda D: (pad * n - fewer for n in range(1, LARGEST)),
        "positions": lambda D: (n for n in _alike(arch.max_seq_len, first, shape.data) if n >= length),
    }
    for k in islice(kv(), TRIED):
        for E in islice(heads(k), TRIED):
            some = dict(layers=layers, kv_heads=k, heads=each * k, head_dim=E)
            if not places.same(some, None):
                continue
            for D in islice(widths(), TRIED):
                sizes = some | {"embed": D}
                if not places.same(sizes, "embed"):
                    continue
                for name, values in rest.items():
                    fits = (n for n in islice(values(D), TRIED) if places.same(sizes | {name: n}, name))
                    found = next(fits, None)
                    if found is None:
                        break
                    sizes = sizes | {name: found}
                else:
                    yield sizes
    k, D = next(kv()), next(widths())
    least = {name: next(values(D)) for name, values in rest.items()}
    yield dict(layers=layers, kv_heads=k, heads=each * k, head_dim=next(heads(k)), embed=D, **least)


def _model(config: Config, arch: Architecture, shape: MeshShape, chunks: int, length: int) -> ModelConfig:
    rows = jax.tree.leaves(describe(arch).weights, is_leaf=lambda x: hasattr(x, "axes"))
    full = dict(
        layers=arch.n_layers, kv_heads=arch.n_kv_heads, heads=arch.n_heads, head_dim=arch.head_dim,
        embed=arch.d_model, mlp=arch.d_ff, vocab=arch.vocab_size, positions=arch.max_seq_len,
    )  # fmt: skip
    adafactor = config.optim.name == "adafactor"
    places = _Places(tuple(rows), shape, zero_stage(config, shape), adafactor, full)
    layers = alike(arch.n_layers, 2, shape.stage * chunks)
    sizes = next(_sizes(arch, shape, layers, length, places))
    kept = {f.name: getattr(arch, f.name) for f in fields(ModelConfig) if hasattr(arch, f.name)}
    small = dict(
        preset=None,
        vocab_size=sizes["vocab"],
        d_model=sizes["embed"],
        n_layers=layers,
        n_heads=sizes["heads"],
        n_kv_heads=sizes["kv_heads"],
        head_dim=sizes["head_dim"],
        d_ff=sizes["mlp"],
        max_seq_len=sizes["positions"],
        attention="xla",
    )
    return replace(config.model, **(kept | small))
