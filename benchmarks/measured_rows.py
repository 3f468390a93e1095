"""Measured rows in groups, the ways to hold some of them out, and what a pick costs (used by planner_accuracy.py)."""

import csv
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from jaxshard.errors import InputError

NODE = 8
"""GPUs of a node."""
KEY = ("d_model", "n_heads", "n_layers", "seq_len", "gpus", "global_batch")
"""What is the same in a group."""
COLUMNS = (*KEY, "microbatch_sequences", "tp", "dp", "pp", "measured_ms")


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


def joined(parts: Iterable[Rows]) -> Rows:
    parts = list(parts)
    return Rows({name: np.concatenate([part.columns[name] for part in parts]) for name in parts[0].columns})


def split_by_nodes(rows: Rows) -> dict[str, Rows]:
    single = rows.columns["gpus"] <= NODE
    parts = {"one node": rows.where(single), "several nodes": rows.where(~single)}
    return {name: part for name, part in parts.items() if len(part.ms)}


def kinds(rows: Rows) -> list[np.ndarray]:
    single = rows.columns["gpus"] <= NODE
    return [kind for kind in (single, ~single) if kind.any()]


def unseen(rows: Rows, known: Rows) -> Rows:
    """The rows of groups that `known` has nothing of."""
    keys = lambda part: list(zip(*(part.columns[name].tolist() for name in KEY), strict=True))
    seen = {*keys(known)}
    return rows.where(np.array([key not in seen for key in keys(rows)]))


def fifths(rows: Rows) -> np.ndarray:
    """A number from 0 to 4 for each row, the same in a group; drawn once and for all."""
    groups = rows.groups()
    numbers = np.random.default_rng(0).permutation(len(groups)) % 5
    found = np.zeros(len(rows.ms), int)
    for number, group in zip(numbers, groups, strict=True):
        found[group] = number
    return found


def splits(rows: Rows) -> dict[str, np.ndarray]:
    """Name -> rows that are held out."""
    c = rows.columns
    single = c["gpus"] <= NODE
    found = {f"one node, d_model {w:.0f}": single & (c["d_model"] == w) for w in sorted({*c["d_model"][single]})}
    found |= {f"one node, {n:.0f} GPUs": single & (c["gpus"] == n) for n in sorted({*c["gpus"][single]})}
    return found | {"all rows of several nodes": ~single}


def regrets(rows: Rows, predicted: np.ndarray) -> np.ndarray:
    """Per group of two or more rows: measured time of the picked row over the best, minus 1, in per cent."""
    cost = lambda group: rows.ms[group[np.argmin(predicted[group])]] / rows.ms[group].min() - 1
    return 100 * np.array([cost(group) for group in rows.groups() if len(group) > 1])


def by_rule(rows: Rows) -> np.ndarray:
    """Sorts layouts without any model: the least tp, then the least pp, then the largest microbatch."""
    c = rows.columns
    return 1e8 * c["tp"] + 1e4 * c["pp"] - c["microbatch_sequences"]


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's, ties ignored."""
    order = lambda x: np.argsort(np.argsort(x))
    return float(np.corrcoef(order(a), order(b))[0, 1])
