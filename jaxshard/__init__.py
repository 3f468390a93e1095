"""Train a language model on a device mesh, and know beforehand what it will move, hold and take.

`jaxshard.explain(fn, *args)` says what a jitted function of your own sends between devices, and why.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxshard.commands.explain import explain

__all__ = ["explain"]


def __getattr__(name: str) -> Any:
    # jax is imported when something that needs it is asked for, not with the package.
    if name == "explain":
        from jaxshard.commands.explain import explain

        return explain
    raise AttributeError(f"module 'jaxshard' has no attribute {name!r}")
