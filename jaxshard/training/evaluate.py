"""Loss on the held-out documents, weighted by tokens over the whole set whatever the batch size."""

import math
from typing import Any

import jax
import numpy as np

from jaxshard.data import Dataset, eval_batches
from jaxshard.data.packing import Batch
from jaxshard.training.program import Program


class Evaluator:
    """Evaluates parameters on a data set; the function is compiled once, at the first call.

    A batch has `rows` rows, by default the program's; one that is smaller than the program's is filled up with padding.
    """

    def __init__(self, program: Program, dataset: Dataset, rows: int | None = None):
        self._program, self._dataset = program, dataset
        self._rows = rows or program.config.train.global_batch
        self._compiled: jax.stages.Compiled | None = None

    @property
    def possible(self) -> bool:
        """Whether there are held-out documents."""
        return len(self._dataset.eval) > 0

    def __call__(self, params: Any) -> dict[str, float | int]:
        """Returns eval_loss (mean over tokens) and eval_tokens."""
        program, config = self._program, self._program.config
        if self._compiled is None:
            abstract = program.abstract_batch(accumulation=1)
            self._compiled = program.evaluate.lower(program.abstract.params, abstract).compile()
        empty = config.train.global_batch - self._rows
        batches = (_filled(batch, empty) for batch in eval_batches(self._dataset, self._rows, config.eval.batches))
        # All batches are dispatched before the first result is read.
        results = [self._compiled(params, program.place(batch)) for batch in batches]
        sums = [(float(loss), int(tokens)) for loss, tokens in results]
        tokens = sum(count for _, count in sums)
        return {"eval_loss": math.fsum(loss for loss, _ in sums) / max(tokens, 1), "eval_tokens": tokens}


def _filled(batch: Batch, rows: int) -> Batch:
    """A batch [B, T] with so many rows of padding behind it."""
    wide = lambda name, a: np.pad(a, ((0, rows), (0, 0)), constant_values=-1 if name == "targets" else 0)
    return {name: wide(name, a) for name, a in batch.items()} if rows else batch
