"""How long the ledger of a large model takes: llama3-8b, ZeRO-3, 512 absent H100s, compilation included.

python benchmarks/explain.py [--target h100:512]
"""

import argparse
import time

from jaxshard.commands.explain import explain_config
from jaxshard.config import Config, DataConfig, ModelConfig, grouped
from jaxshard.xla.hardware import parse_target


def main() -> None:
    """Explains the large case and prints how long it took."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", default="h100:512")
    target = parser.parse_args().target
    devices = parse_target(target).count
    config = Config(
        model=ModelConfig(preset="llama3-8b"),
        data=DataConfig(seq_len=8192),
        **grouped(mesh=f"dp={devices}", zero=3, global_batch=devices, precision="bf16", remat="full"),
    )
    wall, processor = time.perf_counter(), time.process_time()
    found = explain_config(config, target)
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    found.show()
    print(f"{target}: {wall:.1f} s, {processor:.1f} s of processor time; found = expected: {found.ok}")


if __name__ == "__main__":
    main()
