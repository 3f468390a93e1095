"""How far the analytic time model is from measured step times, and what its choice of a layout costs.

    python benchmarks/planner_accuracy.py --measured A.csv B.csv   predicts every row and prints the errors
    ... --output TABLE.md      writes the table (no rows)
    ... --residuals            mean ratio by width, model axis and microbatch
    ... --target h100:64       another machine than the rows' (default: A100s, 800 Gbit/s between nodes of eight)
    ... --remat none           another condition than the one stated for the rows (default: full recomputation)
    ... --fit                  fits the constants of jaxshard/analysis/efficiency.py again and prints them
    ... --cross-validate       predicts rows that the constants were not fitted on: each group by the others, and so on
    python benchmarks/planner_accuracy.py --published              compares with published runs

Rows: gpus, global_batch, microbatch_sequences, d_model, n_heads, n_layers, seq_len, tp, dp, pp, measured_ms (columns of
the validation data of vTrain, Bang et al., MICRO 2024, arXiv 2312.12391). A group is one model, device count and
global batch; regret is how much slower than its group's best row the row is that the model would have picked.
"""

import argparse
import csv
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from published_runs import published

from jaxshard.analysis.cost import Parallelism, step_time
from jaxshard.analysis.efficiency import MEGATRON_DEEPSPEED, Constants
from jaxshard.analysis.kernels import Machine, machine
from jaxshard.config import ModelConfig
from jaxshard.errors import InputError
from jaxshard.models.presets import Architecture, architecture
from jaxshard.xla.hardware import parse_target

VOCABULARY = 50257
NODE = 8
"""GPUs of a node."""
MACHINE = machine(parse_target("a100:512").with_network(12.5e9))
"""800 Gbit/s between nodes are 12.5 GB/s for each of their GPUs."""
KEY = ("d_model", "n_heads", "n_layers", "seq_len", "gpus", "global_batch")
COLUMNS = (*KEY, "microbatch_sequences", "tp", "dp", "pp", "measured_ms")

BOUNDS = {
    "misaligned": (0.05, 0.98),
    "dispatch": (10e-6, 150e-6),
    "engine": (5e-6, 60e-6),
    "long_rows": (1.0, 3.0),
    "rendezvous": (10e-6, 400e-6),
    "host_skew": (1e-6, 100e-6),
}
"""Fitted constants, and what is still physical."""


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
    """Raises InputError for a file that is missing, has other columns, or holds something that is no number."""
    try:
        with open(path, newline="") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    missing = [name for name in COLUMNS if not rows or name not in rows[0]]
    if missing:
        raise InputError(f"{path}: no column {', '.join(missing)}; needed: {', '.join(COLUMNS)}")
    try:
        return Rows({name: np.array([float(row[name]) for row in rows]) for name in COLUMNS})
    except (TypeError, ValueError) as error:
        raise InputError(f"{path}: a value is no number: {error}") from error


def setup(rows: Rows, remat: str = "full") -> tuple[Architecture, Parallelism, np.ndarray]:
    """The rows' model and layout under the conditions that their authors state.

    GPT-2 with a tied table of 50257 rows, fp16, full recomputation, 1F1B, no ZeRO, the gradients' all-reduce after the
    last backward pass. The vocabulary is not padded: a model shard takes the whole part of its share.
    """
    c = rows.columns
    D, H = c["d_model"], c["n_heads"]
    vocabulary = np.floor(VOCABULARY / c["tp"]) * c["tp"]
    arch = Architecture("gpt2", vocabulary, D, c["n_layers"], H, H, 4 * D, c["seq_len"], True, D / H)  # pyright: ignore
    layout = Parallelism(
        stage=c["pp"],
        data=c["dp"],
        model=c["tp"],
        sequences=c["microbatch_sequences"],
        microbatches=np.maximum(1, c["global_batch"] / c["dp"] / c["microbatch_sequences"]),
        remat=remat,
        precision="fp16",
    )
    return arch, layout, c["seq_len"]


@dataclass(frozen=True)
class Conditions:
    """What holds for all rows."""

    remat: str = "full"
    machine: Machine = MACHINE

    def predict(self, rows: Rows, constants: Constants | None = None) -> np.ndarray:
        """Milliseconds of every row."""
        arch, layout, seq_len = setup(rows, self.remat)
        return 1e3 * step_time(arch, layout, self.machine, seq_len, MEGATRON_DEEPSPEED, constants).total


STATED = Conditions()


def regrets(rows: Rows, predicted: np.ndarray) -> np.ndarray:
    """Per group of two or more rows: measured time of the picked row over the best, minus 1, in per cent."""
    cost = lambda group: rows.ms[group[np.argmin(predicted[group])]] / rows.ms[group].min() - 1
    return 100 * np.array([cost(group) for group in rows.groups() if len(group) > 1])


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's, ties ignored."""
    order = lambda x: np.argsort(np.argsort(x))
    return float(np.corrcoef(order(a), order(b))[0, 1])


def summary(rows: Rows, predicted: np.ndarray) -> dict[str, float]:
    """Errors and regret in per cent, and the mean rank correlation within groups."""
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


def accuracy(
    rows: Rows, constants: Constants | None = None, conditions: Conditions = STATED
) -> dict[str, dict[str, float]]:
    parts = split_by_nodes(rows) | {"all": rows}
    return {name: summary(part, conditions.predict(part, constants)) for name, part in parts.items()}


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


def loss(rows: Rows, predicted: np.ndarray, allowed: float = 0.05, weight: float = 10.0) -> float:
    """What the fit minimises: mean |log error| of each kind of row, and `weight` x the regret beyond what is `allowed`.

    Regret: the 90th percentile over the groups of a kind, where every row counts as picked whose prediction is within
    0.3 % of the smallest.
    """
    total = 0.0
    for kind in _kinds(rows):
        part, guess = rows.where(kind), predicted[kind]
        costs = [
            np.log(part.ms[group][guess[group] <= 1.003 * guess[group].min()].max() / part.ms[group].min())
            for group in part.groups()
        ]
        total += np.abs(np.log(guess / part.ms)).mean() + weight * max(0.0, np.percentile(costs, 90) - allowed)
    return float(total)


def _kinds(rows: Rows) -> list[np.ndarray]:
    single = rows.columns["gpus"] <= NODE
    return [kind for kind in (single, ~single) if kind.any()]


def fit(rows: Rows, generations: int = 250, conditions: Conditions = STATED) -> Constants:
    """The constants within BOUNDS that minimise `loss`: differential evolution over all of BOUNDS, fixed seed."""
    from scipy.optimize import differential_evolution

    def constants(x: np.ndarray) -> Constants:
        return Constants(**dict(zip(BOUNDS, np.exp(x).tolist(), strict=True)))

    objective = lambda x: loss(rows, conditions.predict(rows, constants(x)))
    bounds = [tuple(np.log(bound)) for bound in BOUNDS.values()]
    found = differential_evolution(objective, bounds, rng=0, popsize=15, maxiter=generations, tol=1e-6, polish=False)
    return constants(found.x)


def cross_validate(rows: Rows, conditions: Conditions = STATED) -> dict[str, dict[str, float]]:
    """Errors on rows that the constants were not fitted on.

    Each group is predicted with constants fitted on all others; then whole widths, halves of the groups, and all rows
    of several nodes are held out.
    """
    found = {}
    alone = np.zeros(len(rows.ms))
    for group in rows.groups():
        held = np.isin(np.arange(len(alone)), group)
        alone[held] = conditions.predict(rows.where(held), fit(rows.where(~held), 25, conditions))
    for name, kind in split_by_nodes(rows).items():
        here = rows.columns["gpus"] <= NODE if name == "one node" else rows.columns["gpus"] > NODE
        found[f"each group by all others ({name})"] = summary(kind, alone[here])
    for name, held in _splits(rows).items():
        if held.any() and not held.all():
            constants = fit(rows.where(~held), 60, conditions)
            by_kind = accuracy(rows.where(held), constants, conditions)
            found |= {f"{name} ({kind})": row for kind, row in by_kind.items() if kind != "all"}
    return found


def _splits(rows: Rows) -> dict[str, np.ndarray]:
    """Name -> rows that are held out."""
    c = rows.columns
    single = c["gpus"] <= NODE
    number = np.zeros(len(rows.ms), int)
    for position, group in enumerate(rows.groups()):
        number[group] = position
    found = {f"d_model {w:.0f}": single & (c["d_model"] == w) for w in sorted({*c["d_model"][single]})}
    found |= {f"d_model {w:.0f}": ~single & (c["d_model"] == w) for w in sorted({*c["d_model"][~single]})}
    return found | {f"every other group, {half}": number % 2 == half for half in (0, 1)} | {"clusters": ~single}


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


def report(args: argparse.Namespace) -> str:
    """Markdown: the tables that were asked for."""
    target = parse_target(args.target).with_network(12.5e9) if args.target == "a100:512" else parse_target(args.target)
    conditions = Conditions(args.remat, machine(target))
    parts, constants = [], None
    if args.measured:
        rows = joined(read(path) for path in args.measured)
        if args.fit:
            constants = fit(rows, conditions=conditions)
            print(*(f"{name} = {getattr(constants, name):.4g}" for name in BOUNDS), sep="\n")
        parts.append(table(accuracy(rows, constants, conditions)))
        if args.cross_validate:
            parts.append(table(cross_validate(rows, conditions)))
        if args.residuals:
            print(residuals(rows, conditions.predict(rows, constants)))
    if args.published:
        parts.append(published(constants))
    parts.append(f"{speed():.1f} us per layout, 10,000 at once.")
    return "\n\n".join(parts)


def main() -> int:
    """Predicts the rows of a file and prints the errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measured", nargs="+", default=[])
    parser.add_argument("--output")
    parser.add_argument("--target", default="a100:512")
    parser.add_argument("--remat", choices=("full", "none"), default="full")
    for flag in ("--residuals", "--fit", "--cross-validate", "--published"):
        parser.add_argument(flag, action="store_true")
    args = parser.parse_args()
    if not args.measured and not args.published:
        parser.error("give --measured FILE.csv [FILE.csv ...], or --published")
    try:
        text = report(args)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    print(text)
    if args.output:
        Path(args.output).write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
