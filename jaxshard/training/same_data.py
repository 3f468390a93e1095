"""Whether a run that goes on, or is evaluated, has the data that its checkpoint was trained on, and where it goes on.

With every checkpoint lie the fingerprint of the data and the number of rows that the run had taken of their order.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from jaxshard.config.file import load_run
from jaxshard.data import Dataset
from jaxshard.errors import InputError
from jaxshard.training.saved import describe

ALLOW = "--allow_changed_data"


def data_facts(dataset: Dataset, seed: int, row: int) -> dict[str, Any]:
    """What is recorded with a checkpoint: the fingerprint, and the rows taken so far."""
    return {"data": asdict(dataset.fingerprint(seed)) | {"row": row}}


def check_same_data(dataset: Dataset, seed: int, checkpoints: Path, step: int, allowed: bool) -> str:
    """Refuses to go on with other rows, or another order of them, than the checkpoint was trained on.

    Args:
        dataset: of the run that goes on.
        seed: of its order.
        checkpoints: their folder.
        step: of the checkpoint.
        allowed: whether the user asked for it.

    Returns what to say, where it is allowed or cannot be known; "" where nothing changed.

    Raises:
        InputError: something changed; names it with both values.
    """
    before = describe(checkpoints, step).meta.get("data")
    if before is None:
        return f"checkpoint {step} has no fingerprint of its data: whether it changed since is not known"
    changes = dataset.fingerprint(seed).changes_since(before)
    if not changes:
        return ""
    what = f"the data is not what checkpoint {step} was trained on: {'; '.join(changes)}"
    if allowed:
        return f"{what}. It goes on behind row {before['row']:,} of the new order, as {ALLOW} says"
    raise InputError(
        f"--resume: {what}. Rows would be skipped and repeated, and what was trained on may now be held out: bring the "
        f"data back, drop the option, or go on all the same with {ALLOW}"
    )


def other_text(dataset: Dataset, checkpoints: Path, step: int) -> list[str]:
    """What differs between the documents of a checkpoint, as they were split and cut, and those here; in words."""
    before = describe(checkpoints, step).meta.get("data", {})
    return dataset.fingerprint(0).changes_since(before, order=False)


def rows_before(checkpoints: Path, step: int, config_file: Path) -> int:
    """Rows that a run had taken when it saved a checkpoint.

    One from before they were recorded had the batch of its configuration throughout.
    """
    before = describe(checkpoints, step).meta.get("data")
    return before["row"] if before else step * load_run(config_file).train.global_batch
