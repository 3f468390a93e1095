"""Why a collective is there, in words: the purposes that are known, and what any name stack says.

A name stack such as `jit(train_step)/transpose(jvp())/while/body/closed_call/checkpoint/rematted_computation/mlp/...`
says: the backward pass, within a loop, an activation that is computed again, in the MLP. What the program's own names
say beyond that is read in `purposes`.
"""

import re
from dataclasses import dataclass
from typing import Literal

Phase = Literal["forward", "recomputed", "backward", "outside"]
SCOPES = ("embedding", "attention", "mlp", "final_norm", "loss")
SCALARS = 64
"""An array of at most so many elements is bookkeeping: losses, norms, counts, flags."""

PHASES: dict[Phase, str] = {
    "forward": "forward",
    "recomputed": "recomputed for the backward",
    "backward": "backward",
    "outside": "",
}
"""In words."""


@dataclass(frozen=True)
class Place:
    """What a name stack says."""

    phase: Phase
    """outside: neither forward nor backward pass, such as the optimizer."""
    scope: str
    """One of SCOPES, or ""."""
    loops: int
    """Loops around it."""
    operation: str
    """Last part: the primitive."""


FAMILIES = {
    "gather": "ZeRO-3 parameter gather",
    "update": "updated parameters gathered (ZeRO-1/2)",
    "gradient": "gradient reduction",
    "row": "row-parallel output",
    "column": "column-parallel input gradient",
    "sequence": "sequence-parallel gather",
    "embedding": "vocabulary-parallel embedding",
    "loss": "vocabulary-parallel loss",
    "loss-input": "vocabulary-parallel loss, gradient of its input",
    "kv": "gradient of kv heads that all of the model axis hold",
    "vector": "gradient reduction of norms, biases and whole tables",
    "send": "pipeline send",
    "stage": "pipeline, value of one stage to all",
    "optimizer": "arithmetic of the optimizer",
    "bookkeeping": "bookkeeping (loss, norms, counts)",
}
"""What is expected of a training step; the expected traffic is computed family by family."""


def phase_of(op_name: str) -> Phase:
    """The pass that a name stack stands in."""
    if "rematted_computation" in op_name:
        return "recomputed"
    if "transpose(" in op_name:
        return "backward"
    return "forward" if "jvp(" in op_name else "outside"


def place(op_name: str) -> Place:
    """Reads a name stack."""
    parts = [part for part in re.split(r"[/()]", op_name) if part]
    scopes = [part for part in parts if part in SCOPES]
    return Place(
        phase_of(op_name), scopes[-1] if scopes else "", op_name.count("while/body"), parts[-1] if parts else ""
    )


def described(kind: str, op_name: str) -> str:
    """What a collective does and where, for any function: all that is known of one of the user's own."""
    where = place(op_name)
    what = {
        "all-reduce": "sum over devices",
        "reduce-scatter": "sum over devices, each keeps a part",
        "all-gather": "parts gathered",
        "all-to-all": "parts exchanged",
        "collective-permute": "sent to a neighbour",
    }.get(kind, kind)
    operation = "" if where.operation in ("body", "while", "") else where.operation
    loops = "in a loop" if where.loops == 1 else f"in loops {where.loops} deep" if where.loops else ""
    inner = f"in {where.scope}" if where.scope else loops
    shown = ", ".join(detail for detail in (operation, inner, PHASES[where.phase]) if detail)
    return f"{what} ({shown})" if shown else what
