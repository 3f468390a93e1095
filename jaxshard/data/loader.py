"""Batches in an order that is a pure function of corpus and seed.

Rows in training order are the endless concatenation of the epochs' permutations, and each batch takes the next B of
them. So the data position of a run is the number of rows that it has taken: nothing else is saved, a run may go on with
another batch without skipping or repeating a row, and neither the mesh nor the number of hosts nor a restart changes
which rows come next.
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
    """Endless training batches, after the first `start_row` rows of the order."""

    dataset: Dataset
    global_batch: int
    seed: int
    start_row: int = 0
    rows: slice | None = None
    """Rows of the global batch that this process feeds; None: all of them."""

    def batch(self, number: int) -> Batch:
        """Returns the batch of that number (the first is 0), at once."""
        batch = self._batches()[number]
        assert batch is not None  # grain allows maps that drop elements
        return batch

    def __iter__(self) -> Iterator[Batch]:
        """Yields the batches in turn, gathered ahead by threads; the iterator's close() ends them."""
        import grain

        options = grain.ReadOptions(num_threads=_THREADS, prefetch_buffer_size=_AHEAD)
        return iter(self._batches().to_iter_dataset(options))

    def _batches(self) -> "grain.MapDataset[Batch]":
        import grain  # it imports jax, which the readers of a corpus do without

        mine = self.rows or slice(None)
        n = len(self.dataset.train)
        return (
            grain.MapDataset.range(n)
            .seed(self.seed % 2**63)  # grain takes no negative seeds
            .shuffle()
            .repeat(_ENDLESS // n)  # each epoch with another permutation
            .slice(slice(self.start_row, None))
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
