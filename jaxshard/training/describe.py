"""What a run is about to do, in tables: the mesh, what lies where, and how many bytes a device holds."""

import math

import jax
import jax.numpy as jnp

from jaxshard.console import Console
from jaxshard.parallel.axes import ROWS, axes_text
from jaxshard.parallel.rules import local_shape
from jaxshard.training.pipeline_plan import pipeline_notes
from jaxshard.training.program import Program, class_bytes

GIB = 2**30


def size_text(count: int) -> str:
    """Bytes for people: "22.35 GiB", "1.5 MiB", "12 B"."""
    for unit, size in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:,.2f} {unit}"
    return f"{count} B"


def show_program(program: Program, console: Console) -> None:
    """Prints mesh, weights and bytes of a program."""
    layout, model = program.layout, program.model
    kinds = {device.device_kind for device in layout.mesh.devices.flat}
    console.table(
        f"Mesh {layout.shape}: {layout.shape.devices} x {', '.join(sorted(kinds))}",
        ("axis", "option", "size", "what it does"),
        [(row.name, row.short, layout.shape[row.name], row.holds) for row in ROWS],
    )
    title = f"Weights: {model.arch.parameters:,} parameters, ZeRO-{program.config.zero}"
    console.table(title, *_weights(program, console))
    sizes = class_bytes(program)
    console.line(f"Types: {layout.policy.describe()}")
    low = {"moments", "masters"} if program.config.parallel.offload == "optimizer" else set()
    held = lambda names: ", ".join(f"{n} {size_text(size)}" for n, size in sizes.items() if n in names and size)
    console.line(f"On one device: {held(sizes.keys() - low)}")
    if low:
        console.line(f"In host memory, for each device: {held(low)} ({offload_text(program)})")
    for leaf in program.replicated:
        console.line(f"stays whole: {leaf.path} ({size_text(leaf.bytes)}): {leaf.why}")
    notes, warnings = pipeline_notes(program.recipe.pipeline)
    for line in notes + zero_notes(program):
        console.line(line)
    for line in warnings:
        console.warn(line)


def _weights(program: Program, console: Console) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns and cells of the weights; stacked in two columns where words would be broken to pieces."""
    layout, rows = program.layout, []
    weights = jax.tree_util.tree_leaves_with_path(program.model.weights, is_leaf=lambda x: hasattr(x, "axes"))
    specs = jax.tree.leaves(layout.specs, is_leaf=lambda x: hasattr(x, "optimizer"))
    for (path, row), spec in zip(weights, specs, strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        local = local_shape(row.shape, spec.parameters, layout.shape)
        split, state = (placed(row.axes, each) for each in (spec.parameters, spec.optimizer))
        rows.append((name, _dims(row.shape), split, _dims(local), state))
    columns = ("weight", "shape", "split", "on one device", "optimizer state split")
    if console.has_room(columns, rows):
        return columns, rows
    stacked = [(f"{name}\n{shape}", f"{split}: {local}\nstate: {state}") for name, shape, split, local, state in rows]
    return ("weight, shape", "split: on one device, state: of the optimizer"), stacked


def zero_notes(program: Program) -> list[str]:
    """What --zero does here that one may not expect; [] where there is no such thing.

    Without a data axis it does nothing, and with a pipeline ZeRO-2 and 3 send more over the data axis. Bytes are those
    of one device's layers, whole over the data axis: gradients and parameters in the types in which they are reduced
    and computed with.
    """
    plan, layout, zero = program.recipe.pipeline, program.layout, program.layout.zero
    if zero and layout.shape.data == 1:
        return [f"--zero {zero} changes nothing here: it splits state over the data axis, and dp = 1"]
    if plan is None or zero < 2:
        return []
    local = lambda a, s: math.prod(local_shape(a.shape, s.base, layout.shape))
    values = sum(jax.tree.leaves(jax.tree.map(local, program.abstract.params["blocks"], layout.specs["blocks"])))
    gradients = values * jnp.dtype(layout.policy.gradients).itemsize
    parameters = values * jnp.dtype(layout.policy.compute).itemsize
    table, parts = plan.schedule, program.config.parallel.accumulation
    backward = parts * table.backward_halves
    reduced = size_text(backward * gradients // table.chunks)
    lines = [
        f"ZeRO-{zero} with a pipeline reduces gradients in each of {backward} backward halves: {reduced} a step "
        f"where --zero 1 reduces {size_text(gradients)} once, and holds as much"
    ]
    if zero == 3:
        gathers = parts * (table.forward_halves + 2 * table.backward_halves)
        tick = f"in each tick: {size_text(gathers * parameters // table.chunks)} a step, one layer held at a time"
        once = f"once a step: {size_text(parameters)}, held whole"
        now, other = (tick, once) if plan.gather == "tick" else (once, tick)
        name = "step" if plan.gather == "tick" else "tick"
        lines.append(f"Parameters are gathered {now}; --parallel.pipeline_gather {name} gathers them {other}")
    return lines


def offload_text(program: Program) -> str:
    """How the update reaches state in host memory."""
    computed = program.config.parallel.offload_mode == "host"
    return "update computed on the host" if computed else "update streamed through the device, layer by layer"


def memory_line(compiled: jax.stages.Compiled) -> str:
    """The compiler's own account of one device's memory."""
    stats = compiled.memory_analysis()
    if stats is None:
        return "this backend does not report the memory of compiled programs"
    arguments, outputs = stats.argument_size_in_bytes, stats.output_size_in_bytes
    aliased, temporary = stats.alias_size_in_bytes, stats.temp_size_in_bytes
    total = arguments + outputs - aliased + temporary
    host = stats.host_argument_size_in_bytes + stats.host_temp_size_in_bytes
    below = f" and {size_text(host)} in host memory" if host else ""
    return (
        f"compiled: {size_text(total)} on one device{below} (arguments {size_text(arguments)}, temporaries "
        f"{size_text(temporary)}, outputs in place {100 * aliased / max(outputs, 1):.0f} %)"
    )


def _dims(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "1"


def placed(axes: tuple[str | None, ...], spec: jax.sharding.PartitionSpec) -> str:
    """Which dims lie on which mesh axes: "heads on tp, embed on dp"."""
    parts = []
    for name, entry in zip(axes, tuple(spec) + (None,) * (len(axes) - len(spec)), strict=True):
        if entry is not None:
            parts.append(f"{name or 'dim'} on {axes_text((entry,) if isinstance(entry, str) else entry)}")
    return ", ".join(parts) or "whole"


def total_bytes(program: Program) -> int:
    """Bytes of the whole state, counted once."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(program.abstract))
