"""Where plans stop fitting: the planner's verdict and the compiler's, with limits one byte below its peak and at it.

    python benchmarks/planner_edge.py --output docs/planner-edge.md            all cases whose compiler is there
    python benchmarks/planner_edge.py --cases 0 5 12 --store results.json      some of them, kept for later

The store and --table work as those of benchmarks/planner_memory.py. Models are small: there the closed form is least
exact.
"""

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import jax
from planner_memory import Case, command

from jaxshard.analysis.memory import estimate
from jaxshard.config.options import Given
from jaxshard.errors import InputError
from jaxshard.models.presets import architecture
from jaxshard.parallel.mesh import resolve_mesh
from jaxshard.planner import confirm, planner, ranking
from jaxshard.planner.search import DEPENDENT, SEARCHED, pins_of
from jaxshard.xla.compile import DoesNotFit
from jaxshard.xla.hardware import parse_target

GQA = {"d_model": 256, "n_layers": 4, "n_heads": 8, "n_kv_heads": 2, "vocab_size": 5000, "tie_embeddings": False}
GPT2 = {"d_model": 256, "n_layers": 4, "n_heads": 8, "vocab_size": 5000}
CASES = (
    Case("h100:8", "toy-1m", "dp=4,tp=2", 3, 32, 512, {"remat": "none"}, GQA),
    Case("h100:8", "toy-1m", "dp=4,tp=2", 3, 32, 512, {"remat": "full"}, GQA),
    Case("h100:8", "toy-1m", "dp=8", 1, 64, 512, {"remat": "dots", "accumulation": 2}, GQA),
    Case("h100:8", "toy-1m", "pp=2,dp=4", 0, 32, 512, {"remat": "full", "microbatches": 4}, GQA),
    Case(
        *("h100:8", "toy-1m", "pp=4,tp=2", 0, 16, 512),
        {"remat": "dots", "microbatches": 8, "schedule": "interleaved", "virtual_stages": 2},
        GQA | {"n_layers": 8},
    ),
    Case("h100:8", "toy-gpt2-1m", "dp=8", 2, 64, 512, {"remat": "none"}, GPT2),
    Case("h100:1", "toy-1m", "dp=1", 0, 16, 512, {"remat": "full", "offload": "optimizer"}, GQA),
    Case("h100:8", "toy-gpt2-1m", "dp=2,tp=4", 1, 32, 512, {"remat": "full", "precision": "fp32"}, GPT2),
    Case("v5e:2x4", "toy-1m", "dp=4,tp=2", 3, 32, 512, {"remat": "none"}, GQA),
    Case("v5e:2x4", "toy-1m", "dp=4,tp=2", 3, 32, 512, {"remat": "dots"}, GQA),
    Case("v5e:2x4", "toy-1m", "dp=4,tp=2", 3, 32, 512, {"remat": "full"}, GQA),
    Case("v5e:2x2", "toy-1m", "pp=2,dp=2", 0, 16, 512, {"remat": "full", "microbatches": 4}, GQA),
    Case("v5p:2x2x1", "toy-gpt2-1m", "dp=4", 2, 32, 512, {"remat": "none", "accumulation": 2}, GPT2),
    Case("v5p:2x2x1", "toy-1m", "dp=2,tp=2", 1, 16, 512, {"remat": "dots", "sequence_parallel": True}, GQA),
    Case("v5e:2x2", "toy-1m", "dp=4", 1, 32, 512, {"remat": "full", "offload": "optimizer"}, GQA),
)


def predicted(case: Case) -> int:
    """Bytes on a device by the closed form."""
    target, config = parse_target(case.target), case.config
    arch = architecture(config.model, seq_len=case.seq_len)
    return estimate(config, arch, resolve_mesh(case.mesh, target.count), target.chip.platform).total


def measure(case: Case) -> dict[str, Any]:
    """The compiler's peak."""
    try:
        result = confirm.compile_step(case.config, parse_target(case.target)).result
    except jax.errors.JaxRuntimeError as error:
        return {"failed": str(error).splitlines()[0]}
    assert not isinstance(result, DoesNotFit)
    return {"peak": result.memory.peak, "jax": jax.__version__}


def offered(case: Case, peak: int, limit: int) -> bool:
    """Whether the planner offers the layout with this limit, when this is the compiler's answer."""
    config, target = case.config, parse_target(case.target)
    arch = architecture(config.model, seq_len=case.seq_len)
    pins = pins_of(config, dict.fromkeys(("mesh", *SEARCHED, *DEPENDENT)))
    answer = SimpleNamespace(result=SimpleNamespace(memory=SimpleNamespace(peak=peak)))
    with (
        patch.object(confirm, "compile_step", lambda *_: answer),
        patch.object(confirm, "timeline", lambda *_: None),
        patch.object(planner, "compiler_missing", lambda _: None),
    ):
        try:
            plans, _ = planner.offered(ranking.search(config, arch, target, pins, limit), Given({}), 1)
        except InputError:
            return False
    return plans[0].compiled_peak == peak


def table(found: dict[str, dict[str, Any]]) -> str:
    """Markdown: every compiled case with both verdicts, and the summary."""
    lines = [
        "| case | peak, bytes | closed form | error % | one byte less | at the peak |",
        "|---|---|---|---|---|---|",
    ]
    agree = cases = 0
    for case in CASES:
        peak = found.get(case.key, {}).get("peak")
        if peak is None:
            continue
        below, at = offered(case, peak, peak - 1), offered(case, peak, peak)
        cases += 1
        agree += (below, at) == (False, True)
        total = predicted(case)
        words = ["offered" if each else "refused" for each in (below, at)]
        lines.append(f"| {case.key} | {peak:,} | {total:,} | {100 * (total / peak - 1):+.1f} | {' | '.join(words)} |")
    versions = ", ".join(sorted({real["jax"] for real in found.values() if "jax" in real}))
    summary = f"{cases} cases: the verdict is the compiler's at both limits in {agree} of them."
    return "\n".join([summary, "", *lines, "", f"Compiled with jax {versions}."])


HEAD = """# Where plans stop fitting

`python benchmarks/planner_edge.py` compiles small models, where the closed form is least exact, and asks the planner
for that layout with `--memory_limit` one byte below the compiler's peak, and at it. On TPUs temporaries up to 128 MiB
lie in on-chip memory, of which the closed form knows nothing: a model of some 10 MiB may take a sixth of what it says.
The compiler is asked about what is up to 40 % too large by the closed form, and on TPUs by 128 MiB more.

The models have width 256, 4 layers (8 where they are interleaved), 8 heads and 5,000 tokens; the Llama ones 2 heads of
keys and values, and a head of their own.

"""


if __name__ == "__main__":
    command(__doc__, CASES, measure, table, HEAD)
