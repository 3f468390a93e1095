"""The command `explain`, and `jaxshard.explain` for a function of the user's own."""

import importlib.metadata
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from jaxshard.analysis.compare import check
from jaxshard.analysis.explanation import Explanation
from jaxshard.analysis.facts import Facts, facts_of
from jaxshard.analysis.ledger import rows
from jaxshard.analysis.lock import check_same, differences, hold, read_lock
from jaxshard.analysis.own_arrays import held_in_copies, undonated
from jaxshard.analysis.shrink_advice import large_buffers
from jaxshard.commands.explain_options import check_compare, check_options, named_folder
from jaxshard.commands.explain_schedule import show_schedule
from jaxshard.config import Config
from jaxshard.config.options import Given
from jaxshard.console import Console
from jaxshard.errors import InputError, RunError
from jaxshard.parallel.mesh import open_devices
from jaxshard.parallel.resolve import zero_stage
from jaxshard.parallel.rules import Replicated
from jaxshard.planner.confirm import compile_step, tokenizer_size
from jaxshard.training.program import Program
from jaxshard.training.state import state_shardings
from jaxshard.views.report import write_pictures, write_report
from jaxshard.views.tables import show, show_differences
from jaxshard.xla.absent import shape_for
from jaxshard.xla.compile import Compiled, DoesNotFit, compile_for
from jaxshard.xla.flops import computation_flops
from jaxshard.xla.hardware import Target, chip_of, parse_target
from jaxshard.xla.loops import Scope

_PACKAGES = {"gpu": ("jax-cuda13-pjrt", "jax-cuda12-pjrt"), "tpu": ("libtpu",), "cpu": ("jaxlib",)}


class Explained(Explanation):
    """An explanation that can show itself."""

    def show(self, console: Console | None = None) -> None:
        """Prints the ledger and what follows from it."""
        show(self, console or Console())

    def report(self, file: str | Path) -> None:
        """Writes a self-contained HTML page."""
        write_report(self, Path(file))

    def pictures(self, folder: str | Path) -> list[Path]:
        """Writes the page's pictures as PNG files, and returns their names."""
        return write_pictures(self, Path(folder))


def explain(fn: Any, *args: Any, target: str = "local", mesh: Mesh | None = None) -> Explained:
    """Compiles a jitted function and says what travels between devices, how often, where from, and what it takes.

    Args:
        fn: a `jax.jit` function, or one that is wrapped in it here.
        args: its arguments: arrays, or `jax.ShapeDtypeStruct`s with shardings. With those, devices may be absent:
            take them from `jaxshard.xla.absent.devices_for(parse_target("h100:8"))`.
        target: what the devices are; "local" for those of this machine.
        mesh: whose axes are named; by default that of the first argument with a `NamedSharding`.

    Raises:
        InputError: no mesh is given or found, its devices are not the target's, or the program does not fit in memory.
    """
    found = mesh or _mesh_of(args)
    if found is None:
        raise InputError(
            "explain finds no mesh: give mesh=, or arguments whose sharding is a jax.sharding.NamedSharding"
        )
    jitted = fn if hasattr(fn, "lower") else jax.jit(fn)
    hardware = _target_of(found, target)
    sizes = dict(zip(found.axis_names, found.devices.shape, strict=True))
    compiled = _fits(compile_for(hardware, jitted, *args))
    text = ",".join(f"{axis}={size}" for axis, size in sizes.items())
    return replace(
        _explanation(compiled, text, sizes),
        replicated=tuple(held_in_copies(jitted, compiled.executable)),
        undonated=tuple(undonated(jitted, compiled.executable)),
    )


def _target_of(mesh: Mesh, text: str) -> Target:
    """The target, checked against the devices of the mesh."""
    target, kind = parse_target(text), mesh.devices.flat[0].device_kind
    if mesh.size > target.count or chip_of(kind) not in (None, target.chip):
        raise InputError(
            f"explain: target {text!r} is {target.count} x {target.chip.name}, and the mesh is {mesh.size} x {kind}: "
            "name as target= what devices_for was given, such as 'h100:8', or leave it out for devices of this machine"
        )
    return target


def _mesh_of(args: Any) -> Mesh | None:
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(args))
    meshes = (s.mesh for s in shardings if isinstance(s, NamedSharding))
    return next((mesh for mesh in meshes if isinstance(mesh, Mesh)), None)


def explain_config(config: Config, target: str = "local", threshold: int | None = None) -> Explained:
    """Explains the train step of a configuration.

    Raises:
        InputError: the target is not known or its compiler is not installed, the mesh does not fit it, or the program
            does not fit its memory.
        RunError: the compiler fails for another reason.
    """
    hardware = _hardware(config, target)
    try:
        confirmed = compile_step(config, hardware, tokenizer_size(config), buffers=True)
    except jax.errors.JaxRuntimeError as error:
        said = str(error).splitlines()[0][:300]
        raise RunError(
            f"the compiler for {hardware.name} (jax {jax.__version__}) failed, and not for want of memory: {said}. Odd "
            "sizes can be the cause: try multiples of 16 or 128, another layout, or another version of jax"
        ) from error
    return explain_program(confirmed.program, _fits(confirmed.result), threshold)


def explain_program(program: Program, compiled: Compiled, threshold: int | None = None) -> Explained:
    """Explains the compiled step of a program; `threshold` as in `check`."""
    facts = facts_of(program)
    found = _explanation(compiled, str(program.layout.shape), facts.sizes, facts, threshold)
    whole = (*program.replicated, *held_whole(program, compiled))
    return replace(found, zero=program.config.zero, replicated=whole, program=program)


def held_whole(program: Program, compiled: Compiled) -> list[Replicated]:
    """Arrays of the state of which the compiled step takes more on a device than the rules say."""
    taken = compiled.executable.input_shardings[0][0]
    ruled = state_shardings(program.layout, program.abstract, program.logical_axes)
    found = []
    for group in ("params", "masters", "moments"):
        arrays = jax.tree_util.tree_leaves_with_path(getattr(program.abstract, group))
        pairs = zip(*(jax.tree.leaves(getattr(tree, group)) for tree in (taken, ruled)), strict=True)
        for (path, array), (actual, right) in zip(arrays, pairs, strict=True):
            held, meant = (math.prod(s.shard_shape(array.shape)) * array.dtype.itemsize for s in (actual, right))
            if held > meant:
                name = jax.tree_util.keystr(path, simple=True, separator=".")
                why = f"a device takes {held:,} bytes of the {group}, and the rules split them to {meant:,}"
                found.append(Replicated(name, held, why))
    return found


def _hardware(config: Config, target: str) -> Target:
    if target.strip().lower() != "local":
        return parse_target(target)
    devices = open_devices(config.mesh, config.devices, config.fake_devices)
    return parse_target(f"cpu:{len(devices)}" if devices[0].platform == "cpu" else "local")


def _about(config: Config, target: str) -> dict[str, Any]:
    """Target, mesh and ZeRO stage as the explanation will name them."""
    hardware = _hardware(config, target)
    shape = shape_for(hardware, config.mesh)
    return {"target": hardware.name, "mesh": str(shape), "zero": zero_stage(config, shape)}


def _fits(result: Compiled | DoesNotFit) -> Compiled:
    if isinstance(result, DoesNotFit):
        needs = f"{result.needs:,} bytes" if result.needs else "more memory than there is"
        raise InputError(
            f"target {result.target.name}: the program needs {needs} on a device, and {result.available:,} are "
            "available; try --parallel.remat full, a higher --zero, more --parallel.accumulation, or the command plan"
        )
    return result


def _explanation(
    compiled: Compiled, mesh: str, sizes: dict[str, int], facts: Facts | None = None, threshold: int | None = None
) -> Explained:
    found = rows(compiled.module, sizes, facts)
    platform = compiled.target.chip.platform
    why = "" if facts else "what a function of your own should send is not known"
    return Explained(
        target=compiled.target.name,
        platform=platform,
        compiler=_compiler(platform),
        mesh=mesh,
        sizes=sizes,
        zero=None,
        rows=tuple(found),
        check=check(found, facts, platform, threshold) if facts else None,
        not_compared=why,
        memory=compiled.memory,
        usable=compiled.target.chip.usable_bytes,
        flops=computation_flops(Scope(compiled.module, compiled.module.entry)),
        replicated=(),
        undonated=(),
        warnings=compiled.spmd_warnings,
        buffers=tuple(large_buffers(compiled.buffers, facts, compiled.module)),
        facts=facts,
    )


def _compiler(platform: str) -> str:
    for package in _PACKAGES[platform]:
        try:
            return f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return f"jaxlib {importlib.metadata.version('jaxlib')}"


def run(
    config: Config,
    *,
    console: Console,
    target: str,
    report: str | None,
    lock: str | None,
    tolerance: float | None,
    threshold: int | None,
    compare: tuple[str, str] | None,
    schedule: bool,
    png: str | None,
    given: Given,
) -> dict[str, Any]:
    """Explains a configuration's train step, compares two explanations, or draws the pipeline; see `ExplainOptions`."""
    if compare:
        check_compare(target, given)
    folder = None if compare else named_folder(config, given, console)
    if folder is not None and report is None and not schedule:
        report = str(folder / "report.html")
    check_options(target, {"report": report, "lock": lock, "png": png}, given)
    if schedule:
        return show_schedule(config, target, console, png)
    if compare:
        changed = differences(*compare)
        show_differences(compare, changed, console)
        changes = [{"name": name, "first": a, "second": b} for name, a, b in changed.all]
        return {"compared": list(compare), "changes": changes}
    kept = read_lock(lock) if lock else None
    if lock and kept is not None:
        check_same(lock, kept, _about(config, target))  # before minutes of compiling
    console.line(f"compiling the step for {_hardware(config, target).name} ...")
    found = explain_config(config, target, threshold)
    show(found, console)
    result = found.to_dict()
    code = 0 if found.ok else 1
    if lock:
        said, over = hold(result, lock, kept, tolerance)
        console.line(said)
        for sentence in over:
            console.line(f"exceeds the lock: {sentence}", style="red")
        result["exceeded"] = over
        code = 1 if over else code
    if report:
        found.report(report)
        console.line(f"report: {report}")
    if png:
        console.line(f"pictures: {len(found.pictures(png))} in {png}")
    return {**result, "exit_code": code}
