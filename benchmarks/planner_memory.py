"""How well the closed form of device memory agrees with the compiler: a table of cases, compiled for absent chips.

    python benchmarks/planner_memory.py --output docs/planner-memory.md            all cases whose compiler is there
    python benchmarks/planner_memory.py --cases 0 5 12 --store results.json         some of them, kept for later

Results of several runs (GPU and TPU compilers may live in different environments) meet in the file given to --store;
--table prints the table from it without compiling. Sizes are real ones: compile time does not depend on the width.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jax

from jaxshard.analysis.memory import estimate
from jaxshard.analysis.state_bytes import state_bytes
from jaxshard.config import Config, DataConfig, ModelConfig, grouped
from jaxshard.models.presets import architecture
from jaxshard.parallel.mesh import resolve_mesh
from jaxshard.planner.confirm import compile_step, compiler_missing
from jaxshard.xla.compile import DoesNotFit
from jaxshard.xla.hardware import Target, parse_target


@dataclass(frozen=True)
class Case:
    """One layout to compile."""

    target: str
    preset: str
    mesh: str
    zero: Literal[0, 1, 2, 3]
    batch: int
    seq_len: int
    train: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    """Where it differs from the preset."""

    @property
    def key(self) -> str:
        more = " ".join(f"{name}={value}" for name, value in self.train.items())
        return (
            f"{self.target} {self.preset} {self.mesh} zero={self.zero} B={self.batch} T={self.seq_len} {more}".strip()
        )

    @property
    def config(self) -> Config:
        """The configuration of the case."""
        return Config(
            model=ModelConfig(preset=self.preset, **self.model),
            data=DataConfig(seq_len=self.seq_len),
            **grouped(mesh=self.mesh, zero=self.zero, **{"precision": "bf16", "global_batch": self.batch} | self.train),
        )


CASES = (
    Case("h100:64", "llama3-8b", "dp=64", 3, 64, 8192, {"remat": "full"}),
    Case("h100:64", "llama3-8b", "dp=64", 3, 64, 8192, {"remat": "dots"}),
    Case("h100:64", "llama3-8b", "dp=64", 3, 64, 4096, {"remat": "none"}),
    Case("h100:8", "llama3-8b", "dp=2,tp=4", 1, 8, 4096, {"remat": "full", "accumulation": 2}),
    Case("h100:8", "llama3-8b", "tp=8", 0, 2, 8192, {"remat": "dots", "sequence_parallel": True}),
    Case("h100:16", "llama3-8b", "dp=4,tp=4", 2, 16, 4096, {"remat": "dots", "accumulation": 2}),
    Case("h100:8", "gpt2-1.5b", "dp=8", 0, 64, 1024, {"remat": "none"}),
    Case("h100:8", "gpt2-1.5b", "dp=8", 1, 128, 1024, {"remat": "full", "accumulation": 2}),
    Case("h100:1", "llama3.2-1b", "dp=1", 0, 4, 4096, {"remat": "none"}),
    Case("h100:8", "llama3-8b", "pp=4,dp=2", 0, 32, 4096, {"remat": "full", "microbatches": 8}),
    Case("h100:8", "llama3-8b", "pp=4,dp=2", 0, 32, 4096, {"remat": "dots", "microbatches": 8}),
    Case("h100:8", "llama3-8b", "pp=2,dp=2,tp=2", 1, 32, 4096, {"remat": "full", "microbatches": 8}),
    Case("h100:8", "llama3-8b", "pp=2,dp=2,tp=2", 1, 32, 4096, {"remat": "dots", "microbatches": 8}),
    Case("h100:8", "llama3-8b", "pp=2,dp=2,tp=2", 0, 32, 4096, {"remat": "full", "microbatches": 8}),
    Case(
        *("h100:8", "llama2-7b", "pp=2,tp=4", 0, 16, 4096),
        {"remat": "dots", "microbatches": 8, "schedule": "interleaved", "virtual_stages": 2},
    ),
    Case("h100:8", "llama2-7b", "dp=8", 3, 8, 2048, {"remat": "full", "precision": "fp32"}),
    Case("h100:64", "llama3-70b", "dp=8,tp=8", 3, 16, 4096, {"remat": "full"}),
    Case("h100:64", "llama3-8b", "dp=64", 3, 512, 8192, {"remat": "none", "accumulation": 8}),
    Case("h100:64", "llama3-8b", "dp=64", 2, 512, 8192, {"remat": "dots", "accumulation": 4}),
    Case("h100:64", "llama3-8b", "replica=2,dp=32", 2, 512, 8192, {"remat": "dots", "accumulation": 4}),
    Case("h100:8", "tinyllama-1.1b", "dp=8", 1, 32, 2048, {"remat": "none"}),
    Case("h100:8", "tinyllama-1.1b", "dp=4,tp=2", 0, 32, 2048, {"remat": "full"}),
    Case("h100:8", "llama2-7b", "dp=8", 2, 16, 4096, {"remat": "full"}),
    Case("h100:8", "llama2-13b", "dp=2,tp=4", 3, 8, 4096, {"remat": "dots", "sequence_parallel": True}),
    Case("h100:8", "gpt2-774m", "dp=8", 3, 64, 1024, {"remat": "dots", "accumulation": 2}),
    Case("v5e:4x4", "tinyllama-1.1b", "dp=16", 3, 32, 2048, {"remat": "full"}),
    Case("v5e:4x4", "tinyllama-1.1b", "dp=16", 3, 32, 2048, {"remat": "dots"}),
    Case("v5e:4x4", "tinyllama-1.1b", "dp=16", 2, 16, 1024, {"remat": "none"}),
    Case("v5e:4x4", "llama3.2-1b", "dp=4,tp=4", 1, 32, 2048, {"remat": "full", "accumulation": 2}),
    Case("v5e:2x4", "gpt2-355m", "dp=8", 0, 64, 1024, {"remat": "dots"}),
    Case("v5p:4x4x4", "llama3-8b", "dp=64", 3, 64, 4096, {"remat": "full"}),
    Case("v5p:2x2x4", "llama3-8b", "dp=4,tp=4", 2, 16, 4096, {"remat": "dots"}),
    Case("v5e:2x2", "tinyllama-1.1b", "pp=2,dp=2", 1, 16, 1024, {"remat": "full", "microbatches": 8}),
    Case("v5e:2x4", "gpt2-355m", "pp=4,dp=2", 0, 32, 1024, {"remat": "dots", "microbatches": 8}),
    Case(
        *("v5e:2x2", "llama3.2-1b", "pp=2,tp=2", 0, 16, 1024),
        {"remat": "full", "microbatches": 8, "schedule": "interleaved", "virtual_stages": 2},
    ),
    Case("v5p:2x2x1", "llama3.2-1b", "pp=4", 0, 16, 2048, {"remat": "full", "microbatches": 16}),
    Case("v5p:2x2x1", "llama3.2-1b", "pp=2,dp=2", 1, 32, 2048, {"remat": "dots", "microbatches": 8}),
    Case("h100:1", "llama3.2-1b", "dp=1", 0, 1, 16384, {"remat": "full"}),
    Case("h100:1", "llama3.2-1b", "dp=1", 0, 1, 16384, {"remat": "none"}),
    Case("h100:1", "llama3.2-1b", "dp=1", 0, 2, 32768, {"remat": "full"}),
    Case("h100:1", "llama3.2-1b", "dp=1", 0, 1, 65536, {"remat": "full"}),
    Case("h100:1", "llama3.2-1b", "dp=1", 0, 1, 131072, {"remat": "full"}),
    Case("h100:8", "llama3.1-8b", "dp=2,tp=4", 2, 4, 32768, {"remat": "full", "accumulation": 2}),
    Case("h100:8", "llama3.1-8b", "pp=2,tp=4", 0, 4, 32768, {"remat": "full", "microbatches": 4}),
    Case("h100:8", "llama3.1-8b", "dp=2,tp=4", 3, 2, 131072, {"remat": "full"}),
    Case("h100:32", "llama3.1-8b", "dp=8,tp=4", 3, 8, 131072, {"remat": "full", "sequence_parallel": True}),
    Case("v5e:4x4", "llama3.2-3b", "dp=16", 3, 16, 4096, {"remat": "full"}),
    Case("v5e:4x4", "llama3.2-3b", "dp=16", 3, 32, 2048, {"remat": "full"}),
)


def predicted(case: Case, target: Target) -> tuple[int, int, str]:
    """(arguments, peak, moment) of the closed form."""
    arch = architecture(case.config.model, seq_len=case.seq_len)
    shape = resolve_mesh(case.mesh, target.count)
    memory = estimate(case.config, arch, shape, target.chip.platform)
    return state_bytes(case.config, arch, shape).arguments, memory.total, memory.moment


def measure(case: Case) -> dict[str, Any]:
    """What the compiler says."""
    target = parse_target(case.target)
    start = time.perf_counter()
    result = compile_step(case.config, target, buffers=True).result
    seconds = round(time.perf_counter() - start)
    if isinstance(result, DoesNotFit):
        return {"arguments": None, "peak": result.needs, "fits": False, "seconds": seconds, "jax": jax.__version__}
    memory = result.memory
    return {
        "arguments": memory.arguments,
        "peak": memory.peak,
        "fits": result.fits,
        "seconds": seconds,
        "jax": jax.__version__,
    }


def table(found: dict[str, dict[str, Any]]) -> str:
    """Markdown: every measured case with its error, and the summary."""
    lines = [
        "| case | arguments, bytes | off by | peak, GiB | closed form | error % | fits | moment |",
        "|---|---|---|---|---|---|---|---|",
    ]
    errors, off, agree = [], 0, 0
    for case in CASES:
        real = found.get(case.key)
        if real is None:
            continue
        target = parse_target(case.target)
        arguments, peak, moment = predicted(case, target)
        error = 100 * (peak / real["peak"] - 1)
        errors.append(abs(error))
        difference = None if real["arguments"] is None else arguments - real["arguments"]
        off += bool(difference)
        fits = peak <= target.chip.usable_bytes
        really = real["arguments"] is not None and real["peak"] <= target.chip.usable_bytes
        agree += fits == really
        lines.append(
            f"| {case.key} | {real['arguments'] or 0:,} | {'-' if difference is None else difference} | "
            f"{real['peak'] / 2**30:.2f} | {peak / 2**30:.2f} | {error:+.1f} | {'yes' if really else 'no'} | "
            f"{moment} |"
        )
    summary = (
        f"{len(errors)} cases: error of the peak {statistics.median(errors):.1f} % in the median, {max(errors):.1f} % "
        f"at worst; arguments differ in {off}; fits or not is the same in {agree} of {len(errors)}."
    )
    versions = ", ".join(sorted({real["jax"] for real in found.values()}))
    return "\n".join([summary, "", *lines, "", f"Compiled with jax {versions}."])


HEAD = """# Memory: the closed form against the compiler

`python benchmarks/planner_memory.py` compiles every case for chips that are absent and compares the compiler's figures
with `jaxshard/analysis/memory.py`, which knows shapes and rules only. *Arguments* is the state and the batch on one
device; *off by* is 0 on GPUs, while TPUs pad small arrays to whole tiles. *Peak* is all that one run takes. On GPUs the
compiler never refuses: *fits* compares its peak with what jax's pool may take of the chip's memory.

"""


def command(
    description: str | None,
    cases: Sequence[Case],
    measure: Callable[[Case], dict[str, Any]],
    table: Callable[[dict[str, dict[str, Any]]], str],
    head: str,
) -> None:
    """Compiles the cases that the store lacks, prints the table, and writes it below `head` where --output says."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, nargs="*", help="numbers of cases; all by default")
    parser.add_argument("--store", type=Path, help="JSON file that results are added to")
    parser.add_argument("--table", action="store_true", help="compile nothing")
    parser.add_argument("--output", type=Path, help="Markdown file to write")
    args = parser.parse_args()
    found = json.loads(args.store.read_text()) if args.store and args.store.exists() else {}
    for number in () if args.table else args.cases or range(len(cases)):
        case = cases[number]
        if case.key in found or compiler_missing(parse_target(case.target)):
            continue
        found[case.key] = measure(case)
        print(number, case.key, found[case.key], flush=True)
        if args.store:
            args.store.write_text(json.dumps(found, indent=1) + "\n")
    text = table(found)
    print(text)
    if args.output:
        args.output.write_text(head + text + "\n")


if __name__ == "__main__":
    command(__doc__, CASES, measure, table, HEAD)
