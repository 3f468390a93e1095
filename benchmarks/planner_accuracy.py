"""How far the analytic time model is from measured step times, and what its choice of a layout costs.

    python benchmarks/planner_accuracy.py --measured A.csv B.csv   predicts every row and prints the errors
    ... --output TABLE.md      writes the table (no rows)
    ... --residuals            mean ratio by width, model axis and microbatch
    ... --as-stated            takes the conditions stated for the rows also where the figures contradict them
    ... --fit                  fits the constants of jaxshard/insight/efficiency.py again and prints them
    ... --cross-validate       fits on one half of the groups and tests on the other, several ways
    python benchmarks/planner_accuracy.py --published              compares with published runs

Rows: gpus, global_batch, microbatch_sequences, d_model, n_heads, n_layers, seq_len, tp, dp, pp, measured_ms (columns of
the validation data of vTrain, Bang et al., MICRO 2024, arXiv 2312.12391). A group is one model, device count and
global batch; regret is how much slower than its group's best row the row is that the model would have picked.
"""

import argparse
import csv
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from published_runs import published

from jaxshard.config import ModelConfig
from jaxshard.insight.cost import Parallelism, step_time
from jaxshard.insight.efficiency import MEGATRON_DEEPSPEED, Constants
from jaxshard.insight.hardware import parse_target
from jaxshard.insight.kernels import machine
from jaxshard.models.presets import Architecture, architecture

VOCABULARY = 50257
NODE = 8
"""GPUs of a node; 800 Gbit/s between nodes are 12.5 GB/s for each of them."""
MACHINE = machine(parse_target("a100:512").with_network(12.5e9))
KEY = ("d_model", "n_heads", "n_layers", "seq_len", "gpus", "global_batch")

BOUNDS = {
    "misaligned": (0.05, 0.98),
    "memory": (0.5, 0.88),
    "dispatch": (10e-6, 150e-6),
    "kernel_gap": (1e-6, 40e-6),
    "rendezvous": (10e-6, 400e-6),
    "host_skew": (1e-6, 100e-6),
}
"""Fitted constants, and what is still physical; streams reach at most the 88 % of the bandwidth that copies do."""


@dataclass(frozen=True)
class Rows:
    """Measured rows as columns."""

    columns: dict[str, np.ndarray]

    @property
    def ms(self) -> np.ndarray:
        return self.columns["measured_ms"]

    def groups(self) -> list[np.ndarray]:
        """Row numbers of each group."""
        found: dict[tuple, list[int]] = defaultdict(list)
        for index, key in enumerate(zip(*(self.columns[name] for name in KEY), strict=True)):
            found[key].append(index)
        return [np.array(rows) for rows in found.values()]

    def where(self, keep: np.ndarray) -> "Rows":
        return Rows({name: column[keep] for name, column in self.columns.items()})


def read(path: str) -> Rows:
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    names = (*KEY, "microbatch_sequences", "tp", "dp", "pp", "measured_ms")
    return Rows({name: np.array([float(row[name]) for row in rows]) for name in names})


def setup(rows: Rows, as_stated: bool = False) -> tuple[Architecture, Parallelism, np.ndarray]:
    """The rows' model and layout under the conditions of docs/time-model.md, "The measured rows".

    Several nodes, or `as_stated`: full recomputation, vocabulary padded to a multiple of 128 per model shard, tied
    embedding. One node: the figures fit neither recomputation nor padding (see there), and embedding and head are two
    tables.
    """
    c = rows.columns
    single = (c["gpus"] <= NODE) & (not as_stated)
    padded = np.ceil(VOCABULARY / (128 * c["tp"])) * 128 * c["tp"]
    vocabulary = np.where(single, np.floor(VOCABULARY / c["tp"]) * c["tp"], padded)
    D, H = c["d_model"], c["n_heads"]
    arch = Architecture("gpt2", vocabulary, D, c["n_layers"], H, H, 4 * D, c["seq_len"], ~single, D / H)  # pyright: ignore
    layout = Parallelism(
        stage=c["pp"],
        data=c["dp"],
        model=c["tp"],
        sequences=c["microbatch_sequences"],
        microbatches=np.maximum(1, c["global_batch"] / c["dp"] / c["microbatch_sequences"]),
        remat=np.where(single, "none", "full"),
        precision="fp16",
    )
    return arch, layout, c["seq_len"]


def predict(rows: Rows, constants: Constants | None = None, as_stated: bool = False) -> np.ndarray:
    """Milliseconds of every row."""
    arch, layout, seq_len = setup(rows, as_stated)
    return 1e3 * step_time(arch, layout, MACHINE, seq_len, MEGATRON_DEEPSPEED, constants).total


def regrets(rows: Rows, predicted: np.ndarray) -> np.ndarray:
    """Per group of two or more rows: measured time of the picked row over the best, minus 1, in per cent."""
    cost = lambda group: rows.ms[group[np.argmin(predicted[group])]] / rows.ms[group].min() - 1
    return 100 * np.array([cost(group) for group in rows.groups() if len(group) > 1])


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's, ties ignored."""
    order = lambda x: np.argsort(np.argsort(x))
    return float(np.corrcoef(order(a), order(b))[0, 1])


def summary(rows: Rows, predicted: np.ndarray) -> dict[str, float]:
    error = 100 * np.abs(predicted / rows.ms - 1)
    regret = regrets(rows, predicted)
    ranks = [rank_correlation(predicted[g], rows.ms[g]) for g in rows.groups() if len(g) > 2]
    return {
        "rows": len(error),
        "groups": len(regret),
        "MAPE %": error.mean(),
        "median error %": float(np.median(error)),
        "rank correlation": float(np.mean(ranks)) if ranks else float("nan"),
        "regret median %": float(np.median(regret)) if len(regret) else float("nan"),
        "regret p90 %": float(np.percentile(regret, 90)) if len(regret) else float("nan"),
        "regret max %": regret.max() if len(regret) else float("nan"),
    }


def joined(parts: Iterable[Rows]) -> Rows:
    parts = list(parts)
    return Rows({name: np.concatenate([part.columns[name] for part in parts]) for name in parts[0].columns})


def table(found: dict[str, dict[str, float]]) -> str:
    """Markdown."""
    heads = list(next(iter(found.values())))
    number = lambda head, x: f"{x:.0f}" if head in ("rows", "groups") else f"{x:.2f}"
    lines = ["| | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    lines += [f"| {name} | " + " | ".join(number(h, row[h]) for h in heads) + " |" for name, row in found.items()]
    return "\n".join(lines)


def split_by_nodes(rows: Rows) -> dict[str, Rows]:
    single = rows.columns["gpus"] <= NODE
    parts = {"one node": rows.where(single), "several nodes": rows.where(~single)}
    return {name: part for name, part in parts.items() if len(part.ms)}


def accuracy(rows: Rows, constants: Constants | None = None, as_stated: bool = False) -> dict[str, dict[str, float]]:
    parts = split_by_nodes(rows) | {"all": rows}
    return {name: summary(part, predict(part, constants, as_stated)) for name, part in parts.items()}


def residuals(rows: Rows, predicted: np.ndarray) -> str:
    """Mean and spread of predicted / measured by (d_model, tp), a column per microbatch size."""
    c = rows.columns
    lines = []
    for d, tp in sorted({*zip(c["d_model"], c["tp"], strict=True)}):
        cells = []
        for b in sorted({*c["microbatch_sequences"]}):
            here = (c["d_model"] == d) & (c["tp"] == tp) & (c["microbatch_sequences"] == b)
            if here.any():
                ratio = predicted[here] / rows.ms[here]
                cells.append(f"b={b:.0f} {ratio.mean():.2f}+-{ratio.std():.2f} ({here.sum()})")
        lines.append(f"d_model {d:.0f} tp {tp:.0f}: " + "  ".join(cells))
    return "\n".join(lines)


def loss(rows: Rows, predicted: np.ndarray, weight: float = 1.0) -> float:
    """What the fit minimises: mean |log error| of each kind of row, and `weight` x a smooth mean regret.

    The planner picks the row with the smallest prediction, so the loss counts by how much measured time a row that
    comes within 0.3 % of the best row's prediction, or below, would cost (in full from 1.2 % below on).
    """
    total = sum(
        np.abs(np.log(predict_ms / part.ms)).mean()
        for part, predict_ms in ((rows.where(kind), predicted[kind]) for kind in _kinds(rows))
    )
    costs = []
    for group in rows.groups():
        best = group[np.argmin(rows.ms[group])]
        lead = np.log(predicted[best] / predicted[group]) + 0.003
        worse = np.log(rows.ms[group] / rows.ms[best])
        costs.append(float(np.max(np.clip(lead / 0.015, 0, 1) * worse)))
    return float(total + weight * np.mean(costs))


def _kinds(rows: Rows) -> list[np.ndarray]:
    single = rows.columns["gpus"] <= NODE
    return [kind for kind in (single, ~single) if kind.any()]


def fit(rows: Rows, generations: int = 250, as_stated: bool = False) -> Constants:
    """The constants within BOUNDS that minimise `loss`: differential evolution over all of BOUNDS, fixed seed."""
    from scipy.optimize import differential_evolution

    def constants(x: np.ndarray) -> Constants:
        return Constants(**dict(zip(BOUNDS, np.exp(x).tolist(), strict=True)))

    objective = lambda x: loss(rows, predict(rows, constants(x), as_stated))
    bounds = [tuple(np.log(bound)) for bound in BOUNDS.values()]
    found = differential_evolution(objective, bounds, rng=0, popsize=8, maxiter=generations, tol=1e-6, polish=False)
    return constants(found.x)


def cross_validate(rows: Rows) -> dict[str, dict[str, float]]:
    """Errors on rows that the constants were not fitted on."""
    c = rows.columns
    single = c["gpus"] <= NODE
    widths = sorted({*c["d_model"][single]})
    number = np.zeros(len(rows.ms), int)
    for position, group in enumerate(rows.groups()):
        number[group] = position
    splits = {f"one node, d_model {w:.0f}": single & (c["d_model"] == w) for w in widths}
    splits |= {f"{w:.0f} of several nodes": ~single & (c["d_model"] == w) for w in sorted({*c["d_model"][~single]})}
    splits |= {f"groups {half} of each two": number % 2 == half for half in (0, 1)} | {"several nodes": ~single}
    found = {}
    for name, held in splits.items():
        if held.any() and not held.all():
            constants = fit(rows.where(~held), generations=60)
            found |= {
                f"held out: {name}" + (f" ({kind})" if kind != "all" else ""): row
                for kind, row in accuracy(rows.where(held), constants).items()
                if kind != "all"
            }
    return found


def speed(count: int = 10_000) -> float:
    """Microseconds per layout of one call that predicts `count` layouts."""
    rng = np.random.default_rng(0)
    powers = lambda most: 2.0 ** rng.integers(0, most, count)
    layout = Parallelism(
        stage=powers(3),
        data=powers(6),
        model=powers(4),
        zero=rng.integers(0, 4, count),
        sequences=powers(3),
        microbatches=powers(5),
        remat=rng.choice(["none", "dots", "full"], count),
    )
    arch = architecture(ModelConfig(preset="llama3-8b"))
    hw = machine(parse_target("h100:512"))
    start = time.perf_counter()
    step_time(arch, layout, hw, 8192).total.sum()
    return 1e6 * (time.perf_counter() - start) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measured", nargs="+", default=[])
    parser.add_argument("--output")
    for flag in ("--residuals", "--as-stated", "--fit", "--cross-validate", "--published"):
        parser.add_argument(flag, action="store_true")
    args = parser.parse_args()
    if not args.measured and not args.published:
        parser.error("give --measured FILE.csv [FILE.csv ...], or --published")
    parts, constants = [], None
    if args.measured:
        rows = joined(read(path) for path in args.measured)
        if args.fit:
            constants = fit(rows, as_stated=args.as_stated)
            print(*(f"{name} = {getattr(constants, name):.4g}" for name in BOUNDS), sep="\n")
        parts.append(table(accuracy(rows, constants, args.as_stated)))
        if args.cross_validate:
            parts.append(table(cross_validate(rows)))
        if args.residuals:
            print(residuals(rows, predict(rows, constants, args.as_stated)))
    if args.published:
        parts.append(published(constants))
    parts.append(f"{speed():.1f} us per layout, 10,000 at once.")
    text = "\n\n".join(parts)
    print(text)
    if args.output:
        Path(args.output).write_text(text + "\n")


if __name__ == "__main__":
    main()
