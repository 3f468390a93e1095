"""The command `check`: did my sharding change my model? One step on the mesh and on one device, in fp64."""

from typing import Any

import jax

from jaxshard.config import Config
from jaxshard.console import Console
from jaxshard.data.tokenizer import load_tokenizer
from jaxshard.errors import InputError
from jaxshard.models.presets import Architecture, architecture
from jaxshard.parallel.axes import MeshShape
from jaxshard.parallel.mesh import open_devices, resolve_mesh
from jaxshard.training.describe import placed
from jaxshard.training.invariance import (
    TOLERANCE,
    UPDATE_TOLERANCE,
    Comparison,
    compare,
    one_step,
    synthetic_batch,
    wide_types,
)
from jaxshard.training.program import Program, build_program, weight_paths
from jaxshard.training.shrink import alone, shrink


def run(config: Config, *, console: Console, tolerance: float = TOLERANCE) -> dict[str, Any]:
    """The command `check`: compares the given mesh with one device on the user's model, scaled down.

    Args:
        config: of the run; its full sizes are checked against the mesh first.
        console: to report on.
        tolerance: largest relative error of loss and gradients.

    Returns:
        The result for --json; its "exit_code" is 1 when the layout disagrees.

    Raises:
        InputError: the configuration does not fit the mesh, or TPUs are asked for (they have no fp64).
    """
    if config.devices == "tpu":
        raise InputError("check computes in fp64, which TPUs lack: leave out --devices tpu, and it runs on faked CPUs")
    devices = open_devices(config.mesh, "gpu" if config.devices == "gpu" else "cpu", config.fake_devices)
    shape = resolve_mesh(config.mesh, len(devices))
    arch = _architecture(config)
    full = build_program(config, devices, arch.vocab_size)
    small = shrink(full.config, arch, shape)
    console.line(_describe(small, shape, arch))
    with wide_types():
        program, single = build_program(small, devices), build_program(alone(small), devices[:1])
    length, batch = small.data.seq_len, small.train.global_batch
    tokens = synthetic_batch(program.model.arch.vocab_size, batch, length, small.data.pack)
    otherwise = lies_otherwise(full, program)
    result = compare(one_step(program, tokens), one_step(single, tokens))
    faults = result.faults(tolerance)
    _report(console, small, shape, result, faults, tolerance, len(otherwise))
    if otherwise:
        title = "Placed otherwise in the scaled-down model, so not checked as your run places it"
        console.table(title, ("array", "in your model", "here"), [tuple(each.values()) for each in otherwise])
    for leaf in full.replicated:
        console.line(f"stays whole in the full model: {leaf.path} ({leaf.bytes:,} bytes): {leaf.why}")
    return {
        "mesh": str(shape),
        "zero": full.config.zero,
        "devices": shape.devices,
        "model": vars(small.model),
        "same": not faults,
        "faults": faults,
        "placed_otherwise": otherwise,
        "tolerance": tolerance,
        "update_tolerance": max(UPDATE_TOLERANCE, tolerance),
        "initial_equal": result.initial_equal,
        "loss": {"one_device": result.expected_loss, "mesh": result.loss, "error": result.loss_error},
        "tensors": [vars(tensor) for tensor in result.tensors],
        "exit_code": 1 if faults else 0,
    }


def _architecture(config: Config) -> Architecture:
    try:
        return architecture(config.model, None, config.data.seq_len)
    except InputError:
        # Only where neither preset nor field gives the vocabulary does the tokenizer have to be read.
        return architecture(config.model, load_tokenizer(config.data.tokenizer).vocab_size, config.data.seq_len)


def lies_otherwise(full: Program, small: Program) -> list[dict[str, str]]:
    """Weights and moments whose dims lie on other mesh axes than in the full model, with both placements."""
    before, after = _placements(full), _placements(small)
    none = "no such array"
    return [
        {"array": path, "full": before.get(path, none), "scaled": after.get(path, none)}
        for path in dict.fromkeys((*before, *after))
        if before.get(path) != after.get(path)
    ]


def _placements(program: Program) -> dict[str, str]:
    """Where every weight, its gradient, its part of the optimizer's state, and every moment lies, in words."""
    specs = jax.tree.leaves(program.layout.specs, is_leaf=lambda x: hasattr(x, "optimizer"))
    rows = jax.tree.leaves(program.model.weights, is_leaf=lambda x: hasattr(x, "axes"))
    found = {}
    for path, row, spec in zip(weight_paths(program.model.weights), rows, specs, strict=True):
        roles = {"": spec.parameters, ", gradient": spec.gradients, ", optimizer": spec.optimizer}
        found |= {f"{path}{role}": placed(row.axes, each) for role, each in roles.items()}
    moments = jax.tree_util.tree_leaves_with_path(program.abstract.moments)
    names = jax.tree.structure(program.abstract.moments).flatten_up_to(program.logical_axes.moments)
    for (path, leaf), axes in zip(moments, names, strict=True):
        found[f"moment {jax.tree_util.keystr(path, simple=True, separator='.')}"] = placed(axes, leaf.sharding.spec)
    return found


def _describe(small: Config, shape: MeshShape, arch: Architecture) -> str:
    m, t = small.model, small.train
    return (
        f"{shape} --zero {small.zero} on {shape.devices} devices against one device, in fp64, with the model scaled "
        f"down from {arch.parameters:,} parameters to {m.n_layers} layers of width {m.d_model}, {m.n_heads} heads "
        f"({m.n_kv_heads} kv heads), MLP {m.d_ff}, vocabulary {m.vocab_size}, {t.global_batch} sequences of "
        f"{small.data.seq_len} tokens"
    )


def _report(
    console: Console,
    small: Config,
    shape: MeshShape,
    result: Comparison,
    faults: list[str],
    tolerance: float,
    otherwise: int,
) -> None:
    show = lambda error: "-" if error is None else f"{error:.1e}"
    rows = [(t.path, "x".join(map(str, t.shape)), show(t.gradient), show(t.update)) for t in result.tensors]
    console.table("Relative errors", ("tensor", "shape", "gradient", f"{small.optim.name} update"), rows)
    console.line(f"loss: {result.loss!r} on the mesh, {result.expected_loss!r} on one device")
    layout = f"{shape} --zero {small.zero}"
    if faults:
        console.line(f"DIFFERENT: {layout} does not compute the same model as one device.", style="bold red")
        for fault in faults[:10]:
            console.line(f"  {fault}")
        if len(faults) > 10:
            console.line(f"  and {len(faults) - 10} more")
        return
    gradient, update = result.worst_gradient, result.worst_update
    assert update is not None
    said = f", but {otherwise} arrays lie otherwise than in your model (listed below)" if otherwise else ""
    console.line(
        f"SAME: {layout} computes the same model as one device{said}: initial parameters equal bit for bit, loss to "
        f"{result.loss_error:.0e}, every gradient to {gradient.gradient:.0e} (worst: {gradient.path}), the "
        f"{small.optim.name} update to {update.update:.0e} (limits {tolerance:.0e} and "
        f"{max(UPDATE_TOLERANCE, tolerance):.0e}).",
        style="bold yellow" if otherwise else "bold green",
    )
