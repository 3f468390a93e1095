"""Updates that are skipped: counted, told, and too many in a row."""

from dataclasses import dataclass
from typing import Any

from jaxshard.parallel.precision import SMALLEST_SCALE


@dataclass
class Skips:
    """The skipped updates of a row.

    Attributes:
        limit: so many in a row end the run. One that goes on counts further, and ends at the next multiple: an fp16 run
            halves its loss scale on until it fits, and one with broken data ends again as clearly.
        row: length of the row; the state counts it, across checkpoints.
        empty: those of it, since this run began, whose batch had no target.
        ended: length of the row that ends the run, 0 as long as none does.
    """

    limit: int
    row: int = 0
    empty: int = 0
    ended: int = 0

    def add(self, values: dict[str, Any]) -> str:
        """Counts a step by its metrics; returns a warning of its own, or ""."""
        self.row = values["skipped_in_row"]
        self.empty = 0 if self.row <= 1 else self.empty
        self.empty += self.row > 0 and values["tokens"] == 0
        if self.row and self.row % self.limit == 0:
            self.ended = self.row
        if values["tokens"] == 0:
            return "no token of the batch has a target, so nothing was updated"
        return f"the gradient is not finite ({values['grad_norm']}), so nothing was updated" if self.row == 1 else ""

    def why(self, scale: float | None, lr: float) -> str:
        """Says why the run ends, and what helps.

        Args:
            scale: loss scale of the next update, where there is one.
            lr: peak learning rate.
        """
        begun = f"{self.ended} updates in a row were skipped because"
        no_target = "no token of their batches had a target"
        if self.empty >= min(self.ended, self.limit):
            return f"{begun} {no_target}: look for broken data. A run that goes on reads what comes behind it"
        some = f" (of {self.empty}: {no_target})" if self.empty else ""
        if scale is not None and scale > SMALLEST_SCALE:
            return (
                f"{begun} the gradient was not finite{some}. The loss scale is now {scale:g}, and a run that goes on "
                "halves it further where that is too high; else look for broken data"
            )
        floor = f", with the loss scale at its floor of {SMALLEST_SCALE:g}" * (scale is not None)
        return f"{begun} the gradient was not finite{floor}{some}: lower optim.lr ({lr:g}), or look for broken data"
