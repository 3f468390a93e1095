"""What is known of one compiled function, as plain values that every view reads."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import jax

from jaxshard.analysis.compare import Check
from jaxshard.analysis.facts import Facts
from jaxshard.analysis.ledger import Row, bytes_by_axis
from jaxshard.analysis.own_arrays import Undonated
from jaxshard.analysis.shrink_advice import LargeBuffer
from jaxshard.parallel.rules import Replicated
from jaxshard.training.program import Program
from jaxshard.xla.compile import Memory, SpmdWarning


@dataclass(frozen=True)
class Explanation:
    """What is known of one compiled function."""

    target: str
    platform: str
    compiler: str
    mesh: str
    """As --mesh takes it, or axes and sizes."""
    sizes: dict[str, int]
    """Of all axes of the mesh, outermost first."""
    zero: int | None
    rows: tuple[Row, ...]
    check: Check | None
    """Found against expected, for the train step."""
    not_compared: str
    """Why there is no check, or ""."""
    memory: Memory
    usable: int
    """Bytes of a device that a program may take; 0 where that is not known."""
    flops: float
    """Matrix FLOPs of one device in one run."""
    replicated: tuple[Replicated, ...]
    """Arrays that stay whole against the rules; of a function of the user's own, all that several devices hold."""
    undonated: tuple[Undonated, ...]
    """Arguments of such a function whose memory outputs could reuse."""
    warnings: tuple[SpmdWarning, ...]
    buffers: tuple[LargeBuffer, ...]
    program: Program | None = field(default=None, repr=False)
    facts: Facts | None = field(default=None, repr=False)

    @property
    def ok(self) -> bool:
        """False when unexpected traffic exceeds the threshold, or arrays are held whole that the rules split."""
        if self.check is None or self.program is None:
            return True
        ruled = len(self.program.replicated)  # what the rules themselves leave whole
        return len(self.replicated) == ruled and not (self.check.failures or self.check.undone)

    @property
    def own(self) -> bool:
        """Whether it is a function of the user's own, of whose axes and arrays no rule is known."""
        return self.facts is None

    @property
    def fits(self) -> bool:
        """Whether the peak is within a device's memory; compilers for GPUs do not refuse what is not."""
        return self.usable == 0 or self.memory.peak <= self.usable

    def to_dict(self) -> dict[str, Any]:
        """The result as `--json` prints it."""
        compared = self.check
        return {
            "target": self.target,
            "jax": jax.__version__,
            "compiler": self.compiler,
            "mesh": self.mesh,
            "zero": self.zero,
            "collectives": [_row(row) for row in self.rows],
            "bytes_by_axis": bytes_by_axis(self.rows),
            "expected": [
                {"kind": e.kind, "axes": list(e.axes), "bytes": e.bytes, "count": e.count, "reason": e.reason}
                for e in (compared.expected if compared else ())
            ],
            "unexpected": [asdict(item) for item in (compared.unexpected if compared else ())],
            "missing": [asdict(item) for item in (compared.missing if compared else ())],
            "undone": list(compared.undone if compared else ()),
            "rewrites": list(compared.rewrites if compared else ()),
            "unpredicted": list(compared.unpredicted) if compared else [self.not_compared],
            "memory": asdict(self.memory),
            "fits": self.fits,
            "temporaries": [asdict(buffer) for buffer in self.buffers],
            "flops": self.flops,
            "replicated": [leaf.as_json() for leaf in self.replicated],
            "undonated": [asdict(leaf) for leaf in self.undonated],
            "warnings": [asdict(warning) for warning in self.warnings],
        }


def _row(row: Row) -> dict[str, Any]:
    return {
        "kind": row.kind,
        "axes": list(row.axes),
        "bytes": row.bytes,
        "count": row.count,
        "exact": row.exact,
        "reason": row.reason,
        "source": row.source,
        "parameters": listed(row.parameters),
        "async": row.is_async,
        "overlap": row.overlap,
        "dtype": row.dtype,
        "note": row.note,
    }


def listed(names: Sequence[str], most: int = 3) -> str:
    """ "a, b, c and 2 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
