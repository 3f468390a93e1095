"""Time of a step's gradients with pipelines on faked CPU devices, against data parallelism with the same batch.

    python benchmarks/pipeline.py

Faked devices share the machine's cores, so all of them together do one amount of work at a time: what is idle on a
real device costs nothing here, but what it computes in vain does. A pipeline is therefore compared with the work of
its table: every forward half costs S forwards of a chunk and every backward half S backwards, live or not. The
executor's overhead is what is left. It is taken from the processor time of the whole process, which others on the
machine disturb less than the wall time. All cases take two sequences at a time.
"""

import argparse
import os
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from pipeline_memory import write

from jaxshard.config import Config, DataConfig, ModelConfig, grouped
from jaxshard.parallel.schedule import Schedule, bubble_fraction
from jaxshard.training.gradients import gradients
from jaxshard.training.program import Program, build_program

DEVICES, BATCH, LENGTH, LAYERS, WIDTH = 4, 32, 64, 8, 128
RUNS = 6


@dataclass(frozen=True)
class Case:
    """A mesh, accumulation, and the options of its pipeline."""

    mesh: str
    accumulation: int = 1
    schedule: Any = None
    microbatches: int | None = None


CASES = (
    Case("dp=4", 4),
    Case("pp=2,dp=2", 1, "gpipe", 8),
    Case("pp=2,dp=2", 1, "1f1b", 8),
    Case("pp=2,dp=2", 1, "interleaved", 8),
    Case("pp=4", 1, "gpipe", 16),
    Case("pp=4", 1, "1f1b", 16),
    Case("pp=4", 1, "interleaved", 16),
)


def program(case: Case) -> Program:
    """A small Llama; the vocabulary is small, so that layers are nearly all of the work."""
    model: dict[str, Any] = dict(
        family="llama", vocab_size=256, d_model=WIDTH, n_layers=LAYERS, n_heads=4, d_ff=3 * WIDTH
    )
    groups = grouped(
        mesh=case.mesh,
        global_batch=BATCH,
        schedule=case.schedule,
        microbatches=case.microbatches,
        accumulation=case.accumulation,
        remat="none",
    )
    config = Config(model=ModelConfig(**model), data=DataConfig(seq_len=LENGTH), **groups)
    return build_program(config, jax.devices()[:DEVICES])


def batch() -> dict[str, np.ndarray]:
    """A step's arrays [B, T]: random tokens, one document a row."""
    tokens = np.random.default_rng(0).integers(0, 256, (BATCH, LENGTH + 1), dtype=np.int32)
    rows = lambda row: np.broadcast_to(row.astype(np.int32), (BATCH, LENGTH))
    return {
        "inputs": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segments": rows(np.ones(LENGTH)),
        "positions": rows(np.arange(LENGTH)),
    }


def seconds(case: Case) -> tuple[float, float]:
    """Wall and processor time of the gradients, each the smallest of several: others may use the machine meanwhile."""
    built = program(case)
    params, placed = built.init().params, built.place(batch(), case.accumulation)
    zero, one = jnp.zeros((), jnp.int32), jnp.ones(())
    run = jax.jit(partial(gradients, built.recipe), out_shardings=(built.layout.optimizer, None, None))
    compiled = run.lower(params, placed, zero, one).compile()
    wall, processor = [], []
    for _ in range(RUNS + 1):
        began, busy = time.perf_counter(), time.process_time()
        jax.block_until_ready(compiled(params, placed, zero, one))
        wall.append(time.perf_counter() - began)
        processor.append(time.process_time() - busy)
    return min(wall[1:]), min(processor[1:])


def work(table: Schedule) -> float:
    """Forwards of one microbatch through the whole model that all stages together compute, idle ones included."""
    return (table.forward_halves + 3 * table.backward_halves) / table.chunks


def main() -> None:
    """Times every case and writes the table to the docs."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    header = ["mesh", "schedule", "M", "bubble", "wall", "processor", "against dp=4", "work of the table", "overhead"]
    rows = [header, ["---"] * len(header)]
    base = 0.0
    for case in CASES:
        wall, processor = seconds(case)
        base = base or processor
        plan = program(case).recipe.pipeline
        times = [f"{1000 * wall:.0f} ms", f"{1000 * processor:.0f} ms", f"{processor / base:.2f}"]
        cells = ["", "", "", *times, "1.00", ""]
        if plan is not None:
            table = plan.schedule
            # Without a pipeline every microbatch is computed once forward and twice backward.
            ideal = work(table) / (3 * table.microbatches)
            name = table.name + (f" x {table.chunks}" if table.chunks > 1 else "")
            cells = [name, str(table.microbatches), f"{bubble_fraction(table):.1%}", *times]
            cells += [f"{ideal:.2f}", f"{100 * (processor / base / ideal - 1):+.0f} %"]
        rows.append([case.mesh, *cells])
        print(*rows[-1], flush=True)
    about = (
        f"{DEVICES} faked devices on {os.cpu_count()} cores; Llama, {LAYERS} layers, width {WIDTH}, T = {LENGTH}, "
        f"global batch {BATCH}, fp32; jax {jax.__version__}; fastest of {RUNS} steps (`python benchmarks/pipeline.py`)."
    )
    write("time", about + "\n\n" + "\n".join(f"| {' | '.join(row)} |" for row in rows))


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    main()
