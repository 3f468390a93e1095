"""Memory of a pipeline against the number of microbatches, compiled for absent GPUs and TPUs; written to the docs.

    python benchmarks/pipeline_memory.py                  all targets (needs the extras gpu and tpu)
    python benchmarks/pipeline_memory.py h100:8           one of them; the others' figures stay

The size of a microbatch is fixed, and so the global batch grows with their number. What should grow is the buffers of
the schedule: slots x one microbatch's input of a stage. Everything else (weights, gradients, what one chunk's backward
keeps, logits) does not depend on the number.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from jaxshard.config import Config, DataConfig, ModelConfig, grouped
from jaxshard.parallel.axes import AXES
from jaxshard.parallel.mesh import resolve_mesh
from jaxshard.training.program import Program, build_program
from jaxshard.xla.absent import mesh_for
from jaxshard.xla.collectives import module_collectives
from jaxshard.xla.compile import Compiled, compile_for
from jaxshard.xla.hardware import parse_target

TARGETS = ("h100:8", "v5e:2x4")
MESH, STAGES, DATA = "pp=4,dp=2", 4, 2
MICROBATCHES = (8, 32, 64)
"""TPUs take minutes a program, and leave the middle one out."""
SCHEDULES = ("1f1b", "interleaved", "gpipe")
WIDTH, LENGTH = 1024, 1024
INPUT = LENGTH * WIDTH * 2
"""Bytes of one microbatch's input of a stage: one sequence of a data group, bf16."""
ROOT = Path(__file__).parent.parent
RESULTS, PAGE = ROOT / "benchmarks/results/pipeline_memory.json", ROOT / "docs/pipeline_measured.md"


def program(target: str, schedule: Any, microbatches: int) -> Program:
    """A small Llama on the target's devices, one sequence a microbatch and data group."""
    model: dict[str, Any] = dict(
        family="llama", vocab_size=4096, d_model=WIDTH, n_layers=8, n_heads=4, n_kv_heads=2, d_ff=3 * WIDTH
    )
    parts = dict(global_batch=microbatches * DATA, microbatches=microbatches, schedule=schedule)
    config = Config(
        model=ModelConfig(**model, attention="xla"),
        data=DataConfig(seq_len=LENGTH),
        **grouped(mesh=MESH, zero=1, precision="bf16", remat="full", **parts),
    )
    where = parse_target(target)
    mesh = mesh_for(where, resolve_mesh(MESH, where.count))
    return build_program(config, list(mesh.devices.flat), mesh=mesh)


def measure(target: str, schedule: str, microbatches: int) -> dict[str, Any]:
    """Compiles one step; temporaries in bytes, slots of the buffers, instructions, traffic on `stage`."""
    built = program(target, schedule, microbatches)
    compiled = compile_for(parse_target(target), built.step, built.abstract, built.abstract_batch())
    assert isinstance(compiled, Compiled) and not compiled.spmd_warnings, compiled
    plan = built.recipe.pipeline
    assert plan is not None
    table = plan.schedule
    kinds: dict[str, int] = {}
    for one in module_collectives(compiled.module, dict(zip(AXES, built.layout.shape.sizes, strict=True))):
        if "stage" in one.axes and one.loops and one.bytes >= INPUT:
            kinds[one.kind] = kinds.get(one.kind, 0) + one.total_bytes
    return {
        "temporaries": compiled.memory.temporaries,
        "slots": table.saved_slots + table.fwd_slots + table.bwd_slots,
        "instructions": compiled.text.count(" = "),
        "stage": kinds,
    }


def table(results: dict[str, Any]) -> str:
    """Markdown: temporaries by target, schedule and number of microbatches, with what the slots predict."""
    header = ["target", "schedule", *(f"M = {M}" for M in MICROBATCHES), "growth", "by the slots", "HLO instructions"]
    rows = [header, ["---"] * len(header)]
    for target in sorted(results, key=TARGETS.index):
        for schedule in SCHEDULES:
            found = [results[target].get(f"{schedule} {M}") for M in MICROBATCHES]
            first, last = found[0], found[-1]
            cells = [f"{one['temporaries'] / 2**20:.2f} MiB" if one else "" for one in found]
            grown = last["temporaries"] - first["temporaries"]
            slots = (last["slots"] - first["slots"]) * INPUT
            rows.append(
                [
                    target,
                    schedule,
                    *cells,
                    f"{grown / 2**20:+.2f} MiB ({100 * grown / first['temporaries']:+.1f} %)",
                    f"{slots / 2**20:+.2f} MiB",
                    f"{first['instructions']:,} / {last['instructions']:,}",
                ]
            )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def write(name: str, text: str) -> None:
    """Puts text between a pair of markers of the page."""
    page = PAGE.read_text()
    start, end = f"<!-- {name} -->\n", "<!-- end -->"
    head, rest = page.split(start)
    PAGE.write_text(f"{head}{start}{text}\n{end}{rest.split(end, 1)[1]}")


def main() -> None:
    """Compiles every case of the targets and writes the table to the docs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", default=TARGETS)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for target in parser.parse_args().targets:
        results[target] = {}
        for schedule in SCHEDULES:
            for microbatches in MICROBATCHES if target.startswith("h") else MICROBATCHES[::2]:
                found = measure(target, schedule, microbatches)
                results[target][f"{schedule} {microbatches}"] = found
                print(target, schedule, microbatches, f"{found['temporaries'] / 2**20:.2f} MiB", flush=True)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    write("memory", table(results))


if __name__ == "__main__":
    main()
