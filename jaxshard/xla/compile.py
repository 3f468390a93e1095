"""Compiles a jitted function for a target, present or absent, and keeps what the compiler says about it."""

import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import jax

from jaxshard.xla.absent import Captured, assumed_cudnn, captured_stderr
from jaxshard.xla.buffers import DUMP_OPTIONS, BufferReport, read_dump
from jaxshard.xla.hardware import Target
from jaxshard.xla.hlo import Module, parse

_UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"(?P<{0}>[\d.]+)(?P<{0}_unit>[BKMGT]?)i?B?"
_REFUSALS = (
    re.compile(rf"\({_SIZE.format('needs')}\) exceeds available \w+ \({_SIZE.format('has')}\)"),
    re.compile(rf"Used {_SIZE.format('needs')} of {_SIZE.format('has')} "),
)
_TOO_MUCH = ("RESOURCE_EXHAUSTED", "overflow in static extent product")
"""Of refusals for want of memory; the second: an array of more bytes than 64 bits count."""
_SPMD = re.compile(r"\[SPMD\] Involuntary full rematerialization\..*")


@dataclass(frozen=True)
class Memory:
    """Bytes on one device; host memory apart from the rest."""

    arguments: int
    outputs: int
    aliased: int
    """Outputs that reuse the memory of donated arguments."""
    temporaries: int
    peak: int
    """Device memory that one run takes: arguments + outputs - aliased + temporaries, as far as the compiler states it
    (TPU without a dump: the largest sum of live buffers, without gaps between them)."""
    host: int
    """Pinned host memory of arguments, outputs and temporaries."""


@dataclass(frozen=True)
class SpmdWarning:
    """The partitioner gave up: it gathers a whole array on every device to change its sharding."""

    operation: str
    op_name: str
    before: str
    after: str
    message: str


@dataclass(frozen=True)
class Compiled:
    """One compiled program."""

    target: Target
    text: str = field(repr=False)
    """HLO text after all optimizations, scheduled."""
    module: Module = field(repr=False)
    memory: Memory
    lower_seconds: float
    compile_seconds: float
    spmd_warnings: tuple[SpmdWarning, ...]
    buffers: BufferReport | None
    """None when it was not asked for, or the compiler wrote none."""
    executable: jax.stages.Compiled = field(repr=False)

    @property
    def fits(self) -> bool:
        """Whether the peak is within the target's memory; True when that is not known."""
        return self.target.chip.usable_bytes == 0 or self.memory.peak <= self.target.chip.usable_bytes


@dataclass(frozen=True)
class DoesNotFit:
    """The compiler refused the program: it needs more device memory than there is."""

    target: Target
    needs: int
    """Bytes on one device; 0 when the compiler does not say."""
    available: int
    message: str
    fits: bool = False


def compile_for(
    target: Target,
    jitted: Any,
    *args: Any,
    host: tuple[Any, Any] | None = None,
    buffers: bool = True,
    options: dict[str, Any] | None = None,
) -> Compiled | DoesNotFit:
    """Lowers and compiles for the devices that the arguments' shardings name.

    Args:
        target: what those devices are.
        jitted: a `jax.jit` function.
        args: arguments, `jax.ShapeDtypeStruct`s with shardings where devices are absent.
        host: (arguments, outputs): trees of bools, or prefixes of them, that say which live in pinned host memory.
            Needed for absent GPUs only: jax drops the memory kind of their shardings without a word, because these
            devices have no memories. Inside the function, move arrays with `jax.device_put(x, jax.memory.Space.Host)`.
        buffers: also read the buffer assignment (largest temporaries); for TPUs it is always read, as only it says
            how many bytes their compiler holds against a device's memory.
        options: XLA compiler options.

    Raises:
        jax.errors.JaxRuntimeError: the compiler failed for a reason other than memory.
    """
    start = time.perf_counter()
    with captured_stderr() as said_lowering, assumed_cudnn(target):
        lowered = jitted.lower(*args)
        if host is not None and target.absent and target.chip.platform == "gpu":
            _mark_host(lowered, args, host)
    lowered_at = time.perf_counter()
    said = Captured()
    buffers = buffers or target.chip.platform == "tpu"
    with tempfile.TemporaryDirectory(prefix="jaxshard-dump-") as folder:
        chosen = {**(options or {}), **({"xla_dump_to": folder, **DUMP_OPTIONS} if buffers else {})}
        try:
            with captured_stderr() as said:
                executable = lowered.compile(compiler_options=chosen or None)
        except RuntimeError as error:  # jax's own is one, and what it makes of too large numbers is only that
            refusal = _refusal(target, str(error))
            if refusal is None:
                raise
            return refusal
        seconds = time.perf_counter() - lowered_at
        text = executable.as_text() or ""
        module = parse(text)
        report = read_dump(Path(folder), module) if buffers else None
    return Compiled(
        target=target,
        text=text,
        module=module,
        memory=_memory(target, executable.memory_analysis(), report),
        lower_seconds=lowered_at - start,
        compile_seconds=seconds,
        spmd_warnings=spmd_warnings(said_lowering.text + said.text),
        buffers=report,
        executable=executable,
    )


def spmd_warnings(stderr: str) -> tuple[SpmdWarning, ...]:
    """Finds "[SPMD] Involuntary full rematerialization" in what the compiler wrote, each operation once."""
    found = {}
    for match in _SPMD.finditer(stderr):
        message = match[0]
        change = re.search(r"from sharding (.*?) to (.*?) efficiently", message)
        operation = re.search(r"HLO operation (%\S+ = \S+ [\w\-]+)", message)
        name = re.search(r'op_name="([^"]*)"', message)
        warning = SpmdWarning(
            operation=operation[1] if operation else "",
            op_name=name[1] if name else "",
            before=change[1] if change else "",
            after=change[2] if change else "",
            message=message,
        )
        found.setdefault((warning.operation, warning.before, warning.after), warning)
    return tuple(found.values())


def _memory(target: Target, stats: Any, report: BufferReport | None) -> Memory:
    arguments, outputs = stats.argument_size_in_bytes, stats.output_size_in_bytes
    aliased = stats.alias_size_in_bytes
    fixed = arguments + outputs - aliased
    host_fixed = stats.host_argument_size_in_bytes + stats.host_output_size_in_bytes - stats.host_alias_size_in_bytes
    host = host_fixed + stats.host_temp_size_in_bytes
    peak = fixed + stats.temp_size_in_bytes
    if target.chip.platform == "tpu":
        # libtpu's temp_size counts on-chip memory, and sometimes the arguments, so it cannot be added up.
        total = report.device_bytes if report else getattr(stats, "total_allocation_bytes", 0)
        # Its peak counts arguments and outputs in host memory, and not the temporaries there.
        peak = total or max(fixed, stats.peak_memory_in_bytes - host_fixed)
    return Memory(arguments, outputs, aliased, max(0, peak - fixed), peak, host)


def _refusal(target: Target, message: str) -> DoesNotFit | None:
    """Reads "exceeds available HBM" and its relatives; None for other failures."""
    if not any(mark in message for mark in _TOO_MUCH):
        return None
    for pattern in _REFUSALS:
        match = pattern.search(message)
        if match:
            needs, has = (int(float(match[key]) * _UNITS[match[f"{key}_unit"]]) for key in ("needs", "has"))
            return DoesNotFit(target, needs, has, message.splitlines()[0])
    return DoesNotFit(target, 0, target.chip.usable_bytes, message.splitlines()[0])


def _mark_host(lowered: jax.stages.Lowered, args: Sequence[Any], host: tuple[Any, Any]) -> None:
    """Writes the memory kind into the lowered program, where the compiler looks for it."""
    from jax.extend.mlir import ir

    module: Any = lowered.compiler_ir("stablehlo")
    main = next(op for op in module.body.operations if op.attributes["sym_name"].value == "main")
    wanted_in = jax.tree.leaves(jax.tree.broadcast(host[0], tuple(args)))
    wanted_out = jax.tree.leaves(jax.tree.broadcast(host[1], lowered.out_info))
    kept = sorted(cast(Any, lowered)._lowering.compile_args["kept_var_idx"])  # arguments that nothing reads are dropped
    before = len(main.attributes["arg_attrs"]) - len(kept)  # constants that jax hands over as arguments come first
    flags = [False] * before + [bool(wanted_in[index]) for index in kept]
    with module.context:
        kind: dict[str, Any] = {"mhlo.memory_kind": ir.StringAttr.get("pinned_host")}
        for name, wanted in (("arg_attrs", flags), ("res_attrs", wanted_out)):
            marked = [
                ir.DictAttr.get({**{entry.name: entry.attr for entry in old}, **(kind if is_host else {})})
                for old, is_host in zip(main.attributes[name], wanted, strict=True)
            ]
            main.attributes[name] = ir.ArrayAttr.get(marked)
