"""What the training loop costs beside the bare compiled step.

    python benchmarks/overhead.py [--mesh dp=4,tp=2] [--rounds 5] [--steps 20]

Runs the same compiled step on the default configuration twice in turn: bare (batches already on the devices, nothing
read until the end), and in the loop (data, placement, metrics, log files, progress lines). Prints the speed of the loop
as a share of the bare step's, the median over rounds; 97 % or more is asked for.
"""

import argparse
import io
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import jax

from jaxshard.commands.train import foresight
from jaxshard.config import Config, grouped
from jaxshard.config.options import Given
from jaxshard.console import Console
from jaxshard.data import TrainLoader
from jaxshard.training.evaluate import Evaluator
from jaxshard.training.loop import Run, run_steps
from jaxshard.training.metrics import open_metrics
from jaxshard.training.signals import StopRequest
from jaxshard.training.start import checkpoints, open_run

ASKED = 0.97


def main() -> None:
    """Times loop and bare step in turn and prints the share."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="dp=4,tp=2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        ratios = measure(options.mesh, options.rounds, options.steps, Path(folder))
    share = statistics.median(ratios)
    print(
        f"jax {jax.__version__}, {jax.default_backend()}, mesh {options.mesh}: the loop runs at {100 * share:.1f} % of"
    )
    print(f"the bare step's speed (median of {len(ratios)}; {100 * min(ratios):.1f} to {100 * max(ratios):.1f} %)")
    raise SystemExit(0 if share >= ASKED else 1)


def measure(mesh: str, rounds: int, steps: int, folder: Path) -> list[float]:
    """Seconds of the bare step over seconds of the loop, one ratio a round."""
    config = Config(output=str(folder), **grouped(mesh=mesh))
    config = replace(
        config,
        train=replace(config.train, steps=steps),
        checkpoint=replace(config.checkpoint, every=0),
        eval=replace(config.eval, every=0),
    )
    dataset, program = open_run(config)
    compiled = program.step.lower(program.abstract, program.abstract_batch()).compile()
    saved = checkpoints(config)
    console = Console(io.StringIO())
    above = foresight(console, Given({}), resume=False)
    loader = iter(TrainLoader(dataset, config.train.global_batch, config.train.seed))
    batches = [program.place(next(loader), config.parallel.accumulation) for _ in range(steps)]
    state = program.init()
    ratios = []
    for round_ in range(rounds + 1):
        begin = time.perf_counter()
        for batch in batches:
            state, metrics = compiled(state, batch)
        jax.block_until_ready((state, metrics))
        bare = time.perf_counter() - begin
        with open_metrics(folder, config.log) as log:
            parts = Run(
                config, program, dataset, folder, saved, log, Evaluator(program, dataset), console, above, 0.0, None
            )
            begin = time.perf_counter()
            state, _ = run_steps(parts, compiled, state, 0, StopRequest())
            jax.block_until_ready(state)
            looped = time.perf_counter() - begin
        if round_:  # the first round warms both up
            ratios.append(bare / looped)
    return ratios


if __name__ == "__main__":
    main()
