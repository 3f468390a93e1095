"""How a model is run in training: what gradients and pipeline both build on."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import jax

from jaxshard.models.layers import Context
from jaxshard.models.transformer import Model
from jaxshard.parallel.layout import Layout
from jaxshard.parallel.schedule import Schedule
from jaxshard.training.loss import LossSpec


@dataclass(frozen=True, eq=False)
class PipelinePlan:
    """How the layers' stages take turns.

    Attributes:
        schedule: of a training step's accumulation part.
        evaluation: of an evaluation batch; only its forward halves are run.
        gather: whether parameters that are stored sharded (ZeRO-3) are gathered a layer at a time in every tick, or
            once a step.
    """

    schedule: Schedule
    evaluation: Schedule
    gather: Literal["tick", "step"]


@dataclass(frozen=True)
class Recipe:
    """How a model is run in training.

    Attributes:
        model: what is computed.
        layout: where.
        context: how activations are computed and constrained.
        remat: wrapper of the loop body over blocks.
        loss_chunk, z_loss: see `LossSpec`.
        seed: of dropout.
        pipeline: where the layers are split over stages.
    """

    model: Model
    layout: Layout
    context: Context
    remat: Callable[[Callable], Callable]
    loss_chunk: int
    z_loss: float
    seed: int
    pipeline: PipelinePlan | None = None

    def loss_spec(self) -> LossSpec:
        layout = self.layout
        table = "embedding.tokens" if self.model.arch.tie_embeddings else "head.out"
        groups = layout.groups_of_a_sum
        return LossSpec(self.model.arch.vocab_size, self.loss_chunk, self.z_loss, groups, layout.shard, table)


def dropout_keys(recipe: Recipe, step: jax.Array | int, sequences: jax.Array) -> jax.Array | None:
    """One key for each sequence: a function of seed, step and the sequence's place in the global batch."""
    if recipe.context.dropout == 0:
        return None
    root = jax.random.fold_in(jax.random.key(recipe.seed, impl="threefry2x32"), step)
    return jax.vmap(lambda i: jax.random.fold_in(root, i))(sequences)
