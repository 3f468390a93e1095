"""A layout: where every array of a run lies, derived once from mesh, rules and weights."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxshard.names import GATHER, LAYOUT, REDUCE, map_named
from jaxshard.parallel.axes import BATCH_AXES, SEQUENCE_RULES, MeshShape
from jaxshard.parallel.precision import Policy
from jaxshard.parallel.remat import WEIGHT_NAME
from jaxshard.parallel.resolve import Resolved
from jaxshard.parallel.rules import WeightSpecs, activation_spec, spec_entry, weight_specs


@dataclass(frozen=True)
class Layout:
    """Placement of parameters, gradients, optimizer state and activations.

    Attributes:
        mesh: the device mesh.
        shape: its sizes.
        zero: ZeRO stage.
        policy: number types.
        specs: `WeightSpecs` in the shape of the parameters.
        sequence_parallel: residual stream split over `model` along the sequence.
        apart: mesh axes over which every group keeps a gradient sum of its own, reduced once at the end of the step;
            see `resolve.axes_apart`. Over the other axes gradients are reduced as the backward pass produces them.
    """

    mesh: Mesh
    shape: MeshShape
    zero: int
    policy: Policy
    specs: Any
    sequence_parallel: bool
    apart: tuple[str, ...]

    def sharding(self, spec: PartitionSpec, memory_kind: str | None = None) -> NamedSharding:
        return NamedSharding(self.mesh, spec, memory_kind=memory_kind)

    def tree(self, pick: Callable[[WeightSpecs], PartitionSpec]) -> Any:
        """Shardings in the shape of the parameters: `layout.tree(lambda s: s.gradients)`."""
        return jax.tree.map(lambda s: self.sharding(pick(s)), self.specs, is_leaf=lambda x: isinstance(x, WeightSpecs))

    @property
    def parameters(self) -> Any:
        return self.tree(lambda s: s.parameters)

    @property
    def gradients(self) -> Any:
        return self.tree(lambda s: s.gradients)

    @property
    def optimizer(self) -> Any:
        return self.tree(lambda s: s.optimizer)

    @property
    def scalar(self) -> NamedSharding:
        return self.sharding(PartitionSpec())

    @property
    def batch(self) -> NamedSharding:
        """Of a batch [accumulation, B, T]."""
        return self.sharding(PartitionSpec(None, BATCH_AXES))

    @property
    def groups(self) -> int:
        """Data groups whose gradients are summed: replica x data."""
        return self.shape.batch_ways

    @property
    def deferred(self) -> bool:
        """Whether several groups keep gradient sums of their own, which have a leading dim of them."""
        return bool(self.apart)

    @property
    def sums(self) -> int:
        """Gradient sums that are kept apart; 1 where none are."""
        return self.shape.ways(self.apart)

    @property
    def groups_of_a_sum(self) -> int:
        """Data groups whose gradients are reduced at once, into one of the sums."""
        return self.groups // self.sums

    @property
    def axes_of_a_sum(self) -> tuple[str, ...]:
        """Mesh axes that those data groups lie on."""
        return tuple(axis for axis in BATCH_AXES if axis not in self.apart)

    def group_spec(self, spec: PartitionSpec) -> PartitionSpec:
        """Spec of an array with a leading dim of the sums that are kept apart."""
        return PartitionSpec(spec_entry(self.apart), *spec)

    def shard(self, x: jax.Array, axes: tuple[str | None, ...], name: str | None = None) -> jax.Array:
        """Constrains an activation by the logical names of its dims, and names it for rematerialisation."""
        extra: dict[str, tuple[str, ...]] = dict(SEQUENCE_RULES) if self.sequence_parallel else {}
        # vmap over the groups puts the axes that keep them apart on a leading dim.
        extra |= {"batch": self.axes_of_a_sum, "groups": self.apart}
        spec = activation_spec(axes, x.shape, self.shape, extra)
        with jax.named_scope(f"{LAYOUT}/{','.join(axis or '-' for axis in axes)}"):
            x = jax.lax.with_sharding_constraint(x, self.sharding(spec))
        return x if name is None else checkpoint_name(x, name)

    def lift(self, group: str, weights: Any) -> Any:
        """Makes a tree of (value, slot) pairs ready for use: gathered, in the gradients' type; see `_lift`.

        Args:
            group: top-level key of the parameters. For "blocks" the tree is one layer, without the leading dim.
            weights: tree of `Slotted`, or of anything with `value` and `slot`.
        """
        leaf = lambda x: hasattr(x, "slot")
        specs = self.specs[group]
        one = lambda w, s: self._lift_one(w, s, group == "blocks")
        return map_named(GATHER, one, weights, specs, under=group, is_leaf=leaf)

    def _lift_one(self, weight: Any, specs: WeightSpecs, in_stack: bool) -> jax.Array:
        drop = lambda spec: PartitionSpec(*spec[1:]) if in_stack else spec
        stored, use, grads = (self.sharding(drop(s)) for s in (specs.parameters, specs.base, specs.gradients))
        # Pinned as it is stored, so that the gather stands here, under this weight's name, and not where it was sliced.
        value = jax.lax.with_sharding_constraint(weight.value, stored) if in_stack else weight.value
        if weight.slot is None:
            return jax.lax.with_sharding_constraint(value, use).astype(self.policy.gradients)
        return _lift(use, grads, value, weight.slot)

    def once_gathered(self) -> "Layout":
        """The layout of a program in which all parameters have been gathered already."""
        whole = lambda s: replace(s, parameters=s.base)
        return replace(self, specs=jax.tree.map(whole, self.specs, is_leaf=lambda x: isinstance(x, WeightSpecs)))

    @property
    def gathers(self) -> bool:
        """Whether parameters are stored sharded over the data axis and gathered for use (ZeRO-3)."""
        return any(
            s.base != s.parameters for s in jax.tree.leaves(self.specs, is_leaf=lambda x: isinstance(x, WeightSpecs))
        )


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _lift(use: NamedSharding, grads: NamedSharding, value: jax.Array, slot: jax.Array) -> jax.Array:
    """Identity from storage to use: gather `value` to the layout `use`, in the type of `slot`.

    The gradient goes to the slot, in its type, constrained to the layout `grads`: so this one function places the
    parameter gather, its repetition in the backward pass, and the gradient reduction, for every ZeRO stage.
    """
    return _gathered(use, value, slot)


def _gathered(use: NamedSharding, value: jax.Array, slot: jax.Array) -> jax.Array:
    # The name keeps rematerialisation from saving the gathered weight.
    return checkpoint_name(jax.lax.with_sharding_constraint(value, use).astype(slot.dtype), WEIGHT_NAME)


def _lift_forward(use, grads, value, slot):
    # Not by way of _lift: rematerialisation would see one call whose output, the whole weight, it may keep.
    return _gathered(use, value, slot), jnp.zeros((0,), value.dtype)


def _lift_backward(use, grads, like, cotangent):
    # The value's own cotangent is never asked for: gradients are taken with respect to the slots.
    with jax.named_scope(REDUCE):
        return jnp.zeros(cotangent.shape, like.dtype), jax.lax.with_sharding_constraint(cotangent, grads)


_lift.defvjp(_lift_forward, _lift_backward)


def build_layout(mesh: Mesh, weights: Any, resolved: Resolved, policy: Policy, sequence_parallel: bool) -> Layout:
    """Applies the rules to a table of weights (rows with `shape` and `axes`)."""
    row = lambda x: hasattr(x, "axes")
    shape = resolved.shape
    specs = jax.tree.map(lambda w: weight_specs(w.shape, w.axes, shape, resolved.tables), weights, is_leaf=row)
    return Layout(mesh, shape, resolved.zero, policy, specs, sequence_parallel, resolved.apart)
