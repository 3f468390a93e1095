"""From a configuration to compiled functions: everything that a run, a plan or an explanation shares."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxshard.config import Config
from jaxshard.errors import InputError, nearest
from jaxshard.models.layers import DOT_NAMES, SAVED_NAMES, Context
from jaxshard.models.presets import Architecture, architecture
from jaxshard.models.transformer import Model, describe
from jaxshard.parallel.axes import BATCH_AXES, MODEL, SHORT, MeshShape
from jaxshard.parallel.layout import Layout, build_layout
from jaxshard.parallel.mesh import Device, build_mesh, resolve_mesh
from jaxshard.parallel.offload import check_host_memory
from jaxshard.parallel.precision import POLICIES
from jaxshard.parallel.remat import parse_remat, rematerialise
from jaxshard.parallel.resolve import misfits, resolve, zero_stage
from jaxshard.parallel.rules import Replicated, bytes_per_device, check_replicated, replicated
from jaxshard.training.gradients import evaluate_batch
from jaxshard.training.optimizer import build as build_optimizer
from jaxshard.training.optimizer import learning_rate, rowwise
from jaxshard.training.pipeline_plan import plan_pipeline
from jaxshard.training.recipe import Recipe
from jaxshard.training.state import TrainState, create, held, offloaded, state_logical_axes, state_shardings
from jaxshard.training.step import train_step
from jaxshard.training.update import Update, choose_update


@dataclass(frozen=True, eq=False)
class Program:
    """The functions of a run over one layout; nothing is compiled until it is called or lowered.

    Attributes:
        config: of the run.
        model: what is computed.
        layout: where everything lies.
        recipe: how gradients are computed.
        tx: the optimizer's direction.
        update: how the direction reaches parameters, masters and moments, wherever they lie.
        replicated: weights that stay whole against the rules, or whose moments do.
        abstract: shapes, types and shardings of the state.
        logical_axes: names of the dims of every array of the state.
    """

    config: Config
    model: Model
    layout: Layout
    recipe: Recipe
    tx: optax.GradientTransformation
    update: Update
    replicated: list[Replicated]
    abstract: TrainState
    logical_axes: TrainState

    @property
    def shardings(self) -> TrainState:
        return jax.tree.map(lambda leaf: leaf.sharding, self.abstract)

    @property
    def offloaded(self) -> TrainState:
        """Bools in the shape of the state: what lies in host memory, also where absent devices cannot say so."""
        return offloaded(self.abstract, self.logical_axes, self.config.parallel.offload != "none")

    @cached_property
    def init(self):
        """() -> state, created sharded: no device ever holds the whole."""
        train = self.config.train
        make = partial(create, self.model, self.layout, self.tx, train.seed, train.loss_scale)
        return jax.jit(make, out_shardings=self.shardings)

    @cached_property
    def step(self):
        """(state, batch [A, B, T]) -> (state, metrics); the state is donated."""
        config = self.config
        lr = learning_rate(config.optim, config.train.steps)
        run = partial(train_step, self.recipe, self.update, lr, config.optim, config.train)
        return jax.jit(run, donate_argnums=0, out_shardings=(self.shardings, self.layout.scalar))

    @cached_property
    def evaluate(self):
        """(params, batch [1, B, T]) -> (sum of token losses, number of targets)."""

        def evaluate(params, batch):
            return evaluate_batch(self.recipe, params, jax.tree.map(lambda a: a[0], batch))

        return jax.jit(evaluate, out_shardings=self.layout.scalar)

    def abstract_batch(self, accumulation: int | None = None) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape of a batch [A, B, T]; A is the configured accumulation unless given."""
        train = self.config.train
        parts = accumulation or self.config.parallel.accumulation
        shape = (parts, train.global_batch // parts, self.config.data.seq_len)
        leaf = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self.layout.batch)
        return dict.fromkeys(("inputs", "targets", "segments", "positions"), leaf)

    def place(self, batch: dict[str, Any], accumulation: int = 1) -> dict[str, jax.Array]:
        """Puts a host batch [B, T] on the devices as [A, B / A, T]."""
        cut = lambda a: a.reshape(accumulation, a.shape[0] // accumulation, *a.shape[1:])
        return jax.device_put({name: cut(a) for name, a in batch.items()}, self.layout.batch)


def build_program(
    config: Config,
    devices: Sequence[Device],
    tokenizer_size: int | None = None,
    mesh: jax.sharding.Mesh | None = None,
) -> Program:
    """Checks the configuration against the devices and derives the program.

    Args:
        config: of the run.
        devices: to run on or to compile for.
        tokenizer_size: vocabulary of the tokenizer, where the model leaves it open.
        mesh: placed devices, where the caller has its own order.

    Raises:
        InputError: the mesh does not fit the devices, or the model or batch does not fit the mesh.
    """
    shape = resolve_mesh(config.mesh, len(devices))
    config = config.with_parallel(zero=zero_stage(config, shape))
    arch = architecture(config.model, tokenizer_size, config.data.seq_len)
    check_fit(config, arch, shape)
    jax.config.update("jax_threefry_partitionable", True)  # What is drawn does not depend on the layout.
    if config.train.precision == "fp64":
        jax.config.update("jax_enable_x64", True)
    recipe = _recipe(config, arch, shape, devices, mesh)
    tx, update, abstract, logical_axes = _updates(config, recipe)
    whole = _whole(config.parallel.allow_replicated, recipe.model, recipe.layout, abstract, logical_axes)
    return Program(config, recipe.model, recipe.layout, recipe, tx, update, whole, abstract, logical_axes)


def _recipe(
    config: Config, arch: Architecture, shape: MeshShape, devices: Sequence[Device], mesh: jax.sharding.Mesh | None
) -> Recipe:
    """The model, where it lies, and how its gradients are computed."""
    train, policy = config.train, POLICIES[config.train.precision]
    resolved = resolve(config, arch, shape, devices[0].platform)
    pipeline = plan_pipeline(config, resolved.zero, arch, shape)
    dealt = (pipeline.schedule.stages, pipeline.schedule.chunks) if pipeline else (1, 1)
    model = describe(arch, shape.stage * shape.model, dealt)
    remat = rematerialise(parse_remat(config.parallel.remat, SAVED_NAMES), DOT_NAMES)
    placed = mesh or build_mesh(shape, devices)
    layout = build_layout(placed, model.weights, resolved, policy, config.parallel.sequence_parallel)
    context = Context(
        dtype=policy.compute,
        shard=layout.shard,
        dropout=arch.dropout,
        attention=resolved.kernel,
        packed=config.data.pack,
        split_kv=resolved.split_kv,
        mixed_kv=not resolved.split_kv and shape.model % arch.n_kv_heads != 0,
        vocab_parts=shape.stage * shape.model,
        groups=layout.groups_of_a_sum,
        vmapped=layout.deferred or shape.stage > 1,
    )
    return Recipe(model, layout, context, remat, config.parallel.loss_chunk, train.z_loss, train.seed, pipeline)


def _updates(config: Config, recipe: Recipe) -> tuple[optax.GradientTransformation, Update, TrainState, TrainState]:
    """The optimizer's direction, how it reaches the state, and the state's shapes and logical axes."""
    train, model, layout = config.train, recipe.model, recipe.layout
    is_row = lambda x: hasattr(x, "axes")
    roles = jax.tree.map(lambda w: w.role, model.weights, is_leaf=is_row)
    axes = jax.tree.map(lambda w: w.axes, model.weights, is_leaf=is_row)
    sizes = {"vocab": model.arch.vocab_size}
    optimizer = partial(build_optimizer, config.optim, sizes=sizes, moments=layout.policy.moments)
    tx = optimizer(roles, axes)
    shapes = jax.eval_shape(partial(create, model, layout, tx, train.seed, train.loss_scale))
    logical = state_logical_axes(model, layout, tx, shapes)
    offload = config.parallel.offload == "optimizer"
    for option, wanted in (("offload optimizer", offload), ("remat offload", config.parallel.remat == "offload")):
        if wanted:
            check_host_memory(f"parallel.{option}", list(layout.mesh.devices.flat))
    shardings = state_shardings(layout, shapes, logical, offload)
    part = lambda group: optimizer({group: roles[group]}, {group: axes[group]})
    mode = (config.parallel.offload_mode or "stream") if offload else None
    low = offloaded(shapes, logical, offload).moments
    update = choose_update(mode, layout, tx, part, shardings.moments, low, rowwise(config.optim))
    attach = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    return tx, update, jax.tree.map(attach, shapes, shardings), logical


def _whole(
    allowed: Sequence[str], model: Model, layout: Layout, abstract: TrainState, axes: TrainState
) -> list[Replicated]:
    """What stays whole against the rules; refuses it, unless allowed or small, and wrong names of what is allowed."""
    _check_names(allowed, weight_paths(model.weights))
    arrays = held(abstract, axes)
    found = replicated(arrays, layout.shape, layout.zero)
    check_replicated(found, sum(array.bytes for array in arrays), allowed)
    return found


def weight_paths(weights: Any) -> list[str]:
    """Paths of a model's weights, such as blocks.mlp.up."""
    leaves = jax.tree_util.tree_leaves_with_path(weights, is_leaf=lambda x: hasattr(x, "axes"))
    return [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]


def _check_names(allowed: Sequence[str], paths: Sequence[str]) -> None:
    for name in allowed:
        if name not in paths:
            raise InputError(
                f"parallel.allow_replicated names {name!r}, but the model has no such weight{nearest(name, paths)}"
            )


def check_fit(config: Config, arch: Architecture, shape: MeshShape) -> None:
    """Refuses sizes that do not divide, before anything is compiled.

    kv heads that do not divide are not refused: they are kept whole on every device of the model axis.

    Raises:
        InputError: names the size, the axis and the nearest sizes that work.
    """
    for misfit in misfits(config, arch, shape):
        if misfit.axes == (MODEL,):
            fits = [n for n in range(1, misfit.ways + 1) if misfit.size % n == 0]
            raise InputError(f"{misfit}; {SHORT[MODEL]} = {fits[-1]} would")
    train = config.train
    ways = shape.batch_ways * config.parallel.accumulation
    if train.global_batch % ways:
        axes = shape.product_text(BATCH_AXES)
        near = max(ways, round(train.global_batch / ways) * ways)
        raise InputError(
            f"train.global_batch = {train.global_batch} does not divide by {axes or 'dp 1'} x accumulation "
            f"{config.parallel.accumulation} = {ways}; try --train.global_batch {near}"
        )
    if config.parallel.sequence_parallel and shape.model == 1:
        raise InputError(
            "parallel.sequence_parallel splits the sequence over the devices of tensor parallelism, and tp = 1: leave "
            "it out (or say --parallel.sequence_parallel false), or use --mesh tp=2,..."
        )
    if config.parallel.sequence_parallel and config.data.seq_len % shape.model:
        near = max(1, round(config.data.seq_len / shape.model)) * shape.model
        raise InputError(
            f"data.seq_len = {config.data.seq_len} does not divide by tp = {shape.model}, which "
            f"parallel.sequence_parallel needs; try --data.seq_len {near}"
        )


def class_bytes(program: Program) -> dict[str, int]:
    """Bytes for one device of each class of state, and of the gradients while they are accumulated.

    With --parallel.offload optimizer the bytes of moments and masters lie in host memory; `Program.offloaded` says
    which.
    """
    layout, state = program.layout, program.abstract
    size = lambda tree: (
        bytes_per_device(tree, jax.tree.map(lambda x: x.sharding.spec, tree), layout.shape) if tree else 0
    )
    grads = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, layout.policy.gradients), state.params)
    return {
        "parameters": size(state.params),
        "gradients": bytes_per_device(grads, jax.tree.map(lambda s: s.spec, layout.gradients), layout.shape),
        "moments": size(state.moments),
        "masters": size(state.masters),
    }
