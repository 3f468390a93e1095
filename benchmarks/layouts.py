"""The table of layouts that are shown to compute the same numbers as one device, and docs/layouts.md made from it.

    python benchmarks/layouts.py

Every row is one step of a tiny model in fp64: the loss, every gradient and the initial parameters against one device.
`tests/test_layouts.py` holds the same rows to 1e-10.
"""

import argparse
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxshard.config import Config, DataConfig, ModelConfig, grouped
from jaxshard.parallel.mesh import parse_mesh
from jaxshard.training.invariance import Comparison, Outcome, compare, one_step, synthetic_batch, wide_types
from jaxshard.training.program import Program, build_program, class_bytes

LLAMA = dict(
    family="llama", d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=32, vocab_size=100, tie_embeddings=False
)
GPT2 = dict(family="gpt2", d_model=16, n_layers=2, n_heads=4, d_ff=32, vocab_size=100, max_seq_len=16)


@dataclass(frozen=True)
class Variant:
    """What is computed, whatever the layout: model, batch and objective."""

    about: str
    model: dict[str, Any]
    batch: int = 16
    z_loss: float = 0.0
    packed: bool = True


VARIANTS = {
    "gqa": Variant("Llama, 4 heads, 2 kv heads, untied, dropout, z-loss", LLAMA | dict(dropout=0.1), z_loss=1e-3),
    "mha": Variant("Llama, 4 heads, 4 kv heads, tied", LLAMA | dict(n_kv_heads=4, tie_embeddings=True)),
    "mqa": Variant("Llama, 4 heads, 1 kv head, one document a row", LLAMA | dict(n_kv_heads=1), packed=False),
    "odd": Variant(
        "Llama, width 18, 6 heads, 3 kv heads, dropout: sizes that do not divide",
        LLAMA | dict(d_model=18, n_heads=6, n_kv_heads=3, head_dim=4, d_ff=48, dropout=0.1),
        batch=12,
    ),
    "deep": Variant(
        "Llama, 8 layers, 4 heads, 2 kv heads, tied, dropout",
        LLAMA | dict(n_layers=8, tie_embeddings=True, dropout=0.1),
    ),
    "gpt2": Variant("GPT-2, tied, dropout", GPT2 | dict(dropout=0.1)),
    "gpt2-untied": Variant("GPT-2, untied, z-loss", GPT2 | dict(tie_embeddings=False), z_loss=1e-3),
}
LENGTH = 12
NORMS = ("blocks.norm1.scale", "blocks.norm2.scale", "head.norm.scale")


@dataclass(frozen=True)
class Case:
    """One row: a variant on a layout. `train` overrides fields of `TrainConfig` and of `ParallelConfig`."""

    variant: str
    mesh: str = "dp=1"
    zero: int = 0
    train: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        options = [f"{k}={v}" if v is not True else k for k, v in self.train.items() if k != "allow_replicated"]
        return " ".join([self.variant, self.mesh, *([f"zero={self.zero}"] if self.zero else []), *options])

    def config(self) -> Config:
        """The configuration of the row, in float64."""
        variant = VARIANTS[self.variant]
        train = dict(global_batch=variant.batch, z_loss=variant.z_loss, precision="fp64", seed=3)
        return Config(
            model=ModelConfig(**variant.model),
            data=DataConfig(seq_len=LENGTH, pack=variant.packed),
            **grouped(mesh=self.mesh, zero=self.zero, **train | self.train),
        )

    @property
    def devices(self) -> int:
        return int(np.prod(list(parse_mesh(self.mesh).values())))


def _case(variant: str, mesh: str = "dp=1", zero: int = 0, **train: Any) -> Case:
    return Case(variant, mesh, zero, train)


CASES = (
    # Data parallelism and ZeRO.
    _case("gqa", "dp=8"),
    _case("gqa", "dp=8", 1),
    _case("gqa", "dp=8", 2),
    _case("gqa", "dp=8", 3),
    _case("mha", "dp=8", 3),
    _case("gpt2", "dp=4", 3),
    # Tensor parallelism: kv heads that divide, and fewer than tp.
    _case("gqa", "tp=2"),
    _case("gqa", "tp=4"),
    _case("mha", "tp=4"),
    _case("mqa", "tp=4"),
    _case("gqa", "dp=2,tp=4"),
    _case("gqa", "dp=4,tp=2", 1),
    _case("gqa", "dp=4,tp=2", 2),
    _case("gqa", "dp=4,tp=2", 3),
    _case("mqa", "dp=2,tp=2", 3),
    _case("gpt2-untied", "dp=4,tp=2", 3),
    # Replica: sharded inside, reduced across.
    _case("gqa", "replica=2,dp=4", 1),
    _case("gqa", "replica=2,dp=2,tp=2", 3),
    _case("gqa", "replica=4,dp=2", 2, accumulation=2),
    _case("gpt2", "replica=2,dp=2,tp=2", 3, accumulation=2, remat="dots"),
    # Accumulation.
    _case("gqa", accumulation=4),
    _case("gqa", "dp=4", accumulation=4),
    _case("gqa", "dp=4", 1, accumulation=4),
    _case("gqa", "dp=4", 2, accumulation=4),
    _case("gqa", "dp=4", 3, accumulation=4),
    _case("gqa", "dp=4,tp=2", 3, accumulation=2),
    _case("gpt2", "dp=2,tp=4", 1, accumulation=2),
    _case("gpt2-untied", "dp=2", accumulation=8),
    _case("mqa", "replica=2,dp=2", 1, accumulation=2),
    # Sequence parallelism.
    _case("gqa", "tp=4", sequence_parallel=True),
    _case("gqa", "dp=2,tp=4", 2, sequence_parallel=True),
    _case("gqa", "dp=2,tp=2", 1, sequence_parallel=True, accumulation=2),
    _case("mha", "dp=2,tp=4", 2, sequence_parallel=True, accumulation=2),
    _case("mqa", "dp=2,tp=4", 1, sequence_parallel=True, accumulation=2),
    _case("gpt2", "dp=4,tp=2", 2, sequence_parallel=True),
    _case("gpt2", "tp=4", sequence_parallel=True, remat="full"),
    # Rematerialisation.
    _case("gqa", remat="full"),
    _case("gqa", "dp=4", remat="dots"),
    _case("gqa", "dp=4", 1, remat="full"),
    _case("gqa", "dp=2,tp=2", 3, remat="names:query,mlp_hidden"),
    _case("gqa", "dp=4", 3, remat="offload"),
    _case("gqa", "dp=2,tp=4", 3, sequence_parallel=True, accumulation=2, remat="full"),
    # Loss in chunks that divide the sequence, and that do not.
    _case("gqa", "dp=2,tp=2", loss_chunk=5),
    _case("gqa", "dp=4", 1, accumulation=2, loss_chunk=4),
    _case("mha", "dp=4,tp=2", 1, accumulation=2, loss_chunk=5),
    _case("gpt2-untied", "tp=2", sequence_parallel=True, loss_chunk=5),
    # Sizes that do not divide: width by dp, kv heads by tp, vocabulary padded to another size.
    _case("odd", "tp=3"),
    _case("odd", "dp=3", 3),
    _case("odd", "dp=4", 3, allow_replicated=NORMS),
    _case("odd", "dp=2,tp=3", 1),
    _case("odd", "dp=2,tp=3", 3, accumulation=2),
    _case("odd", "tp=6", sequence_parallel=True),
    # Optimizer state in host memory: these rows also make an update.
    _case("gqa", "dp=4,tp=2", 1, offload="optimizer", offload_mode="stream"),
    _case("gpt2", "replica=2,dp=2", 3, offload="optimizer", offload_mode="host"),
    # Pipelines.
    _case("gqa", "pp=2,dp=2,tp=2", 1),
    _case("mha", "pp=2,dp=2", 3, accumulation=2, schedule="gpipe"),
    _case("gpt2", "pp=2,tp=2", sequence_parallel=True, microbatches=4),
    _case("deep", "pp=2,dp=2,tp=2", 2, schedule="interleaved", microbatches=4),
    _case("deep", "pp=2,dp=2,tp=2", 3, schedule="interleaved", microbatches=4, pipeline_gather="step"),
    _case("deep", "pp=2,dp=2,tp=2", 1, schedule="interleaved", offload="optimizer", offload_mode="stream"),
    _case("deep", "pp=2,dp=2,tp=2", 3, schedule="gpipe", accumulation=2, microbatches=2, sequence_parallel=True),
    _case("deep", "replica=2,pp=2,dp=2", 1, accumulation=2, microbatches=2),
    _case("deep", "replica=2,pp=2,dp=2", 3, schedule="interleaved", accumulation=2, microbatches=2),
    _case("deep", "pp=4,dp=2", 1, remat="full", microbatches=8),
    _case("deep", "pp=4,dp=2", 1, schedule="gpipe", microbatches=4),
    _case("deep", "pp=4,dp=2", 1, schedule="interleaved", accumulation=2, microbatches=4),
    _case("deep", "pp=4,tp=2", sequence_parallel=True, microbatches=8),
    _case("deep", "pp=4,tp=2", schedule="gpipe", microbatches=2),
    _case("deep", "pp=4,tp=2", schedule="interleaved", microbatches=4, remat="dots"),
)
"""Every layout that is held to one device."""


def program_of(case: Case) -> Program:
    """The fp64 program of a row, on as many of the devices as it needs."""
    with wide_types():
        return build_program(case.config(), jax.devices()[: case.devices])


def batch_of(variant: str) -> dict[str, np.ndarray]:
    v = VARIANTS[variant]
    return synthetic_batch(v.model["vocab_size"], v.batch, LENGTH, v.packed)


@cache
def reference(variant: str, update: bool = False) -> Outcome:
    """The step of one device, nothing cut, nothing recomputed and nothing offloaded."""
    return one_step(program_of(Case(variant)), batch_of(variant), update)


def measure(case: Case) -> Comparison:
    """Computes a row and compares it with one device; the update too, where the row is about that."""
    update = "offload" in case.train
    return compare(one_step(program_of(case), batch_of(case.variant), update), reference(case.variant, update))


HEADER = """# Layouts that compute the same model

Made by `python benchmarks/layouts.py` (jax {jax}); `tests/test_layouts.py` holds every row to 1e-10.

Every row is one step of a tiny model in fp64 on faked CPU devices, compared with one device that cuts nothing and
recomputes nothing: the initial parameters are equal bit for bit; the error of a gradient is its largest difference,
relative to the tensor's largest entry (or to 1e-6 of the largest of all tensors, for gradients that are zero but for
rounding, as those of key biases). Every batch has documents of uneven length packed into rows, masked targets and a row
of padding. Bytes are those of one device, as the run would hold them in fp32 with AdamW; gradients as they are summed.
With offload the moments lie in its host's memory, and AdamW's update of every parameter is compared too, to 1e-7 of the
largest: it divides by the gradient, so rounding grows. `tests/test_optimizer_layouts.py` holds the other updates, and
20 steps in fp32, whose losses stay within 1e-5 of one device's.

{variants}

All {rows} rows agree: the largest gradient error is {worst:.1e}.
"""
COLUMNS = ("model", "mesh", "ZeRO", "options", "loss", "gradient error", "in", "parameters", "gradients", "moments")


def name_cells(case: Case) -> list[str]:
    """The cells that say which row it is."""
    options = ", ".join(f"{k} {v}" if v is not True else k for k, v in case.train.items() if k != "allow_replicated")
    return [case.variant, case.mesh, str(case.zero), options]


def committed(path: Path = Path(__file__).parent.parent / "docs" / "layouts.md") -> list[dict[str, str]]:
    """The rows of the written table, by column."""
    lines = [line for line in path.read_text().splitlines() if line.startswith("| ")][2:]
    return [dict(zip(COLUMNS, (cell.strip() for cell in line[1:-1].split("|")), strict=True)) for line in lines]


def row_of(case: Case) -> tuple[list[str], float]:
    """Measures a row; returns its cells and its gradient error. Stops where the layout disagrees."""
    result = measure(case)
    faults = result.faults()
    assert not faults, f"{case}: {faults}"
    worst = result.worst_gradient
    narrow = replace(case.config(), train=replace(case.config().train, precision="fp32"))
    sizes = class_bytes(build_program(narrow, jax.devices()[: case.devices]))
    cells = [*name_cells(case), f"{result.loss:.12f}", f"{worst.gradient:.1e}"]
    cells += [worst.path, *(f"{sizes[name]:,}" for name in ("parameters", "gradients", "moments"))]
    return cells, worst.gradient


def main() -> None:
    """Computes every row and writes the table to the docs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(__file__).parent.parent / "docs" / "layouts.md"
    parser.add_argument("--output", type=Path, default=default, help="file to write (default: docs/layouts.md)")
    output = parser.parse_args().output
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    rows, errors = [], []
    for case in CASES:
        cells, error = row_of(case)
        rows.append(cells)
        errors.append(error)
        print(f"{len(rows)}/{len(CASES)} {case}: {error:.1e}", flush=True)
    variants = "\n".join(f"- {name}: {variant.about}" for name, variant in VARIANTS.items())
    line = lambda cells: f"| {' | '.join(cells)} |"
    head = HEADER.format(jax=jax.__version__, variants=variants, rows=len(rows), worst=max(errors))
    rule = ["---:" if name in COLUMNS[-3:] else "---" for name in COLUMNS]
    output.write_text("\n".join([head, line(COLUMNS), line(rule), *map(line, rows), ""]))
    print(f"wrote {output}")


if __name__ == "__main__":
    main()
