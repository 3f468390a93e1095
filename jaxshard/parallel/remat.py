"""Rematerialisation: which activations of a block are kept for the backward pass, and where.

| --parallel.remat | kept                                                           | recomputed      |
|---------------|----------------------------------------------------------------|-----------------|
| none          | everything that the backward pass reads                        | weights' gather |
| dots          | the input of each block and the outputs of its matmuls         | the rest        |
| offload       | the same in host memory, on the device nothing                 | the rest        |
| full          | the input of each block                                        | the block       |
| names:a,b     | the input of each block and the named activations              | the rest        |

A gathered weight (ZeRO-3) is never kept: the backward pass gathers it again.

Names of activations are those of `models.layers.SAVED_NAMES`; docs/remat.md says what each is.
"""

from collections.abc import Callable

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxshard.errors import InputError, nearest

WEIGHT_NAME, INPUT_NAME = "weight", "input"
POLICIES = ("none", "dots", "full", "offload")


def _all_but_weights(primitive, *_, **params) -> bool:
    # A weight's way into use is constraint -> conversion -> name; each link holds the whole gathered weight.
    # Activations that pass a constraint are named afterwards, and are kept under that name.
    if primitive.name == "name":
        return params["name"] != WEIGHT_NAME
    return primitive.name not in ("sharding_constraint", "convert_element_type")


def parse_remat(text: str, names: tuple[str, ...]) -> tuple[str, ...] | str:
    """Returns a policy's name, or the tuple of names to keep.

    Args:
        text: as given to --parallel.remat.
        names: activations that the model names.

    Raises:
        InputError: unknown policy or activation.
    """
    if text in POLICIES:
        return text
    if not text.startswith("names:"):
        raise InputError(
            f"parallel.remat {text!r} is not known{nearest(text, POLICIES)}: {', '.join(POLICIES)} or names:a,b"
        )
    kept = tuple(name.strip() for name in text.removeprefix("names:").split(","))
    for name in kept:
        if name not in names:
            raise InputError(
                f"parallel.remat: no activation is named {name!r}{nearest(name, names)}; there are {', '.join(names)}"
            )
    return kept


def rematerialise(kind: tuple[str, ...] | str, dots: tuple[str, ...]) -> Callable[[Callable], Callable]:
    """Returns the wrapper for the body of a loop over blocks, (residual stream, row) -> (residual stream, result).

    Args:
        kind: result of `parse_remat`.
        dots: names of the matmul outputs.
    """
    policies = jax.checkpoint_policies
    enter = lambda body: body
    if kind == "none":
        policy = _all_but_weights
    elif kind == "full":
        policy = policies.nothing_saveable
    elif kind == "offload":
        policy = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[INPUT_NAME, *dots],
            offload_src="device",
            offload_dst="pinned_host",
        )
        # Only what has a name can be sent away; all that the backward pass reads then comes from there.
        enter = lambda body: lambda x, row: body(checkpoint_name(x, INPUT_NAME), row)
    else:
        policy = policies.save_only_these_names(*(dots if kind == "dots" else kind))
    # Inside a scan the loop itself keeps XLA from merging the two computations.
    return lambda body: jax.checkpoint(enter(body), policy=policy, prevent_cse=False)
