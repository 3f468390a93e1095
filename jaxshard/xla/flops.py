"""Matrix FLOPs of instructions of a compiled program: dots, convolutions, library calls, and what calls them.

A multiply and an add count as two. Element-wise work is left out: it is bound by memory, not by arithmetic.
"""

import math
import re

from jaxshard.xla.hlo import Array, Computation, Instruction, Module, Shape, leaves
from jaxshard.xla.loops import Scope, inner_scopes


def instruction_flops(scope: Scope, instruction: Instruction) -> float:
    """FLOPs of one run of `instruction`, with everything that it calls (loops by trip count, branches by the largest).

    Loops whose trip count is decided while running count once.
    """
    if instruction.opcode in ("while", "call", "async-start"):
        inner = [found for found in inner_scopes(scope, instruction) if found.kind != "condition"]
        return sum(computation_flops(found) * (found.runs // max(1, scope.runs)) for found in inner)
    if instruction.opcode == "conditional":
        return max((computation_flops(found) for found in inner_scopes(scope, instruction)), default=0.0)
    return plain_flops(scope.module, scope.computation, instruction)


def computation_flops(scope: Scope) -> float:
    """FLOPs of one run of a whole computation."""
    return sum(instruction_flops(scope, instruction) for instruction in scope.computation.instructions)


def plain_flops(module: Module, computation: Computation, instruction: Instruction) -> float:
    """FLOPs of one dot, convolution, matrix library call, or fusion of them."""
    if instruction.opcode == "dot":
        return _dot(computation, instruction, r"lhs_contracting_dims=\{([\d,]*)\}")
    if instruction.opcode == "convolution":
        return _convolution(computation, instruction)
    if instruction.opcode == "fusion" and instruction.called:
        fused = module.computations[instruction.called[0]]
        return sum(plain_flops(module, fused, inner) for inner in fused.instructions)
    if instruction.opcode == "custom-call":
        target = instruction.attribute("custom_call_target") or ""
        if target.startswith(("__cublas$", "__triton_gemm", "__onednn$matmul")):
            return _dot(computation, instruction, r'"lhs_contracting_dimensions": ?\[([^\]]*)\]')
        if target.startswith("__cudnn$fmha"):
            return _attention(computation, instruction, backward="Backward" in target)
    return 0.0


def _first(shape: Shape) -> Array:
    return next(leaves(shape))


def _dot(computation: Computation, instruction: Instruction, pattern: str) -> float:
    """2 x result elements x contracted sizes of the left operand."""
    left = _first(computation.shape_of(instruction.operands[0]))
    found = re.search(pattern, instruction.attributes)
    contracted = [int(dim) for dim in re.findall(r"\d+", found[1])] if found else [len(left.dims) - 1]
    return 2.0 * _first(instruction.shape).elements * math.prod(left.dims[dim] for dim in contracted)


def _convolution(computation: Computation, instruction: Instruction) -> float:
    """2 x result elements per position x contributing (output, kernel) positions x input features.

    TPU programs write matrix products as convolutions, batched ones with windows that mostly fall into padding or
    dilation: only positions that meet real data count (as in openxla/xla, HloCostAnalysis::HandleConvolution).
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    if not labels:
        return 0.0
    left = _first(computation.shape_of(instruction.operands[0]))
    kernel = _first(computation.shape_of(instruction.operands[1]))
    result = _first(instruction.shape)
    window = {
        key: _window(instruction.attributes, key) for key in ("size", "stride", "pad", "lhs_dilate", "rhs_dilate")
    }
    spatial = sorted(label for label in labels[1] if label.isdigit())
    positions = 1
    for index, label in enumerate(spatial):
        positions *= _contributing(
            left.dims[labels[1].index(label)],
            kernel.dims[labels[2].index(label)],
            result.dims[labels[3].index(label)],
            stride=int(_at(window["stride"], index, "1")),
            low=int(_at(window["pad"], index, "0_0").split("_")[0]),
            left_step=int(_at(window["lhs_dilate"], index, "1")),
            kernel_step=int(_at(window["rhs_dilate"], index, "1")),
        )
    features = kernel.dims[labels[2].index("i")]
    outputs = result.dims[labels[3].index("b")] * result.dims[labels[3].index("f")]
    batches = re.search(r"batch_group_count=(\d+)", instruction.attributes)
    return 2.0 * outputs * positions * features / (int(batches[1]) if batches else 1)


def _window(attributes: str, key: str) -> list[str]:
    found = re.search(rf"window=\{{[^}}]*\b{key}=([\w\-]+)", attributes)
    return found[1].split("x") if found else []


def _at(values: list[str], index: int, default: str) -> str:
    return values[index] if index < len(values) else default


def _contributing(
    left: int, kernel: int, result: int, *, stride: int, low: int, left_step: int, kernel_step: int
) -> int:
    """Pairs (output position, kernel position) of one spatial dim that meet an element of the left operand."""
    if kernel == 1 and stride == 1 and low == 0 and left_step == 1:
        return result
    if kernel * result > 1_000_000:  # an ordinary large window: nearly all positions count
        return min(kernel, left) * result
    last = (left - 1) * left_step
    found = 0
    for out in range(result):
        for position in range(kernel):
            at = out * stride + position * kernel_step - low
            found += 0 <= at <= last and at % left_step == 0
    return found


def _attention(computation: Computation, instruction: Instruction, *, backward: bool) -> float:
    """cuDNN fused attention: two products of [B,H,T,S] by D forward, five backward; causal masks are not halved."""
    found = re.search(r'"intermediate_tensor_shape": ?\{[^\[]*"dimensions": ?\[([^\]]*)\]', instruction.attributes)
    if not found:
        return 0.0
    scores = math.prod(int(dim) for dim in re.findall(r"\d+", found[1]))
    head_dim = _first(computation.shape_of(instruction.operands[0])).dims[-1]
    return 2.0 * scores * head_dim * (5 if backward else 2)
