"""How long planning takes: seconds of the whole search for llama3-8b on 64 H100s, and of confirming the best three.

python benchmarks/planner.py [--confirm 3]
"""

import argparse
import time

from jaxshard.analysis.memory import estimate
from jaxshard.config import Config, DataConfig, ModelConfig, TrainConfig
from jaxshard.config.options import Given
from jaxshard.models.presets import architecture
from jaxshard.planner import planner, ranking
from jaxshard.planner.advice import reasons
from jaxshard.planner.search import Pins, apply
from jaxshard.xla.hardware import parse_target


def main() -> None:
    """Times the search, and the search with confirmation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--confirm", type=int, default=0)
    parser.add_argument("--target", default="h100:64")
    args = parser.parse_args()
    config = Config(
        model=ModelConfig(preset="llama3-8b"),
        data=DataConfig(seq_len=8192),
        train=TrainConfig(global_batch=512, precision="bf16"),
    )
    arch, target = architecture(config.model), parse_target(args.target)
    start, busy = time.perf_counter(), time.process_time()
    found = ranking.search(config, arch, target, Pins({}, {}))
    why = reasons(found, found.fitting[0])
    print(
        f"search of {len(found.order):,} layouts on {target.name}: {time.perf_counter() - start:.2f} s "
        f"({time.process_time() - busy:.2f} s of processor), {len(why)} reasons"
    )
    start = time.perf_counter()
    for candidate in found.order[:1000]:
        estimate(apply(config, candidate), arch, candidate.shape, target.chip.platform)
    print(f"memory in closed form: {time.perf_counter() - start:.2f} ms per layout (1,000 of them)")
    if args.confirm:
        start = time.perf_counter()
        plans, notes = planner.offered(found, Given({}), args.confirm)
        compiled = sum(plan.compiled_peak is not None for plan in plans)
        print(f"{compiled} plans confirmed by the compiler: {time.perf_counter() - start:.1f} s", *notes, sep="\n")


if __name__ == "__main__":
    main()
