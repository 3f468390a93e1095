"""The two proofs of a schedule are themselves tested: with broken tables, they must fail."""

from dataclasses import replace

import numpy as np
import pytest

from jaxshard.parallel import schedule as sch
from jaxshard.parallel.schedule import COLUMNS, make
from jaxshard.parallel.schedule_check import ScheduleError, expected, simulate, validate

SAMPLES = [("gpipe", 3, 4, 1), ("1f1b", 3, 6, 1), ("interleaved", 2, 4, 2), ("interleaved", 3, 7, 2)]


def is_right(table):
    return simulate(table) == expected(table.stages, table.microbatches, table.chunks)


def is_accepted(table):
    try:
        validate(table)
    except ScheduleError:
        return False
    return True


def changed(table, column, tick, stage, value):
    array = getattr(table, column).copy()
    array[tick, stage] = value
    return replace(table, **{column: array})


def all_columns(table, change):
    return replace(table, **{name: change(getattr(table, name)) for name in COLUMNS})


def first(table, column, test=lambda value: value >= 0, stage=None):
    """(tick, stage) of the first cell that passes the test, at `stage` if given."""
    cells = np.argwhere(test(getattr(table, column)))
    return next((int(t), int(s)) for t, s in cells if stage in (None, s))


def change_first(column, value, **where):
    return lambda table: changed(table, column, *first(table, column, **where), value)


def move_backward(table, ticks):
    """All backward columns earlier by some ticks."""
    early = {name: np.roll(getattr(table, name), -ticks, 0) for name in sch.BACKWARD_COLUMNS}
    return all_columns(replace(table, **early), lambda column: column[:-ticks])


def overwrite(table):
    """Microbatch 1 of stage 0 goes through the slot that microbatch 0 still holds."""
    slot = int(table.fwd_save[0, 0])
    tick = int(np.argwhere((table.bwd_microbatch[:, 0] == 1) & (table.bwd_chunk[:, 0] == 0))[0, 0])
    return changed(changed(table, "fwd_save", 1, 0, slot), "bwd_load", tick, 0, slot)


def same_received_slot(table):
    """All received values go through slot 0, though one waits while the next arrives."""
    one = lambda column: np.where(column > 0, 0, column)
    return replace(table, fwd_put=one(table.fwd_put), fwd_take=one(table.fwd_take))


def early(table, columns, stage):
    """One of two stages runs a tick earlier."""

    def shifted(column):
        return np.where(np.arange(2) == stage, np.roll(column, -1, 0), column)

    return replace(table, **{name: shifted(getattr(table, name)) for name in columns})


BROKEN = {
    "unit twice": (change_first("fwd_microbatch", 0, test=lambda m: m == 1), "forward of microbatch 0 .* runs again"),
    "unit never": (
        lambda t: replace(t, **{c: np.where(t.bwd_microbatch == 2, -1, getattr(t, c)) for c in sch.BACKWARD_COLUMNS}),
        "backward of microbatch 2 .* never runs",
    ),
    "no such microbatch": (change_first("fwd_microbatch", 99), "forward of microbatch 99 .* there are 4 microbatches"),
    "no such chunk": (change_first("bwd_chunk", 7), "backward of microbatch 0 in chunk 7"),
    "idle with a slot": (change_first("fwd_save", 0, test=lambda x: x == -1), "no forward runs; it must be -1"),
    "empty tick": (lambda t: all_columns(t, lambda c: np.insert(c, 3, -1, 0)), "tick 3: no stage does anything"),
    "short column": (lambda t: replace(t, fwd_put=t.fwd_put[:-1]), "fwd_put is .* it must be"),
    "before its send": (
        lambda t: early(t, sch.FORWARD_COLUMNS, 1),
        "needs a value that the stage before sends in tick 0",
    ),
    "before its gradient": (
        lambda t: all_columns(early(t, sch.BACKWARD_COLUMNS, 0), lambda c: c[:-1]),
        "tick 3: backward of microbatch 0 in chunk 1 of stage 0 needs a gradient that the stage after sends in tick 3",
    ),
    "backward too early": (lambda t: move_backward(t, 1), "backward of microbatch 0 .* comes before its forward"),
    "send dropped": (
        change_first("fwd_put", -1),
        "what stage 0 sends of microbatch 0 in chunk 0 of stage 0 is dropped",
    ),
    "gradient dropped": (change_first("bwd_put", -1), "what stage 1 sends of microbatch 0 .* is dropped"),
    "nothing arrives": (change_first("fwd_put", 0, test=lambda x: x == -1), "no value that is needed arrives"),
    "embedding ignored": (
        lambda t: changed(t, "fwd_take", 0, 0, 0),
        "microbatch 0 in chunk 0 of stage 0 takes its value from the embedding",
    ),
    "loss ignored": (
        lambda t: changed(t, "bwd_take", *first(t, "bwd_microbatch", stage=1), 0),
        "takes its value from the loss",
    ),
    "wrong saved slot": (
        change_first("bwd_load", 1),
        "reads its saved input from slot 1; it was put into slot 2 in tick 3",
    ),
    "no such slot": (lambda t: replace(t, saved_slots=t.saved_slots - 1), "is in slot 4; there are slots 0 to 3"),
    "overwritten": (overwrite, "saved input of microbatch 1 .* overwrites slot 0, which holds that of microbatch 0"),
    "more microbatches": (lambda t: replace(t, microbatches=5), "forward of microbatch 4 .* never runs"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_table_is_named_exactly(kind):
    breaks, message = BROKEN[kind]
    with pytest.raises(ScheduleError, match=message):
        validate(breaks(make("interleaved", 2, 4, 2)))


def test_a_waiting_value_that_is_overwritten_is_found():
    table = same_received_slot(make("interleaved", 3, 7, 2))
    assert not is_right(table)
    with pytest.raises(ScheduleError, match=r"received activation of .* overwrites slot 0"):
        validate(table)


def test_loss_before_the_forward_is_found():
    with pytest.raises(ScheduleError, match="so the loss is not known"):
        validate(all_columns(make("gpipe", 1, 2), lambda c: c[[2, 3, 0, 1]]))  # B0 B1 F0 F1


@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize("column", COLUMNS)
def test_every_change_of_one_cell_is_rejected(sample, column):
    table = make(*sample)
    values = getattr(table, column)
    for tick, stage in np.ndindex(values.shape):
        for value in {-1, 0, int(values[tick, stage]) + 1, int(values.max())} - {int(values[tick, stage])}:
            assert not is_accepted(changed(table, column, tick, stage, value)), (tick, stage, value)


@pytest.mark.parametrize("sample", SAMPLES)
def test_whatever_the_validator_accepts_computes_the_right_thing(sample):
    """Random damage of every size; also counts that the simulation sees it, so the two can disagree."""
    table, rng = make(*sample), np.random.default_rng(0)
    wrong = 0
    for _ in range(400):
        mutant = _damage(table, rng)
        right = is_right(mutant)
        wrong += not right
        assert right or not is_accepted(mutant)
    assert wrong > 200


def _damage(table, rng):
    name = str(rng.choice(COLUMNS))
    column = getattr(table, name).copy()
    (t, u), (s, r) = rng.integers(table.ticks, size=2), rng.integers(table.stages, size=2)
    match rng.integers(7):
        case 0:
            column[t, s] = rng.integers(-1, column.max() + 2)
        case 1:
            column[t, s], column[u, r] = column[u, r], column[t, s]
        case 2:
            column[:, s] = np.roll(column[:, s], 1)
        case 3:
            a, b = rng.integers(-1, column.max() + 1, size=2)
            column = np.where(column == a, b, np.where(column == b, a, column))
        case 4:
            order = np.arange(table.ticks)
            order[[t, u]] = order[[u, t]]
            return all_columns(table, lambda c: c[order])
        case 5:
            return all_columns(table, lambda c: np.where(np.arange(table.ticks)[:, None] == t, np.roll(c, 1, 1), c))
        case 6:
            return all_columns(table, lambda c: np.delete(c, t, 0))
    return replace(table, **{name: column})


@pytest.mark.parametrize("sample", SAMPLES)
def test_the_simulation_sees_each_wrong_index_of_a_live_unit(sample):
    table = make(*sample)
    for column in ("fwd_microbatch", "fwd_chunk", "fwd_save", "fwd_put", "bwd_microbatch", "bwd_chunk", "bwd_load"):
        for tick, stage in np.argwhere(getattr(table, column) >= 0):
            value = getattr(table, column)[tick, stage]
            assert not is_right(changed(table, column, tick, stage, value + 1)), (column, tick, stage)


def test_other_right_tables_are_accepted():
    """The rules do not ask for these very generators: slots in another order, a slot too many, a pause."""
    table = make("interleaved", 2, 4, 2)
    flip = lambda column: np.where(column >= 0, table.saved_slots - 1 - column, -1)
    late = sch._build("late", 3, 5, 2, start=11)
    tables = [replace(table, fwd_save=flip(table.fwd_save), bwd_load=flip(table.bwd_load)),
              replace(table, saved_slots=9, bwd_slots=4), late]  # fmt: skip
    for other in tables:
        validate(other)
        assert is_right(other)
