"""Names that the program gives its own parts, for whoever reads it compiled: profilers, and the ledger of traffic.

jax writes the scopes around an operation into the compiled program, with `jvp(...)` around the forward pass and
`transpose(jvp(...))` around the backward pass. A scope named after a weight's path stands wherever that weight is
gathered, used, reduced or updated; another, in front of it, says for what. Scopes change no number and no layout.
"""

from collections.abc import Callable
from typing import Any

import jax

GATHER = "weight_gather"
"""A stored weight is made whole for use."""
REDUCE = "grad_reduce"
"""A gradient is brought into the layout in which it is summed or read by the optimizer."""
UPDATE = "param_update"
"""New parameters are brought into the layout in which they are stored."""
INPUT_GRAD, WEIGHT_GRAD = "input_grad", "weight_grad"
"""The two products of a weight's backward pass; the one of its forward pass bears the weight's path alone."""
LAYOUT = "layout"
"""An activation is brought into a layout; the names of its dims follow, such as batch,sequence,embed."""
OPTIMIZER = "optimizer"
"""Arithmetic of the optimizer."""
GRAD_NORM, METRICS = "grad_norm", "metrics"
SEND = "pipeline_send"
STAGE_VALUE = "stage_value"
"""One stage's value is made known to all stages."""
KV_HEADS = "kv_heads"
"""Keys and values on their way to attention, which several devices may hold whole."""


def path_of(keys: Any, under: str = "") -> str:
    """The path of a leaf, such as blocks.mlp.up; `under` is the part of it above the tree."""
    path = jax.tree_util.keystr(keys, simple=True, separator=".")
    return f"{under}.{path}" if under else path


def map_named(
    purpose: str, f: Callable, tree: Any, *rest: Any, under: str = "", is_leaf: Callable[[Any], bool] | None = None
) -> Any:
    """`jax.tree.map` over a tree of weights or what belongs to them, each leaf within the scope purpose/path."""

    def named(keys, *leaves):
        with jax.named_scope(f"{purpose}/{path_of(keys, under)}"):
            return f(*leaves)

    return jax.tree_util.tree_map_with_path(named, tree, *rest, is_leaf=is_leaf)
