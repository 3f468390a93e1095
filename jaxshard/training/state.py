"""The state of training: one pytree, created sharded, donated to every step."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from jaxshard.models.transformer import Model
from jaxshard.parallel.layout import Layout
from jaxshard.parallel.offload import in_host_memory
from jaxshard.parallel.precision import LossScale
from jaxshard.parallel.rules import Held, weight_specs
from jaxshard.training.optimizer import owners, state_axes


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything that a step reads and writes.

    Attributes:
        step: int32, batches consumed; updates made are step - skipped.
        params: parameters in the policy's type.
        masters: fp32 parameters where the policy keeps them, else None.
        moments: state of the optimizer.
        loss_scale: dynamic loss scale where the policy scales, else None.
        skipped: int32, updates skipped in all.
        skipped_in_row: int32, updates skipped since the last good one.
    """

    step: Any
    params: Any
    masters: Any
    moments: Any
    loss_scale: LossScale | None
    skipped: Any
    skipped_in_row: Any


def create(model: Model, layout: Layout, tx: optax.GradientTransformation, seed: int, first_scale: float) -> TrainState:
    """Draws the first state; traceable, so that `jit(..., out_shardings=...)` creates it sharded."""
    policy = layout.policy
    drawn = model.initialise(seed, policy.gradients)
    params = jax.tree.map(lambda p: p.astype(policy.parameters), drawn)
    # Masters start from the rounded parameters' exact source: fp32 keeps what 16 bits cannot.
    masters = drawn if policy.masters else None
    moments = tx.init(drawn if policy.masters else params)
    zero = lambda: jnp.zeros((), jnp.int32)
    scale = LossScale(jnp.asarray(first_scale, jnp.float32), zero()) if policy.scaled else None
    return TrainState(zero(), params, masters, moments, scale, zero(), zero())


def state_logical_axes(
    model: Model, layout: Layout, tx: optax.GradientTransformation, abstract: TrainState
) -> TrainState:
    """Logical axes of every array of the state, in its shape; scalars have ()."""
    axes = jax.tree.map(lambda w: w.axes, model.weights, is_leaf=lambda x: hasattr(x, "axes"))
    source = abstract.masters if layout.policy.masters else abstract.params
    scalars = lambda tree: jax.tree.map(lambda _: (), tree)
    return TrainState(
        step=(),
        params=axes,
        masters=axes if layout.policy.masters else None,
        moments=state_axes(tx, source, axes),
        loss_scale=scalars(abstract.loss_scale),
        skipped=(),
        skipped_in_row=(),
    )


def offloaded(abstract: TrainState, axes: TrainState, offload: bool) -> TrainState:
    """Says for every array of the state whether it lies in host memory: masters, and moments that follow a parameter.

    Counts and constants of the optimizer, whose dims have no names, stay on the devices.
    """
    no = jax.tree.map(lambda _: False, abstract)
    if not offload:
        return no
    follows = lambda _, logical: any(name is not None for name in logical)
    return replace(
        no,
        masters=jax.tree.map(lambda _: True, abstract.masters),
        moments=jax.tree.map(follows, abstract.moments, axes.moments),
    )


def held(abstract: TrainState, axes: TrainState) -> list[Held]:
    """Parameters, masters and moments, each with the weight that it belongs to."""
    found = []
    for kind, tree, names in (
        ("parameters", abstract.params, axes.params),
        ("optimizer", abstract.masters, axes.masters),
        ("optimizer", abstract.moments, axes.moments),
    ):
        leaves, structure = jax.tree.flatten(tree)
        rows = zip(owners(tree, abstract.params), leaves, structure.flatten_up_to(names), strict=True)
        found += [Held(path, kind, tuple(x.shape), tuple(dims), x.dtype.itemsize) for path, x, dims in rows]
    return found


def state_shardings(layout: Layout, abstract: TrainState, axes: TrainState, offload: bool = False) -> TrainState:
    """Shardings in the shape of the state: parameters by their table, masters and moments by the optimizer's.

    With `offload` masters and moments lie in host memory, as `offloaded` says.
    """

    def moment(leaf: jax.ShapeDtypeStruct, logical: tuple) -> NamedSharding:
        return layout.sharding(weight_specs(leaf.shape, logical, layout.shape, layout.zero).optimizer)

    scalars = lambda tree: jax.tree.map(lambda _: layout.scalar, tree)
    shardings = TrainState(
        step=layout.scalar,
        params=layout.parameters,
        masters=layout.optimizer if layout.policy.masters else None,
        moments=jax.tree.map(moment, abstract.moments, axes.moments),
        loss_scale=scalars(abstract.loss_scale),
        skipped=layout.scalar,
        skipped_in_row=layout.scalar,
    )
    lower = lambda sharding, is_low: in_host_memory(sharding) if is_low else sharding
    return jax.tree.map(lower, shardings, offloaded(abstract, axes, offload))
