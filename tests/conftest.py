"""Eight faked CPU devices for every test, whatever this machine has and whatever its environment says."""

import os
import signal

# What would choose other devices, join other processes, silence compilers, or colour what is compared.
_OTHERS = (
    *("JAX_", "XLA_", "TPU_", "LIBTPU_", "TF_CPP_", "SLURM_", "OMPI_", "PMI_"),
    *("TTY_", "FORCE_COLOR", "NO_COLOR", "COLUMNS", "LINES"),
)
for _name in [name for name in os.environ if name.startswith(_OTHERS)]:
    del os.environ[_name]
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TERM"] = "xterm-256color"  # what tests take for a terminal can move its cursor
# On a busy machine a faked device may keep the others waiting for longer than the 40 s after which XLA aborts.
os.environ["XLA_FLAGS"] = "--xla_cpu_collective_call_terminate_timeout_seconds=1200"

# A shell lets what it starts in the background ignore Ctrl-C, and the programs that tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

import jax  # noqa: E402

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
# Now, so that no test is the first one that asks for devices and gets another number of them.
assert len(jax.devices()) == 8
