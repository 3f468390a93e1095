"""Predictions corrected by measured rows of the same machine (used by planner_accuracy.py --known).

Most of a step is one block, again and again, and its kernels have the same shapes in every layout with the same width,
model axis, microbatch and sequence: what one such layout was measured to take says how wrong the time model is about
all others, whatever their number of layers, devices, stages or microbatches.
"""

from collections import defaultdict
from collections.abc import Mapping

import numpy as np

SHAPE = ("d_model", "n_heads", "seq_len", "tp", "microbatch_sequences")
"""Columns that settle the kernels of a block."""
DOUBT = 1.0
"""How many rows the model's own word weighs: one measured row corrects by half of the difference."""


def corrected(
    known: Mapping[str, np.ndarray], ratios: np.ndarray, asked: Mapping[str, np.ndarray], predicted: np.ndarray
) -> np.ndarray:
    """Times of the rows `asked`, each multiplied by what `known` rows with the same block tell.

    Args:
        known: columns of measured rows.
        ratios: measured over predicted time of each of them.
        asked: columns of the rows to predict.
        predicted: their times from sizes alone.
    """
    found = defaultdict(list)
    for shape, ratio in zip(_shapes(known), np.log(ratios), strict=True):
        found[shape].append(ratio)
    means = {shape: sum(logs) / (len(logs) + DOUBT) for shape, logs in found.items()}
    return predicted * np.exp([means.get(shape, 0.0) for shape in _shapes(asked)])


def _shapes(columns: Mapping[str, np.ndarray]) -> list[tuple[float, ...]]:
    return list(zip(*(columns[name].tolist() for name in SHAPE), strict=True))
