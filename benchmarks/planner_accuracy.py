"""How far the analytic time model is from measured step times, and what its choice of a layout costs.

    python benchmarks/planner_accuracy.py --measured A.csv B.csv   predicts every row and prints the errors
    ... --output TABLE.md      writes the table (no rows)
    ... --residuals            mean ratio by width, model axis and microbatch
    ... --target h100:64       another machine than the rows' (default: A100s, 800 Gbit/s between nodes of eight)
    ... --remat none           another condition than the one stated for the rows (default: full recomputation)
    ... --fit                  fits the constants of jaxshard/analysis/efficiency.py again and prints them
    ... --cross-validate       predicts rows that the constants were not fitted on: fifths of the groups, widths, counts
    ... --known C.csv          corrects the predictions by these measured rows; groups that are in them are left out
    python benchmarks/planner_accuracy.py --published              compares with published runs

Rows: gpus, global_batch, microbatch_sequences, d_model, n_heads, n_layers, seq_len, tp, dp, pp, measured_ms (columns of
the validation data of vTrain, Bang et al., MICRO 2024, arXiv 2312.12391). A group is one model, device count and
global batch; regret is how much slower than its group's best row the row is that the model would have picked.
"""

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from block_evidence import corrected
from measured_rows import (
    Rows,
    by_rule,
    fifths,
    joined,
    kinds,
    rank_correlation,
    read,
    regrets,
    split_by_nodes,
    splits,
    unseen,
)
from published_runs import published

from jaxshard.analysis.cost import Parallelism, step_time
from jaxshard.analysis.efficiency import MEGATRON_DEEPSPEED, Constants
from jaxshard.analysis.kernels import Machine, machine
from jaxshard.config import ModelConfig
from jaxshard.errors import InputError
from jaxshard.models.presets import Architecture, architecture
from jaxshard.xla.hardware import parse_target

VOCABULARY = 50257
MACHINE = machine(parse_target("a100:512").with_network(12.5e9))
"""800 Gbit/s between nodes are 12.5 GB/s for each of their GPUs."""

BOUNDS = {
    "misaligned": (0.05, 0.98),
    "dispatch": (10e-6, 150e-6),
    "engine": (5e-6, 60e-6),
    "long_rows": (1.0, 3.0),
    "rendezvous": (10e-6, 400e-6),
}
"""Fitted constants, and what is still physical."""


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


def summary(rows: Rows, predicted: np.ndarray) -> dict[str, float]:
    """Errors and regret in per cent, and the mean rank correlation within groups."""
    error = 100 * np.abs(predicted / rows.ms - 1)
    regret = regrets(rows, predicted)
    rule = regrets(rows, by_rule(rows))
    ranks = [rank_correlation(predicted[g], rows.ms[g]) for g in rows.groups() if len(g) > 2]
    some = lambda value, values: float(value(values)) if len(values) else float("nan")
    return {
        "rows": len(error),
        "groups": len(regret),
        "MAPE %": error.mean(),
        "median error %": float(np.median(error)),
        "rank correlation": some(np.mean, ranks),
        "regret median %": some(np.median, regret),
        "regret p90 %": some(lambda found: np.percentile(found, 90), regret),
        "regret max %": some(np.max, regret),
        "rule's p90 %": some(lambda found: np.percentile(found, 90), rule),
    }


def table(found: dict[str, dict[str, float]]) -> str:
    """Markdown."""
    heads = list(next(iter(found.values())))
    number = lambda head, x: f"{x:.0f}" if head in ("rows", "groups") else f"{x:.2f}"
    lines = ["| | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    lines += [f"| {name} | " + " | ".join(number(h, row[h]) for h in heads) + " |" for name, row in found.items()]
    return "\n".join(lines)


def accuracy(
    rows: Rows, constants: Constants | None = None, conditions: Conditions = STATED, known: Rows | None = None
) -> dict[str, dict[str, float]]:
    """Errors by kind of row; with `known` rows the predictions are corrected by them."""
    parts = split_by_nodes(rows) | {"all": rows}
    return {name: summary(part, informed(part, known, constants, conditions)) for name, part in parts.items()}


def informed(rows: Rows, known: Rows | None, constants: Constants | None, conditions: Conditions) -> np.ndarray:
    """Milliseconds of every row, corrected by measured rows of the same machine if there are any."""
    predicted = conditions.predict(rows, constants)
    if known is None:
        return predicted
    return corrected(known.columns, known.ms / conditions.predict(known, constants), rows.columns, predicted)


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
    for kind in kinds(rows):
        part, guess = rows.where(kind), predicted[kind]
        costs = [
            np.log(part.ms[group][guess[group] <= 1.003 * guess[group].min()].max() / part.ms[group].min())
            for group in part.groups()
        ]
        total += np.abs(np.log(guess / part.ms)).mean() + weight * max(0.0, np.percentile(costs, 90) - allowed)
    return float(total)


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

    Fifths of the groups, each predicted with constants fitted on the others, once more with the others' rows known;
    then whole widths and device counts of one node, and all rows of several nodes.
    """
    found = {}
    alone, aided, fifth = np.zeros(len(rows.ms)), np.zeros(len(rows.ms)), fifths(rows)
    for held in (fifth == part for part in range(5)):
        rest = rows.where(~held)
        constants = fit(rest, 40, conditions)
        alone[held] = conditions.predict(rows.where(held), constants)
        aided[held] = informed(rows.where(held), rest, constants, conditions)
    for name, kind in zip(split_by_nodes(rows), kinds(rows), strict=True):
        found[f"fifths of the groups ({name})"] = summary(rows.where(kind), alone[kind])
        found[f"the same, the other fifths' rows known ({name})"] = summary(rows.where(kind), aided[kind])
    for name, held in splits(rows).items():
        if held.any() and not held.all():
            constants = fit(rows.where(~held), 40, conditions)
            found[name] = summary(rows.where(held), conditions.predict(rows.where(held), constants))
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
        if args.known:
            known = joined(read(path) for path in args.known)
            asked = unseen(rows, known)
            if not len(asked.ms):
                raise InputError("--known: it has rows of every group of --measured; none is left to predict")
            parts.append(table(accuracy(asked, constants, conditions, known)))
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
    parser.add_argument("--known", nargs="+", default=[])
    parser.add_argument("--output")
    parser.add_argument("--target", default="a100:512")
    parser.add_argument("--remat", choices=("full", "none"), default="full")
    for flag in ("--residuals", "--fit", "--cross-validate", "--published"):
        parser.add_argument(flag, action="store_true")
    args = parser.parse_args()
    if not args.measured and (args.known or not args.published):
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
