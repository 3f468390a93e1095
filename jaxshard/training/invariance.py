"""One step in fp64, as numbers on the host, and the comparison of two layouts' steps tensor by tensor.

In fp64 rounding is some 1e-15, so a difference above 1e-10 is a mistake of the layout and not of arithmetic. The
compared numbers are: initial parameters (bit for bit), loss, the gradient of every tensor, and one optimizer update.
"""

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxshard.training.gradients import gradients
from jaxshard.training.program import Program

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
        norm: global gradient norm as the step reports it; None when no update was asked for.
        moved: parameters after one update minus `parameters`; empty when no update was asked for.
        padding: largest absolute entry of the padding in any of these, which must be 0.
    """

    loss: float
    targets: int
    parameters: Arrays
    gradients: Arrays
    norm: float | None
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
        parameters: number of parameters, each counted once wherever it lies, and `expected_parameters` of one device.
        initial_equal: the initial parameters agree bit for bit.
        norm_error: of the global gradient norm, relative; 0 when it was not computed.
        padding: largest absolute entry of the vocabulary's padding, which must be 0.
        tensors: errors of every tensor.
    """

    loss: float
    expected_loss: float
    parameters: int
    expected_parameters: int
    initial_equal: bool
    norm_error: float
    padding: float
    tensors: list[TensorError]

    @property
    def loss_error(self) -> float:
        return _relative(self.loss, self.expected_loss)

    @property
    def worst_gradient(self) -> TensorError:
        return max(self.tensors, key=lambda t: t.gradient)

    @property
    def worst_update(self) -> TensorError | None:
        return max((t for t in self.tensors if t.update is not None), key=lambda t: t.update or 0.0, default=None)

    def faults(self, tolerance: float = TOLERANCE) -> list[str]:
        """Returns what disagrees, in words; empty when nothing does. NaN disagrees."""
        found = []
        if self.parameters != self.expected_parameters:
            found.append(f"{self.parameters:,} parameters instead of {self.expected_parameters:,}")
        if not self.initial_equal:
            found.append("initial parameters differ")
        if self.padding != 0:
            found.append(f"the vocabulary's padding holds {self.padding:.1e} instead of 0")
        if not self.loss_error <= tolerance:
            found.append(f"loss {self.loss!r} instead of {self.expected_loss!r}: {self.loss_error:.1e} relative")
        if not self.norm_error <= tolerance:
            found.append(f"global gradient norm: {self.norm_error:.1e} relative")
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
    known: dict[str, Any] = {}
    lowered = jax.jit(lambda: 0).lower()
    for name, value in (
        ("xla_backend_optimization_level", 0),
        ("xla_llvm_disable_expensive_passes", True),
        ("xla_cpu_parallel_codegen_split_count", 1),
        ("xla_cpu_use_fusion_emitters", False),
    ):
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            options: dict[str, Any] = {name: value}
            lowered.compile(compiler_options=options)
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
        placed = program.place(batch, program.config.parallel.accumulation)
        found, loss, targets = compile_quickly(run.lower(state.params, placed, state.step), program)(
            state.params, placed, state.step
        )
        parameters, found = _host(state.params), _host(found)
        moved, norm = {}, None
        if update:
            state, metrics = compile_quickly(program.step.lower(state, placed), program)(state, placed)
            norm = float(metrics["grad_norm"])
            moved = {path: new - parameters[path] for path, new in _host(state.params).items()}
    parts = [_natural(program, arrays) for arrays in (parameters, found, moved)]
    padding = max(float(np.abs(rest).max(initial=0)) for part in parts for _, rest in part.values())
    parameters, found, moved = ({path: a for path, (a, _) in part.items()} for part in parts)
    return Outcome(float(loss), int(targets), parameters, found, norm, moved, padding)


def _natural(program: Program, arrays: Arrays) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Splits the vocabulary's padding off, and brings layers that are stored stage by stage into their order."""
    places = np.argsort(program.model.layer_order)
    rows = {path: row.rows for path, row in _by_path(program.model.weights, lambda x: hasattr(x, "axes")).items()}
    order = lambda path, a: a[places] if path.startswith("blocks.") else a
    return {path: (order(path, a[: rows[path]]), a[rows[path] :]) for path, a in arrays.items()}


def relative_errors(found: Arrays, expected: Arrays) -> dict[str, float]:
    """Largest difference of each tensor, relative to max(largest entry of the tensor, FLOOR x largest of all)."""
    top = max(float(np.abs(a).max()) for a in expected.values())
    scale = lambda a: max(float(np.abs(a).max()), FLOOR * top, 1e-300)
    return {path: float(np.abs(found[path] - a).max()) / scale(a) for path, a in expected.items()}


def _relative(found: float | None, expected: float | None) -> float:
    return 0.0 if found is None or expected is None else abs(found - expected) / max(abs(expected), 1e-300)


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
    count = lambda arrays: sum(a.size for a in arrays.values())
    return Comparison(
        loss=found.loss,
        expected_loss=expected.loss,
        parameters=count(found.parameters),
        expected_parameters=count(expected.parameters),
        initial_equal=all(np.array_equal(found.parameters[path], a) for path, a in expected.parameters.items()),
        norm_error=_relative(found.norm, expected.norm),
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
