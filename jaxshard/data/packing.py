"""Documents to rows of T tokens, computed from a row's number alone.

A document of n tokens has n - 1 pairs (token, next token). A row has T slots, and a slot holds one pair: the input and
its target. Every token is therefore a target exactly once, except the first of each document, and a document that goes
on in the next row loses nothing at the cut. Documents are laid end to end in a stream of slots, and row r is the slots
[r T, (r + 1) T); without packing each document is padded to whole rows first. A row can thus be found by bisection:
nothing is copied or built beforehand, and a memory-mapped corpus stays on disk.

    documents   a b c d |  w x y           T = 4          row 0        row 1
    inputs      a b c      w x                            a b c w      x . . .
    targets       b c d      x y                          b c d x      y . . .
    segments                                              1 1 1 2      1 0 0 0
    positions                                             0 1 2 0      0 0 0 0
"""

import functools
from dataclasses import dataclass

import numpy as np

Batch = dict[str, np.ndarray]
"""int32 arrays [B, T]: inputs, targets (-1: no loss), segments (0: padding), positions."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Documents seen as rows of T = seq_len tokens: document d is tokens[starts[d] : starts[d] + lengths[d]]."""

    tokens: np.ndarray
    """Token ids [N], of any integer type, perhaps memory-mapped."""
    starts: np.ndarray
    """int64 [documents]."""
    lengths: np.ndarray
    """int64 [documents], each 2 or more: a shorter document has no target."""
    seq_len: int
    pack: bool = True

    def __post_init__(self):
        assert self.starts.shape == self.lengths.shape and (self.lengths >= 2).all()

    @functools.cached_property
    def _ends(self) -> np.ndarray:
        """Slot behind each document's last [documents]."""
        slots = self.lengths - 1
        if not self.pack:
            slots = -(-slots // self.seq_len) * self.seq_len
        return np.cumsum(slots)

    def __len__(self) -> int:
        """Number of rows; the last may be partly padding."""
        return -(-int(self._ends[-1]) // self.seq_len) if len(self._ends) else 0

    @property
    def documents(self) -> int:
        return len(self.starts)

    @property
    def n_tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def n_targets(self) -> int:
        """Targets in all rows together."""
        return self.n_tokens - self.documents

    def batch(self, rows: np.ndarray) -> Batch:
        """Returns the rows with these numbers [b] as a batch [b, T]; a number behind the last row gives padding.

        Segments count from 1 in each row. Positions count from 0 where a document begins and where a row does.
        """
        assert self.documents, "no documents"
        row_start = rows[:, None].astype(np.int64) * self.seq_len
        slot = row_start + np.arange(self.seq_len)
        document = np.searchsorted(self._ends, slot, side="right")
        document = np.minimum(document, self.documents - 1)  # slots behind the end fail the test for `valid`
        last = self.lengths[document] - 1
        begin = self._begins[document]
        valid = slot - begin < last
        at = np.where(valid, self.starts[document] + slot - begin, 0)
        arrays = {
            "inputs": np.where(valid, self.tokens[at], 0),
            "targets": np.where(valid, self.tokens[at + 1].astype(np.int64), -1),
            "segments": np.where(valid, document - document[:, :1] + 1, 0),
            "positions": np.where(valid, slot - np.maximum(begin, row_start), 0),
        }
        return {name: array.astype(np.int32) for name, array in arrays.items()}

    @functools.cached_property
    def _begins(self) -> np.ndarray:
        """First slot of each document [documents]."""
        return np.concatenate([[0], self._ends[:-1]]).astype(np.int64)
