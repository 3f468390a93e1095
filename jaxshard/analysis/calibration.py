"""Figures of a network fitted to measured collectives, for the planner's time model.

The model (`links.py`) says of n members, k in each of m nodes, and a payload of P bytes

    all_reduce  t = start + 2 (k-1)/k P / fast + 2 (m-1)/m P / (k slow) + hops x hop
    reduce_scatter, all_gather: all but the start halved;    permute  t = start + hop + P / fast (or slow)

which is linear in start, hop, 1/fast and 1/slow: one least-squares problem over all measurements, none of the four
below zero, each equation divided by its measured time, so that small messages count as much as large ones. `fast` and
`slow` are what is reached, not what a datasheet says.
"""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from scipy.optimize import nnls

from jaxshard.analysis.bandwidth import Measurement
from jaxshard.analysis.efficiency import XLA, Constants
from jaxshard.analysis.links import Fabric, Group, all_reduce, fabric, reduce_scatter, send, with_measured
from jaxshard.errors import InputError
from jaxshard.xla.hardware import Measured, Target

FITTED = ("all_reduce", "reduce_scatter", "all_gather", "permute")
"""Collectives of which the planner has a formula."""
FORMAT = "jaxshard calibration 1"


@dataclass(frozen=True)
class Calibration:
    """What is written to a file."""

    chip: str
    """As in a target's name; what jax calls the device where it is not known."""
    jax: str
    measured: Measured
    error: float
    """Median of |fitted - measured| / measured."""
    rows: int
    """Measurements that were fitted."""

    def as_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}

    def sentences(self) -> list[str]:
        """The fit in words."""
        m = self.measured
        rates = [(m.fast, "inside a host or slice"), (m.slow, "between hosts or slices")]
        speeds = [f"{rate / 1e9:.3g} GB/s {where}" for rate, where in rates if rate]
        return [
            f"Fitted to {self.rows} of them: {', '.join(speeds) or 'no bandwidth'}, start {1e6 * m.start:.1f} us, "
            f"{1e6 * m.hop:.1f} us a hop; median error {100 * self.error:.0f} %"
        ]


def calibrate(found: Sequence[Measurement], target: Target) -> Calibration:
    """Fits the planner's network to measurements on the devices of a target."""
    rows = [row for row in found if row.collective in FITTED and row.nodes]
    net = fabric(replace(target, measured=None))
    measured = fit(rows, net)
    ours = with_measured(replace(net, fast=math.inf, slow=math.inf), measured)
    errors = [abs(predicted(row, ours) / row.seconds - 1) for row in rows]
    name = target.chip.name
    return Calibration(name, jax.__version__, measured, float(np.median(errors)) if errors else math.nan, len(rows))


def fit(rows: Sequence[Measurement], net: Fabric) -> Measured:
    """Least squares, none of the unknowns below zero; `net` says how many links of a torus a group uses.

    Inside a node the model takes the faster of ring and tree, which depends on what is sought: it is fitted with rings
    first and then a few times with what the last fit prefers.
    """
    found = Measured(0.0, 0.0, None, None)
    if not rows:
        return found
    seconds = np.array([row.seconds for row in rows])
    for _ in range(6):
        terms = np.array([_terms(row, net, found) for row in rows]) / seconds[:, None]
        scale = np.maximum(np.linalg.norm(terms, axis=0), 1e-300)
        start, hop, fast, slow = (nnls(terms / scale, np.ones(len(rows)))[0] / scale).tolist()
        found = Measured(start, hop, 1 / fast if fast else None, 1 / slow if slow else None)
    return found


def _terms(row: Measurement, net: Fabric, last: Measured) -> list[float]:
    """What start, hop, 1/fast and 1/slow are multiplied with."""
    m, k, size = row.nodes, row.members // row.nodes, row.bytes
    if row.collective == "permute":
        return [1.0, 1.0, 0.0 if m > 1 else size, size if m > 1 else 0.0]
    part = 1.0 if row.collective == "all_reduce" else 0.5
    links = float(replace(net, fast=1.0).fast_bandwidth(k))
    ring = (2 * (k - 1), 2 * (k - 1) / k * size / links)
    tree = (2 * math.log2(k), 2 * size / links if k > 1 else 0.0)
    cost = lambda way: way[0] * last.hop + way[1] / (last.fast or math.inf)
    hops, inside = tree if last.fast and cost(tree) < cost(ring) else ring
    across = 2 * (m - 1) / m * size / k
    return [1.0, part * (hops + 2 * math.log2(m)), part * inside, part * across]


def predicted(row: Measurement, net: Fabric) -> float:
    """Seconds that the planner's formulas give for what was measured."""
    g, c = Group(row.members, row.members // row.nodes), Constants()
    if row.collective == "permute":
        return float(send(row.bytes, row.nodes > 1, net, c, XLA))
    formula = all_reduce if row.collective == "all_reduce" else reduce_scatter
    return float(formula(g, row.bytes, net, c, XLA))


def write_calibration(found: Calibration, file: Path) -> None:
    """Writes the file. Raises InputError when it cannot be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found.as_json(), indent=2) + "\n")
    except OSError as error:
        raise InputError(f"--calibration {file}: cannot be written ({error.strerror}); name another file") from None


def read_calibration(file: Path) -> Calibration:
    """Reads what `write_calibration` wrote. Raises InputError for anything else."""
    try:
        found: Any = json.loads(file.read_text())
        known = isinstance(found, dict) and found.pop("format", None) == FORMAT
        result = replace(Calibration(**found), measured=Measured(**found["measured"])) if known else None
    except OSError as error:
        raise InputError(f"--calibration {file}: cannot be read ({error.strerror})") from None
    except (ValueError, TypeError, KeyError, RecursionError):
        result = None
    if result is None:
        raise InputError(
            f"--calibration {file}: not a calibration; `python run.py collectives --calibration {file}` writes one"
        )
    for name, value in vars(result.measured).items():
        rate = name in ("fast", "slow")  # which may be missing, and nothing divides by zero
        if not (rate and value is None) and not _is_positive(value, or_zero=not rate):
            must = "null or a positive number (bytes a second)" if rate else "0 or a positive number (seconds)"
            raise InputError(f"--calibration {file}: {name} is {repr(value)[:40]}, and must be {must}; measure again")
    return result


def _is_positive(value: Any, or_zero: bool) -> bool:
    """Whether what a file holds is a finite number above zero."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and (0 < value <= sys.float_info.max or (or_zero and value == 0))


def calibrated(target: Target, file: Path, network: str | None = None) -> Target:
    """The target with the network of a calibration file.

    Args:
        target: of the same chip.
        file: the calibration.
        network: what --network says of the network between hosts, if anything.

    Raises:
        InputError: the file is not one, was measured on another chip, or has measured what `network` says.
    """
    found = read_calibration(file)
    if found.chip != target.chip.name:
        raise InputError(
            f"--calibration {file} was measured on {found.chip}, and the target {target.name} is {target.chip.name}: "
            "measure there, or leave it out"
        )
    if network is not None and found.measured.slow:
        raise InputError(
            f"--network {network} and --calibration {file} both say how fast the network between hosts is: drop one"
        )
    return replace(target, measured=found.measured)
