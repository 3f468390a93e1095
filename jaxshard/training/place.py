"""Where a run goes on: which checkpoint, what is said about it, and what is kept when it goes back."""

from pathlib import Path

from jaxshard.errors import InputError
from jaxshard.training.checkpoint import Checkpoints
from jaxshard.training.metrics import DROPPED_FILE, METRICS_FILE, logged_steps
from jaxshard.training.saved import doubts, incomplete_steps, named_steps

RECORD_FILE = ".newest_checkpoint"
"""Step of the newest complete checkpoint, or "none", beside the folder of checkpoints: the folder may be lost."""
_SET_ASIDE = "set_aside"


def place_to_go_on(folder: Path, saved: Checkpoints, resume: str | int, end: int) -> int | None:
    """Returns the step of the checkpoint that a run goes on from, None to begin at step 0.

    Args:
        folder: of the run.
        saved: its checkpoints.
        resume: "required" or "auto" for the newest, or a step; 0 begins again where there is no such checkpoint.
        end: step at which the run ends.

    Raises:
        InputError: there is no checkpoint of that step, or none at all although the run has made progress; or the run
            would end before the step that it is to go back to.
    """
    steps = saved.steps()
    if isinstance(resume, int):
        if resume > end:
            raise InputError(f"--resume {resume}: the run would end before, at step {end}; raise --train.steps")
        if resume in steps:
            return resume
        if resume == 0:
            return None
        there = f"there are {', '.join(map(str, steps))}" if steps else "there is none"
        raise InputError(f"--resume {resume}: {saved.folder} holds no complete checkpoint of step {resume}; {there}")
    if steps:
        return steps[-1]
    if progress := _progress(folder):
        raise InputError(
            f"--resume: {progress}, but {_missing(saved.folder)}: put back what is missing, or begin again at step 0 "
            f"with --resume 0, which keeps the logged lines in {DROPPED_FILE}"
        )
    return None


def said_of(folder: Path, saved: Checkpoints, step: int | None) -> list[str]:
    """What a user should know about going on from that checkpoint: what is passed over, lost, or not verified."""
    said = [] if step is None else doubts(saved.folder, step)
    record, there = _recorded(folder), named_steps(saved.folder)
    if isinstance(record, int) and step is not None and record > step and record not in there:
        said.append(f"the run had saved step {record} too, and {saved.folder} holds no checkpoint of it any more")
    beyond = sum(each > (step or 0) for each in logged_steps(folder))
    if beyond:
        lines = f"{beyond} logged lines" if beyond > 1 else "a logged line"
        said.append(f"{lines} from beyond step {step or 0} will be in {DROPPED_FILE}, no longer in {METRICS_FILE}")
    return said


def go_back(saved: Checkpoints, step: int) -> list[str]:
    """Sets the checkpoints of later steps aside under other names, and says so in lines."""
    said = []
    for newer in named_steps(saved.folder):
        if newer > step:
            name = aside = f"{newer}.{_SET_ASIDE}"
            number = 1
            while (saved.folder / aside).exists():
                number += 1
                aside = f"{name}.{number}"
            (saved.folder / str(newer)).rename(saved.folder / aside)
            said.append(f"the run goes back to step {step}: checkpoint {newer} is kept as {saved.folder / aside}")
    return said


def _recorded(folder: Path) -> int | str | None:
    """The step in the record, "none" where a run had no checkpoint yet; None without a record."""
    try:
        text = (folder / RECORD_FILE).read_text().strip()
        return text if text == "none" else int(text)
    except (OSError, ValueError):
        return None


def _progress(folder: Path) -> str:
    """What shows that a run had checkpoints, or "".

    A run that was killed before its first one has logged lines too; its record says that there was none. Without a
    record the lines count.
    """
    record, logged = _recorded(folder), [step for step in logged_steps(folder) if step > 0]
    if isinstance(record, int):
        return f"the run had saved step {record}"
    incomplete = incomplete_steps(folder / "checkpoints")
    if incomplete:
        return f"the run had a checkpoint of step {max(incomplete)}"
    if record is None and logged:
        known = [step for step in logged if step != float("inf")]
        return f"{folder / METRICS_FILE} reaches step {max(known):.0f}" if known else f"{METRICS_FILE} holds lines"
    return ""


def _missing(folder: Path) -> str:
    incomplete = incomplete_steps(folder)
    if not incomplete:
        return f"{folder} {'holds no checkpoint' if folder.is_dir() else 'is missing'}"
    return "; ".join(f"{folder / str(step)} lacks {lacks}" for step, lacks in incomplete.items())
