"""A configuration made small enough to compute twice in fp64, with everything kept that decides how it is sharded."""

import math
from dataclasses import fields, replace

from jaxshard.config import Config, ModelConfig, TrainConfig
from jaxshard.models.presets import Architecture
from jaxshard.models.transformer import describe
from jaxshard.parallel.mesh import MeshShape
from jaxshard.parallel.rules import zero_stage
from jaxshard.training.pipeline_plan import plan_pipeline
from jaxshard.training.program import weight_paths


def alike(size: int, small: int, *ways: int) -> int:
    """Smallest number from min(size, small) on that shares with every one of `ways` the factor that `size` shares."""
    same = lambda n: all(math.gcd(n, way) == math.gcd(size, way) for way in ways)
    return next(n for n in range(min(size, small), size + 1) if same(n))


def shrink(config: Config, arch: Architecture, shape: MeshShape) -> Config:
    """Returns the configuration with sizes reduced and number types set to fp64.

    Mesh, ZeRO stage, family, ties, dropout, optimizer, accumulation, rematerialisation, sequence parallelism, pipeline
    and offload stay. Every size keeps the factor that it shares with the mesh axes it lies on: what divides still
    divides, what is kept whole or padded still is. Query heads per kv head stay; fewer kv heads than tp stay fewer.

    Args:
        config: of the user, which fits the mesh.
        arch: its model, completed.
        shape: the mesh.
    """
    train, T = config.train, config.data.seq_len
    plan = plan_pipeline(train, zero_stage(config, shape), arch, shape)
    microbatches = plan.schedule.microbatches if plan else 1
    length = alike(T, 12, shape.model)
    rows = shape.batch_ways * train.accumulation * microbatches
    small = dict(
        global_batch=rows * min(train.global_batch // rows, 2),
        loss_chunk=length if train.loss_chunk >= T else length // 2 + (1 if T % train.loss_chunk else 0),
        microbatches=microbatches if plan else None,
        precision="fp64",
        loss_scale=TrainConfig.loss_scale,
        loss_scale_interval=TrainConfig.loss_scale_interval,
        # Small models have relatively more in norms and biases; what the real one keeps whole is reported from it.
        allow_replicated=tuple(weight_paths(describe(arch).weights)),
    )
    return replace(
        config,
        model=_model(arch, shape, plan.schedule.chunks if plan else 1, length, config.model),
        data=replace(config.data, seq_len=length),
        train=replace(train, **small),
    )


def alone(config: Config) -> Config:
    """The same computation on one device: nothing cut, nothing recomputed, nothing offloaded."""
    train = replace(
        config.train,
        accumulation=1,
        microbatches=None,
        schedule=None,
        virtual_stages=None,
        pipeline_gather=None,
        remat="none",
        offload="none",
        offload_mode=None,
        sequence_parallel=False,
        loss_chunk=config.data.seq_len,
    )
    return replace(config, mesh="dp=1", zero=0, train=train)


def _model(arch: Architecture, shape: MeshShape, chunks: int, length: int, given: ModelConfig) -> ModelConfig:
    each = arch.n_heads // arch.n_kv_heads
    fits = lambda k: (
        (each * k) % shape.model == 0 and math.gcd(k, shape.model) == math.gcd(arch.n_kv_heads, shape.model)
    )
    kv_heads = next(k for k in range(min(arch.n_kv_heads, 2), arch.n_kv_heads + 1) if fits(k))
    split = shape.data * shape.model
    width = alike(arch.d_model, 16, split)
    pad = math.lcm(64, shape.stage * shape.model)
    kept = {f.name: getattr(arch, f.name) for f in fields(ModelConfig) if hasattr(arch, f.name)}
    small = dict(
        preset=None,
        vocab_size=pad if arch.vocab_size % pad == 0 else pad - 5,
        d_model=width,
        n_layers=alike(arch.n_layers, 2, shape.stage * chunks),
        n_heads=each * kv_heads,
        n_kv_heads=kv_heads,
        head_dim=alike(arch.head_dim, 4, 2, shape.data),
        d_ff=alike(arch.d_ff, width + 8, split),
        max_seq_len=alike(arch.max_seq_len, length, shape.data),
        attention="xla",
    )
    return replace(given, **(kept | small))
