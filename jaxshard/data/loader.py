"""Batches in an order that is a pure function of corpus, seed and step.

Rows in training order are the endless concatenation of the epochs' permutations; step s takes rows [s B, (s + 1) B) of
it. So the data position of a run is its step number: nothing else is saved, and neither the mesh nor the number of
hosts nor a restart changes which tokens a step sees.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jaxshard.data.dataset import Dataset
from jaxshard.data.packing import Batch

if TYPE_CHECKING:
    import grain

_THREADS, _AHEAD = 2, 4  # a batch takes a millisecond or so to gather: more threads would only compete with the step

_ENDLESS = 2**61  # rows; grain's own endless repeat overflows when the batch is 1


@dataclass(frozen=True)
class TrainLoader:
    """Endless training batches from step `start_step` on (the number of updates already made)."""

    dataset: Dataset
    global_batch: int
    seed: int
    start_step: int = 0
    rows: slice | None = None
    """Rows of the global batch that this process feeds; None: all of them."""

    def batch(self, step: int) -> Batch:
        """Returns the batch of one step (from 0), at once."""
        batch = self._by_step()[step]
        assert batch is not None  # grain allows maps that drop elements
        return batch

    def __iter__(self) -> Iterator[Batch]:
        """Yields batches from start_step on, gathered ahead by threads; the iterator's close() ends them."""
        import grain

        options = grain.ReadOptions(num_threads=_THREADS, prefetch_buffer_size=_AHEAD)
        return iter(self._by_step().slice(slice(self.start_step, None)).to_iter_dataset(options))

    def _by_step(self) -> "grain.MapDataset[Batch]":
        import grain  # it imports jax, which the readers of a corpus do without

        mine = self.rows or slice(None)
        n = len(self.dataset.train)
        return (
            grain.MapDataset.range(n)
            .seed(self.seed % 2**63)  # grain takes no negative seeds
            .shuffle()
            .repeat(_ENDLESS // n)  # each epoch with another permutation
            .batch(self.global_batch, drop_remainder=True)
            .map(lambda rows: self.dataset.train.batch(rows[mine]))
        )


def eval_batches(dataset: Dataset, batch: int, limit: int = 0, rows: slice | None = None) -> Iterator[Batch]:
    """Yields the held-out rows once, in order, as batches [batch, T]; rows behind the end are padding (targets -1).

    Weighted by the targets that are not -1, the result does not depend on the batch size. With a limit that is smaller
    than the set, `limit` batches are taken, of rows spread evenly over it. `rows` picks this process's part of each.
    """
    n = len(dataset.eval)
    count = -(-n // batch)
    order = np.arange(count * batch)
    if 0 < limit < count:
        order = np.arange(limit * batch) * n // (limit * batch)
    for start in range(0, len(order), batch):
        yield dataset.eval.batch(order[start : start + batch][rows or slice(None)])
