"""Did my sharding change my model? One step in fp64 on one device and on the mesh, tensor by tensor.

In fp64 rounding is some 1e-15, so a difference above 1e-10 is a mistake of the layout and not of arithmetic. The
compared numbers are: initial parameters (bit for bit), loss, the gradient of every tensor, and one optimizer update.
"""

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxshard.config import Config
from jaxshard.console import Console
from jaxshard.data.tokenizer import load_tokenizer
from jaxshard.errors import InputError
from jaxshard.models.presets import Architecture, architecture
from jaxshard.parallel.mesh import MeshShape, open_devices, resolve_mesh
from jaxshard.training.gradients import gradients
from jaxshard.training.program import Program, build_program
from jaxshard.training.shrink import shrink

TOLERANCE = 1e-10
"""Of loss and gradients, relative."""
UPDATE_TOLERANCE = 1e-7
"""Of the update, relative to the tensor's largest: AdamW divides by |gradient| + 1e-8, and so may multiply rounding by
1e8 where a gradient is small."""
FLOOR = 1e-6
"""Errors of a tensor are relative to its largest entry, but at least to this share of the largest of all tensors:
some gradients (of key biases) are zero but for rounding."""
NOISE = 1e-11
"""Gradients below this share of the largest of all are taken for rounding; sign-like optimizers (Lion, Adafactor) move
such entries in an arbitrary direction, so their updates are not compared."""

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Outcome:
    """The numbers of one step, whole arrays on the host by path, without the vocabulary's padding.

    Attributes:
        loss: mean cross-entropy over the targets.
        targets: their number.
        parameters: as initialised.
        gradients: of the mean objective, without clipping.
        moved: parameters after one update minus `parameters`; empty when no update was asked for.
        padding: largest absolute entry of the padding in any of these, which must be 0.
    """

    loss: float
    targets: int
    parameters: Arrays
    gradients: Arrays
    moved: Arrays
    padding: float


@dataclass(frozen=True)
class TensorError:
    """Of one tensor: path, shape, and errors relative to one device; `update` is None when it was not compared."""

    path: str
    shape: tuple[int, ...]
    gradient: float
    update: float | None


@dataclass(frozen=True)
class Comparison:
    """A layout against one device.

    Attributes:
        loss: of the layout, and `expected_loss` of one device.
        initial_equal: the initial parameters agree bit for bit.
        padding: largest absolute entry of the vocabulary's padding, which must be 0.
        tensors: errors of every tensor.
    """

    loss: float
    expected_loss: float
    initial_equal: bool
    padding: float
    tensors: list[TensorError]

    @property
    def loss_error(self) -> float:
        return abs(self.loss - self.expected_loss) / max(abs(self.expected_loss), 1e-300)

    @property
    def worst_gradient(self) -> TensorError:
        return max(self.tensors, key=lambda t: t.gradient)

    @property
    def worst_update(self) -> TensorError | None:
        return max((t for t in self.tensors if t.update is not None), key=lambda t: t.update or 0.0, default=None)

    def faults(self, tolerance: float = TOLERANCE) -> list[str]:
        """Returns what disagrees, in words; empty when nothing does. NaN disagrees."""
        found = []
        if not self.initial_equal:
            found.append("initial parameters differ")
        if self.padding != 0:
            found.append(f"the vocabulary's padding holds {self.padding:.1e} instead of 0")
        if not self.loss_error <= tolerance:
            found.append(f"loss {self.loss!r} instead of {self.expected_loss!r}: {self.loss_error:.1e} relative")
        found += [
            f"gradient of {t.path}: {t.gradient:.1e} relative" for t in self.tensors if not t.gradient <= tolerance
        ]
        limit = max(UPDATE_TOLERANCE, tolerance)
        moved = [t for t in self.tensors if t.update is not None and not t.update <= limit]
        return found + [f"update of {t.path}: {t.update:.1e} relative" for t in moved]


@contextlib.contextmanager
def wide_types() -> Iterator[None]:
    """Turns 64-bit types on, and back to what they were."""
    before = jax.config.read("jax_enable_x64")
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)


@cache
def _quick_options(platform: str) -> dict[str, Any]:
    """Options that make XLA's CPU compiler optimise less, as far as this version knows them.

    Partitioning is the same; only the machine code of each loop is slower. Compilation takes a fifth of the time.
    """
    if platform != "cpu":
        return {}
    known = {}
    lowered = jax.jit(lambda: 0).lower()
    for name, value in (
        ("xla_backend_optimization_level", 0),
        ("xla_llvm_disable_expensive_passes", True),
        ("xla_cpu_parallel_codegen_split_count", 1),
        ("xla_cpu_use_fusion_emitters", False),
    ):
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            lowered.compile(compiler_options={name: value})
            known[name] = value
    return known


def compile_quickly(lowered: Any, program: Program) -> Any:
    """Compiles a lowered function with little optimisation, for functions that run a few times only."""
    platform = program.layout.mesh.devices.flat[0].platform
    return lowered.compile(compiler_options=_quick_options(platform))


def synthetic_batch(vocab: int, rows: int, length: int, packed: bool, seed: int = 0) -> Arrays:
    """Random tokens with everything that makes a loss hard to cut: documents of uneven length, masked targets, padding.

    Args:
        vocab: number of token ids.
        rows, length: B and T.
        packed: several documents in a row; else one, padded at its end.
        seed: of the tokens.

    Returns:
        int32 arrays [B, T] inputs, targets, segments, positions. Where there are 4 rows or more, one is all padding.
    """
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, vocab, (rows, length + 1), dtype=np.int32)
    segments = np.zeros((rows, length), np.int32)
    positions = np.zeros((rows, length), np.int32)
    for row in range(rows - 1 if rows >= 4 else rows):
        used = length - (rng.integers(0, length // 3 + 1) if row % 2 else 0)
        inner = rng.integers(1, used, 2) if packed and used > 1 else []
        cuts = sorted({0, int(used), *map(int, inner)})
        for number, (start, end) in enumerate(itertools.pairwise(cuts), 1):
            segments[row, start:end] = number
            positions[row, start:end] = np.arange(end - start)
    masked = (segments == 0) | (rng.random((rows, length)) < 0.2)
    masked[0, 0] = False
    targets = np.where(masked, -1, tokens[:, 1:])
    return {"inputs": tokens[:, :-1], "targets": targets, "segments": segments, "positions": positions}


def one_step(program: Program, batch: Arrays, update: bool = True) -> Outcome:
    """Computes one step of an fp64 program.

    Args:
        program: built with precision fp64.
        batch: host arrays [B, T].
        update: also make one update (a second compilation).
    """
    with wide_types():
        state = compile_quickly(program.init.lower(), program)()
        run = jax.jit(lambda params, batch, step: gradients(program.recipe, params, batch, step, jnp.ones(())))
        placed = program.place(batch, program.config.train.accumulation)
        found, loss, targets = compile_quickly(run.lower(state.params, placed, state.step), program)(
            state.params, placed, state.step
        )
        parameters, found = _host(state.params), _host(found)
        moved = {}
        if update:
            state, _ = compile_quickly(program.step.lower(state, placed), program)(state, placed)
            moved = {path: new - parameters[path] for path, new in _host(state.params).items()}
    rows = {path: row.rows for path, row in _by_path(program.model.weights, lambda x: hasattr(x, "axes")).items()}
    cut = lambda arrays: {path: a[: rows[path]] for path, a in arrays.items()}
    rest = [a[rows[path] :] for arrays in (parameters, found, moved) for path, a in arrays.items()]
    padding = max(float(np.abs(a).max(initial=0)) for a in rest)
    return Outcome(float(loss), int(targets), cut(parameters), cut(found), cut(moved), padding)


def relative_errors(found: Arrays, expected: Arrays) -> dict[str, float]:
    """Largest difference of each tensor, relative to max(largest entry of the tensor, FLOOR x largest of all)."""
    top = max(float(np.abs(a).max()) for a in expected.values())
    scale = lambda a: max(float(np.abs(a).max()), FLOOR * top, 1e-300)
    return {path: float(np.abs(found[path] - a).max()) / scale(a) for path, a in expected.items()}


def compare(found: Outcome, expected: Outcome) -> Comparison:
    """Compares a layout's step with one device's."""
    by_gradient = relative_errors(found.gradients, expected.gradients)
    by_update: dict[str, float] = {}
    if found.moved and expected.moved:
        top = max(float(np.abs(g).max()) for g in expected.gradients.values())
        larger = {path: np.maximum(np.abs(found.gradients[path]), np.abs(g)) for path, g in expected.gradients.items()}
        real = {path: (g == 0) | (g > NOISE * top) for path, g in larger.items()}
        keep = lambda moved: {path: np.where(real[path], a, 0) for path, a in moved.items()}
        by_update = relative_errors(keep(found.moved), keep(expected.moved))
    return Comparison(
        loss=found.loss,
        expected_loss=expected.loss,
        initial_equal=all(np.array_equal(found.parameters[path], a) for path, a in expected.parameters.items()),
        padding=max(found.padding, expected.padding),
        tensors=[
            TensorError(path, g.shape, by_gradient[path], by_update.get(path)) for path, g in expected.gradients.items()
        ],
    )


def _by_path(tree: Any, is_leaf: Any = None) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _host(tree: Any) -> Arrays:
    return {path: np.array(leaf) for path, leaf in _by_path(tree).items()}


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
    small = shrink(config, arch, shape)
    console.line(_describe(small, shape, arch))
    with wide_types():
        program = build_program(small, devices)
        # What one device computes: no mesh, no ZeRO, nothing cut, nothing recomputed.
        plain = replace(small.train, accumulation=1, remat="none", sequence_parallel=False)
        alone = build_program(replace(small, mesh="dp=1", zero=0, train=plain), devices[:1])
    length, batch = small.data.seq_len, small.train.global_batch
    tokens = synthetic_batch(program.model.arch.vocab_size, batch, length, small.data.pack)
    result = compare(one_step(program, tokens), one_step(alone, tokens))
    faults = result.faults(tolerance)
    _report(console, small, shape, result, faults, tolerance)
    for leaf in full.replicated:
        console.line(f"stays whole in the full model: {leaf.path} ({leaf.bytes:,} bytes): {leaf.why}")
    return {
        "mesh": str(shape),
        "zero": config.zero,
        "devices": shape.devices,
        "model": vars(small.model),
        "same": not faults,
        "faults": faults,
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


def _describe(small: Config, shape: MeshShape, arch: Architecture) -> str:
    m, t = small.model, small.train
    return (
        f"{shape} --zero {small.zero} on {shape.devices} devices against one device, in fp64, with the model scaled "
        f"down from {arch.parameters:,} parameters to {m.n_layers} layers of width {m.d_model}, {m.n_heads} heads "
        f"({m.n_kv_heads} kv heads), MLP {m.d_ff}, vocabulary {m.vocab_size}, {t.global_batch} sequences of "
        f"{small.data.seq_len} tokens"
    )


def _report(
    console: Console, small: Config, shape: MeshShape, result: Comparison, faults: list[str], tolerance: float
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
    console.line(
        f"SAME: {layout} computes the same model as one device: initial parameters equal bit for bit, loss to "
        f"{result.loss_error:.0e}, every gradient to {gradient.gradient:.0e} (worst: {gradient.path}), the "
        f"{small.optim.name} update to {update.update:.0e} (limits {tolerance:.0e} and "
        f"{max(UPDATE_TOLERANCE, tolerance):.0e}).",
        style="bold green",
    )
