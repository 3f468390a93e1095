"""Optimizers and learning-rate schedules on optax, for stacked weights and padded vocabularies.

A transformation built here returns `direction + weight_decay * parameter`. Clipping, the learning rate and the decision
to skip an update belong to the step: `parameters - learning_rate * update`.

Blocks are stacked, so one array [L, D, H, E] holds L independent matrices [D, H * E]. Every rule that looks at a whole
matrix (Muon's orthogonalisation, Adafactor's factors and clipping) works per matrix, by the logical axes of the weight.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike
from optax import contrib

from jaxshard.config import OptimConfig

DECAYED = frozenset({"matrix", "embedding"})
ROLES = DECAYED | {"norm", "bias"}
STACKED = frozenset({"layers", "stages", "experts"})
"""Logical axes along which independent matrices are stacked."""

MUON_RMS = 0.2
"""RMS of a Muon update, so that Muon and AdamW share learning rate and decay (Liu et al. 2025, arXiv 2502.16982)."""
SMALLEST_FACTORED = 128
"""Adafactor keeps all second moments of a matrix with a shorter side (optax's min_dim_size_to_factor)."""

Axes = tuple[str | None, ...]


def learning_rate(optim: OptimConfig, steps: int) -> Callable[[ArrayLike], jax.Array]:
    """Builds the schedule.

    The returned function takes the number of finished updates (an int array, from 0) and gives the learning rate of the
    next one. Update W = warmup_steps has the peak, the first update has peak / W, and the last, `steps`, has
    peak * final_lr_fraction unless the warm-up is longer than the run; later ones keep that.

    Args:
        optim: schedule name and its figures.
        steps: updates in the whole run, 0 or more.
    """
    warmup = max(optim.warmup_steps, 1)
    rest = max(steps - warmup, 0)
    last = optim.lr * optim.final_lr_fraction
    fall = min(round(optim.decay_fraction * steps), rest)
    flat = optax.constant_schedule(optim.lr)
    if optim.schedule == "constant" or rest == 0 or (optim.schedule == "wsd" and fall == 0):
        body = flat
    elif optim.schedule == "cosine":
        body = optax.cosine_decay_schedule(optim.lr, rest, optim.final_lr_fraction)
    elif optim.schedule == "linear":
        body = optax.linear_schedule(optim.lr, last, rest)
    else:
        body = optax.linear_schedule(optim.lr, last, fall, transition_begin=rest - fall)
    rise = optax.linear_schedule(optim.lr / warmup, optim.lr, warmup - 1) if warmup > 1 else flat
    schedule = optax.join_schedules([rise, body], [warmup - 1])
    # A float count: optax divides an int32 count in fp32 even where 64-bit types are on.
    return lambda step: jnp.asarray(schedule(jnp.asarray(step).astype(float)), float)


@dataclass(frozen=True)
class MatrixDims:
    """How the dims of one weight make matrices.

    Attributes:
        stacked: dims that count independent weights.
        inputs: dims that a matmul sums over; () for vectors.
        outputs: the others.
        fan_in, fan_out: sizes of both, without padding.
        rest: size of the whole weight without stacked dims and padding.
    """

    stacked: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    fan_in: int
    fan_out: int

    @property
    def whole(self) -> tuple[int, ...]:
        return self.inputs + self.outputs


def matrix_dims(role: str, axes: Axes, shape: tuple[int, ...], sizes: Mapping[str, int]) -> MatrixDims:
    """Divides a weight's dims by their logical axes.

    A matrix that starts with "embed" takes it as its input; one that ends with "embed" takes all the others; any other
    takes its first dim. Vectors (norms and biases) have outputs only.

    Args:
        role: matrix, embedding, norm or bias.
        axes: logical axis of every dim.
        shape: sizes, padding included.
        sizes: size without padding of the logical axes that are padded.
    """
    assert role in ROLES and len(axes) == len(shape), (role, axes, shape)
    stacked = tuple(i for i, name in enumerate(axes) if name in STACKED)
    dims = tuple(i for i in range(len(axes)) if i not in stacked)
    if role not in DECAYED or len(dims) < 2:
        split = 0
    elif axes[dims[0]] != "embed" and axes[dims[-1]] == "embed":
        split = len(dims) - 1
    else:
        split = 1
    size = lambda some: math.prod(sizes.get(axes[i] or "", shape[i]) for i in some)
    return MatrixDims(stacked, dims[:split], dims[split:], size(dims[:split]), size(dims[split:]))


def build(
    optim: OptimConfig, roles: Any, axes: Any, sizes: Mapping[str, int] | None = None, moments: Any = None
) -> optax.GradientTransformation:
    """Builds the optimizer of a configuration, without clipping and learning rate.

    - adamw, lion: beta1, beta2 (and eps) as configured.
    - sgd: momentum beta1.
    - muon: momentum beta1 (Nesterov) for matrices; AdamW for embeddings, the output head, norms and biases.
    - adafactor: factored second moments with decay min(1 - t^-0.8, beta2), updates of each matrix clipped to RMS 1, no
      momentum and no scaling by the parameter (Zhai et al. 2022, arXiv 2106.04560, section 3.4), so the learning rate
      means what it means for AdamW.

    Padding (rows of the vocabulary) keeps exactly zero parameters and updates, given zero gradients, and reaches no
    other entry: AdamW, Lion and SGD work entry by entry, Muon leaves the vocabulary to AdamW, and Adafactor divides its
    means by `sizes`.

    Args:
        optim: the configuration.
        roles: pytree like the parameters: "matrix", "embedding", "norm" or "bias". Only the first two are decayed.
        axes: pytree like the parameters, of tuples of logical axes.
        sizes: size without padding of the logical axes that are padded, such as {"vocab": 50257}.
        moments: type of the moments; None is that of the parameters, which must then have 32 bits or more. The update
            is computed in the type of the gradients (fp32 or fp64) in any case.

    Returns:
        A transformation with update(gradients, state, parameters) -> (update, state).
    """
    sizes = sizes or {}
    if optim.name == "adamw":
        direction = optax.scale_by_adam(optim.beta1, optim.beta2, optim.eps)
    elif optim.name == "lion":
        direction = optax.scale_by_lion(optim.beta1, optim.beta2)
    elif optim.name == "sgd":
        direction = optax.trace(optim.beta1)
    elif optim.name == "muon":
        direction = _muon(optim, roles, axes, sizes)
    else:
        dims = lambda params: jax.tree.map(lambda p, r, a: matrix_dims(r, a, p.shape, sizes), params, roles, axes)
        direction = _adafactor(dims, optim.beta2)
    decayed = jax.tree.map(lambda role: role in DECAYED, roles)
    return _typed(optax.chain(direction, optax.add_decayed_weights(optim.weight_decay, decayed)), moments)


def rowwise(optim: OptimConfig) -> bool:
    """Whether each row of a vocabulary table is updated for itself; Adafactor looks at whole matrices."""
    return optim.name != "adafactor"


def _typed(tx: optax.GradientTransformation, moments: Any) -> optax.GradientTransformation:
    """Computes in the gradients' type and stores moments in theirs, which optax would take from the parameters."""

    def init(params):
        kinds = {jnp.dtype(moments or p.dtype) for p in jax.tree.leaves(params)}
        assert moments is not None or all(kind.itemsize >= 4 for kind in kinds), f"moments in {kinds}"
        return tx.init(params if moments is None else jax.tree.map(lambda p: p.astype(moments), params))

    def update(updates, state, params=None):
        """Widens moments and parameters to the gradients' type, and narrows the new moments to theirs."""
        assert params is not None
        wide = jax.tree.leaves(updates)[0].dtype
        assert all(g.dtype == wide for g in jax.tree.leaves(updates)) and wide.itemsize >= 4, (
            "gradients in fp32 or fp64"
        )
        small = lambda x: jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
        widen = lambda tree: jax.tree.map(lambda x: x.astype(wide) if small(x) else x, tree)
        updates, new = tx.update(updates, widen(state), widen(params))
        return updates, jax.tree.map(lambda x, old: x.astype(old.dtype), new, state)

    return optax.GradientTransformation(init, update)


def _muon(optim: OptimConfig, roles: Any, axes: Any, sizes: Mapping[str, int]) -> optax.GradientTransformation:
    labels = jax.tree.map(lambda role, a: "muon" if role == "matrix" and "vocab" not in a else "adam", roles, axes)

    def dims(params):
        # Leaves of the other group are masked nodes, and stay so.
        one = lambda p, role, a: p if _masked(p) else matrix_dims(role, a, p.shape, sizes)
        return jax.tree.map(one, params, roles, axes, is_leaf=_masked)

    numbers = lambda params: jax.tree.map(lambda d: contrib.MuonDimensionNumbers(d.inputs, d.outputs), dims(params))
    scale = lambda u, d: u * (MUON_RMS * math.sqrt(max(d.fan_in, d.fan_out)))
    rescale = optax.stateless(lambda updates, _: jax.tree.map(scale, updates, dims(updates)))
    muon = contrib.scale_by_muon(beta=optim.beta1, eps=optim.eps, weight_dimension_numbers=numbers)
    adam = optax.scale_by_adam(optim.beta1, optim.beta2, optim.eps)
    return optax.partition({"muon": optax.chain(muon, rescale), "adam": adam}, labels)


def _masked(x: Any) -> bool:
    return isinstance(x, optax.MaskedNode)


def is_factored(dims: MatrixDims) -> bool:
    """Whether Adafactor keeps sums over rows and columns of a weight instead of all its second moments."""
    return bool(dims.inputs) and min(dims.fan_in, dims.fan_out) >= SMALLEST_FACTORED


class FactoredState(NamedTuple):
    """Second moments of Adafactor: rows and columns of a factored matrix, or all of them; the others are masked."""

    count: jax.Array
    rows: Any
    columns: Any
    full: Any


def _adafactor(dims: Callable[[Any], Any], beta2: float) -> optax.GradientTransformation:
    """Adafactor (Shazeer & Stern 2018, algorithms 4 and 5) over stacked matrices with several input or output dims.

    optax's own factors the two largest dims of the array, be they layers and heads, and clips all layers together.
    """
    eps = 1e-30

    def init(params):
        def one(p, d):
            if not is_factored(d):
                return optax.MaskedNode(), optax.MaskedNode(), jnp.zeros_like(p)
            keep = lambda gone: jnp.zeros([n for i, n in enumerate(p.shape) if i not in gone], p.dtype)
            return keep(d.outputs), keep(d.inputs), optax.MaskedNode()

        return FactoredState(jnp.zeros((), jnp.int32), *_unzip(params, jax.tree.map(one, params, dims(params))))

    def update(updates, state, params=None):
        """Algorithms 4 and 5, matrix by matrix."""
        count = state.count + 1
        decay = jnp.minimum(1 - count.astype(float) ** -0.8, beta2)
        blend = lambda old, new: decay.astype(old.dtype) * old + (1 - decay).astype(old.dtype) * new

        def one(g, d, row, column, full):
            """Gradient and second moments of one weight -> its update, clipped to RMS 1, and the new moments."""
            square = jnp.square(g)
            # eps stands outside the means, and the means divide by true sizes: padding adds nothing.
            if _masked(row):
                full = blend(full, square + eps)
                u = g * jax.lax.rsqrt(full)
            else:
                row = blend(row, square.sum(d.outputs) / d.fan_out + eps)
                column = blend(column, square.sum(d.inputs) / d.fan_in + eps)
                rows = jnp.expand_dims(row, d.outputs)
                mean = rows.sum(d.inputs, keepdims=True) / d.fan_in
                u = g * jax.lax.rsqrt(rows / mean) * jax.lax.rsqrt(jnp.expand_dims(column, d.inputs))
            rms = jnp.sqrt(jnp.square(u).sum(d.whole, keepdims=True) / (d.fan_in * d.fan_out))
            return u / jnp.maximum(1, rms), row, column, full

        several = jax.tree.map(one, updates, dims(updates), state.rows, state.columns, state.full)
        updates, *rest = _unzip(updates, several)
        return updates, FactoredState(count, *rest)

    return optax.GradientTransformation(init, update)


def _unzip(like: Any, tuples: Any) -> list[Any]:
    """Turns a tree of tuples into a list of trees."""
    structure = jax.tree.structure(like)
    return [jax.tree.unflatten(structure, part) for part in zip(*structure.flatten_up_to(tuples), strict=True)]


def state_axes(tx: optax.GradientTransformation, params: Any, axes: Any) -> Any:
    """Finds the logical axes of every array in an optimizer's state.

    A state leaf belongs to the parameter whose path ends its own. Which dims of the parameter it keeps is found by
    tracing `tx.init` twice, the second time with dims that all differ in size; so it holds for any transformation, and
    for dims of equal size. A dim that comes from no dim of the parameter has None.

    Args:
        tx: any optax transformation.
        params: pytree of arrays or `jax.ShapeDtypeStruct`.
        axes: pytree like the parameters, of tuples of logical axes.

    Returns:
        A pytree like the state of `tx`, of tuples of logical axes (() for scalars).
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    weights = {
        path: (tuple(leaf.shape), _distinct(leaf.shape), names)
        for (path, leaf), names in zip(leaves, structure.flatten_up_to(axes), strict=True)
    }
    probe = [jax.ShapeDtypeStruct(weights[path][1], leaf.dtype) for path, leaf in leaves]
    abstract = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params)
    true, true_structure = jax.tree_util.tree_flatten_with_path(jax.eval_shape(tx.init, abstract))
    traced = dict(jax.tree_util.tree_leaves_with_path(jax.eval_shape(tx.init, jax.tree.unflatten(structure, probe))))
    found = []
    for path, leaf in true:
        owner = _owner(path, weights)
        if owner is None:
            found.append((None,) * leaf.ndim)
        else:
            found.append(_kept(leaf.shape, traced[path].shape if path in traced else None, *weights[owner]))
    return jax.tree.unflatten(true_structure, found)


def owners(state: Any, params: Any) -> list[str]:
    """Path of the parameter that each leaf of a state belongs to, such as blocks.mlp.up; "" where it has none."""
    known = {path for path, _ in jax.tree_util.tree_leaves_with_path(params)}
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator=".")
    return [name(_owner(path, known) or ()) for path, _ in jax.tree_util.tree_leaves_with_path(state)]


def _owner(path: Any, known: Any) -> Any:
    return next((path[i:] for i in range(len(path) + 1) if path[i:] in known), None)


def _distinct(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Larger sizes, all different, in the same order (ties as optax's argsort breaks them)."""
    result, last = list(shape), 1
    for i in np.argsort(shape):
        result[i] = last = max(shape[i] + 1, last + 1)
    return tuple(int(n) for n in result)


def _kept(
    leaf: tuple[int, ...], traced: tuple[int, ...] | None, shape: tuple[int, ...], probe: tuple[int, ...], names: Axes
):
    if traced is None or len(leaf) != len(traced):  # The larger sizes crossed a threshold, such as that of factoring.
        return names if leaf == shape else (None,) * len(leaf)
    free = {n: i for i, n in enumerate(probe)}
    dims = []
    for size, other in zip(leaf, traced, strict=True):
        dim = free.get(other)
        if dim is None or shape[dim] != size:
            dims.append(None)
        else:
            dims.append(names[free.pop(other)])
    return tuple(dims)
