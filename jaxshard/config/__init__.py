"""What a run is, in files, on the command line and as frozen dataclasses. Free of jax."""

from jaxshard.config.groups import *  # noqa: F403
