"""Two independent proofs that a schedule is right: rules that its table must keep, and a run on symbolic values.

`validate` reads the table as a set of units and of values that live in slots; it never runs it. `simulate` does what
the executor does, row by row, and knows no rules: it keeps whatever ends up in the slots.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from jaxshard.parallel.schedule import BACKWARD_COLUMNS, COLUMNS, FORWARD_COLUMNS, Schedule

Unit = tuple[int, int]
"""(virtual stage, microbatch)"""


class ScheduleError(ValueError):
    """A table that would not compute the gradient; the message names the tick, the stage and the unit."""


def validate(schedule: Schedule) -> None:
    """Raises ScheduleError unless every unit runs exactly once, after all it depends on, and finds its values.

    No value may be overwritten before its one reader has read it, or be lost on the way; idle cells must be -1.
    """
    _check_shape(schedule)
    forward, backward = _units(schedule, "fwd"), _units(schedule, "bwd")
    _check_order(schedule, forward, backward)
    _check_sends(schedule, "fwd", forward)
    _check_sends(schedule, "bwd", backward)
    saved = [
        _Value(unit, 2 * forward[unit], schedule.fwd_save, 2 * backward[unit] + 1, schedule.bwd_load)
        for unit in forward
    ]
    _check_slots(schedule, "saved input", schedule.saved_slots, saved)
    last = schedule.stages * schedule.chunks - 1
    received = [
        _Value((k, m), 2 * forward[k - 1, m], schedule.fwd_put, 2 * tick, schedule.fwd_take)
        for (k, m), tick in forward.items()
        if k > 0
    ]
    _check_slots(schedule, "received activation", schedule.fwd_slots, received)
    received = [
        _Value((k, m), 2 * backward[k + 1, m] + 1, schedule.bwd_put, 2 * tick + 1, schedule.bwd_take)
        for (k, m), tick in backward.items()
        if k < last
    ]
    _check_slots(schedule, "received gradient", schedule.bwd_slots, received)


def _place(schedule: Schedule, unit: Unit) -> str:
    """Names a unit for a message."""
    k, m = unit
    return f"microbatch {m} in chunk {k // schedule.stages} of stage {k % schedule.stages}"


def _check_shape(schedule: Schedule) -> None:
    shape = (schedule.ticks, schedule.stages)
    for name in COLUMNS:
        column = getattr(schedule, name)
        if column.shape != shape or not np.issubdtype(column.dtype, np.integer):
            raise ScheduleError(f"{name} is {column.dtype} {column.shape}: it must be whole numbers, {shape}")
    empty = np.flatnonzero(~schedule.fwd_live.any(1) & ~schedule.bwd_live.any(1))
    if len(empty):
        raise ScheduleError(f"tick {empty[0]}: no stage does anything")


def _units(schedule: Schedule, way: str) -> dict[Unit, int]:
    """Tick of each forward ("fwd") or backward ("bwd") unit; all of them, once each."""
    word = "forward" if way == "fwd" else "backward"
    own = [c for c in (FORWARD_COLUMNS if way == "fwd" else BACKWARD_COLUMNS) if not c.endswith("put")]
    columns = {name: getattr(schedule, name) for name in own}
    microbatches, chunks = columns[f"{way}_microbatch"], columns[f"{way}_chunk"]
    found: dict[Unit, int] = {}
    for tick, stage in np.ndindex(microbatches.shape):
        m, v = int(microbatches[tick, stage]), int(chunks[tick, stage])
        where = f"tick {tick}, stage {stage}"
        if m == -1:
            for name, column in columns.items():
                if column[tick, stage] != -1:
                    raise ScheduleError(
                        f"{where}: {name} is {column[tick, stage]} though no {word} runs; it must be -1"
                    )
            continue
        if not 0 <= m < schedule.microbatches or not 0 <= v < schedule.chunks:
            raise ScheduleError(
                f"{where}: {word} of microbatch {m} in chunk {v}, but there are {schedule.microbatches} microbatches "
                f"and {schedule.chunks} chunks"
            )
        unit = (v * schedule.stages + stage, m)
        if unit in found:
            raise ScheduleError(f"{where}: {word} of {_place(schedule, unit)} runs again; it ran in tick {found[unit]}")
        found[unit] = tick
    for unit in np.ndindex(schedule.stages * schedule.chunks, schedule.microbatches):
        if unit not in found:
            raise ScheduleError(f"{word} of {_place(schedule, unit)} never runs")
    return found


def _check_order(schedule: Schedule, forward: dict[Unit, int], backward: dict[Unit, int]) -> None:
    """Each unit after those it depends on; a send arrives at the end of its half, for the next tick."""
    last = schedule.stages * schedule.chunks - 1
    for (k, m), tick in forward.items():
        if k > 0 and tick <= forward[k - 1, m]:
            raise ScheduleError(
                f"tick {tick}: forward of {_place(schedule, (k, m))} needs a value that the stage before sends in tick "
                f"{forward[k - 1, m]}"
            )
    for (k, m), tick in backward.items():
        if tick < forward[k, m]:
            raise ScheduleError(
                f"tick {tick}: backward of {_place(schedule, (k, m))} comes before its forward in tick {forward[k, m]}"
                + (", so the loss is not known" if k == last else "")
            )
        if k < last and tick <= backward[k + 1, m]:
            raise ScheduleError(
                f"tick {tick}: backward of {_place(schedule, (k, m))} needs a gradient that the stage after sends in "
                f"tick {backward[k + 1, m]}"
            )


def _check_sends(schedule: Schedule, way: str, units: dict[Unit, int]) -> None:
    """Takes and puts stand exactly where a value is received: every one that is sent is kept, and nothing else."""
    step = 1 if way == "fwd" else -1
    put, take = getattr(schedule, f"{way}_put"), getattr(schedule, f"{way}_take")
    first, last = (0, schedule.stages * schedule.chunks - 1)[::step]
    source = "the embedding" if way == "fwd" else "the loss"
    kept = np.zeros(put.shape, bool)
    for (k, m), tick in units.items():
        unit, stage = _place(schedule, (k, m)), k % schedule.stages
        if k == first and take[tick, stage] != -1:
            raise ScheduleError(
                f"tick {tick}: {unit} takes its value from {source}; {way}_take is {take[tick, stage]}, must be -1"
            )
        if k == last:
            continue
        to = (stage + step) % schedule.stages
        kept[tick, to] = True
        if put[tick, to] == -1:
            raise ScheduleError(f"tick {tick}, stage {to}: what stage {stage} sends of {unit} is dropped")
    for tick, stage in np.argwhere((put != -1) & ~kept):
        raise ScheduleError(
            f"tick {tick}, stage {stage}: {way}_put is {put[tick, stage]}, but no value that is needed arrives; "
            "it must be -1"
        )


@dataclass(frozen=True)
class _Value:
    """What a unit reads from a buffer at its stage; times in half-ticks (a half reads before it writes)."""

    unit: Unit
    write: int
    write_column: np.ndarray
    read: int
    read_column: np.ndarray


def _check_slots(schedule: Schedule, what: str, size: int, values: Iterable[_Value]) -> None:
    """Every value is read from the slot that it was written to, and the slot holds nothing else meanwhile."""
    holders: dict[tuple[int, int], list[_Value]] = {}
    for value in values:
        stage = value.unit[0] % schedule.stages
        written = int(value.write_column[value.write // 2, stage])
        read = int(value.read_column[value.read // 2, stage])
        unit = _place(schedule, value.unit)
        if not 0 <= written < size or not 0 <= read < size:
            bad, tick = (written, value.write // 2) if not 0 <= written < size else (read, value.read // 2)
            raise ScheduleError(f"tick {tick}: the {what} of {unit} is in slot {bad}; there are slots 0 to {size - 1}")
        if written != read:
            raise ScheduleError(
                f"tick {value.read // 2}: {unit} reads its {what} from slot {read}; it was put into slot {written} in "
                f"tick {value.write // 2}"
            )
        holders.setdefault((stage, written), []).append(value)
    for (stage, slot), held in holders.items():
        for old, new in pairwise(sorted(held, key=lambda value: value.write)):
            if new.write < old.read:
                raise ScheduleError(
                    f"tick {new.write // 2}, stage {stage}: the {what} of {_place(schedule, new.unit)} overwrites slot "
                    f"{slot}, which holds that of {_place(schedule, old.unit)} until tick {old.read // 2}"
                )


@dataclass
class Outcome:
    """All that a step computes: each thing with the exact expression it was computed from, and how often."""

    forwards: Counter = field(default_factory=Counter)
    """(virtual stage, microbatch, input)"""
    losses: Counter = field(default_factory=Counter)
    """(microbatch, output of the last virtual stage)"""
    weight_gradients: Counter = field(default_factory=Counter)
    """(virtual stage, microbatch, input, output gradient): summed, they are the gradient of the weights."""
    embed_gradients: Counter = field(default_factory=Counter)
    """(microbatch, gradient of the embedding's output)"""


def _term(*parts: object) -> str:
    """A name for the expression `parts` that two expressions share only if they are equal."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()


def expected(S: int, M: int, V: int) -> Outcome:
    """What one device computes, microbatch by microbatch."""
    outcome = Outcome()
    for m in range(M):
        inputs = [_term("embed", m)]
        for k in range(V * S):
            outcome.forwards[k, m, inputs[k]] += 1
            inputs.append(_term("f", k, m, inputs[k]))
        outcome.losses[m, inputs[-1]] += 1
        dy = _term("loss gradient", m, inputs[-1])
        for k in reversed(range(V * S)):
            outcome.weight_gradients[k, m, inputs[k], dy] += 1
            dy = _term("df", k, m, inputs[k], dy)
        outcome.embed_gradients[m, dy] += 1
    return outcome


def simulate(schedule: Schedule) -> Outcome:
    """Runs the rows of each phase as the executor does, on expressions; right if it equals `expected(S, M, V)`.

    Idle stages compute "junk" in the forward half and zero gradients in the backward half, as in the executor.
    Writes out of range are left out, as in the executor; such reads give junk.
    """
    S = schedule.stages
    saved = np.full((S, schedule.saved_slots), "junk", object)
    activations = np.full((S, schedule.fwd_slots), "junk", object)
    gradients = np.full((S, schedule.bwd_slots), "junk", object)
    outcome = Outcome()
    for phase in schedule.phases:
        rows = schedule.rows(phase)
        for i in range(phase.stop - phase.start):
            row = {name: column[i] for name, column in rows.items()}
            if phase.forward:
                _forward_half(S, row, saved, activations, outcome)
            if phase.backward:
                _backward_half(S, row, saved, gradients, outcome)
    return outcome


def _get(buffer: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """buffer [S, slots], slots [S] -> [S]"""
    found = buffer[np.arange(len(slots)), np.minimum(slots, buffer.shape[1] - 1)]
    return np.where(slots < buffer.shape[1], found, "junk")


def _put(buffer: np.ndarray, slots: np.ndarray, values: np.ndarray) -> None:
    """Writes values [S] into slots [S] of buffer [S, slots]."""
    stages = np.flatnonzero(slots < buffer.shape[1])
    buffer[stages, slots[stages]] = values[stages]


def _run_chunks(S: int, row: dict, way: str, x: np.ndarray) -> tuple[list[int], np.ndarray]:
    """Virtual stages [S], and their outputs [S] for inputs x [S]."""
    units = [int(v) * S + s for s, v in enumerate(row[f"{way}_chunk"])]
    cells = zip(units, row[f"{way}_microbatch"], x, row[f"{way}_live"], strict=True)
    return units, np.array([_term("f", k, int(m), value) if live else "junk" for k, m, value, live in cells], object)


def _forward_half(S: int, row: dict, saved: np.ndarray, activations: np.ndarray, outcome: Outcome) -> None:
    x = np.where(row["fwd_embed"], _term("embed", int(row["embed_microbatch"])), _get(activations, row["fwd_take"]))
    _put(saved, row["fwd_save"], x)
    units, y = _run_chunks(S, row, "fwd", x)
    for s in np.flatnonzero(row["fwd_live"]):
        outcome.forwards[units[s], int(row["fwd_microbatch"][s]), x[s]] += 1
    _put(activations, row["fwd_put"], np.roll(y, 1))


def _backward_half(S: int, row: dict, saved: np.ndarray, gradients: np.ndarray, outcome: Outcome) -> None:
    x = _get(saved, row["bwd_load"])
    units, y = _run_chunks(S, row, "bwd", x)
    dy = _get(gradients, row["bwd_take"])
    if row["loss_live"]:
        m = int(row["loss_microbatch"])
        outcome.losses[m, y[-1]] += 1
        dy = np.where(row["bwd_loss"], _term("loss gradient", m, y[-1]), dy)
    dx = np.full(S, "zero", object)
    for s in np.flatnonzero(row["bwd_live"]):
        m = int(row["bwd_microbatch"][s])
        outcome.weight_gradients[units[s], m, x[s], dy[s]] += 1
        dx[s] = _term("df", units[s], m, x[s], dy[s])
    if row["embed_gradient_live"]:
        outcome.embed_gradients[int(row["embed_gradient_microbatch"]), dx[0]] += 1
    _put(gradients, row["bwd_put"], np.roll(dx, -1))
