"""Plans that cannot be had: which pin stands in the way, and which hardware would do."""

from collections.abc import Callable
from dataclasses import replace

from jaxshard.analysis.memory import gib
from jaxshard.analysis.state_bytes import state_bytes
from jaxshard.config import Config
from jaxshard.errors import InputError
from jaxshard.models.layers import SAVED_NAMES
from jaxshard.models.presets import Architecture
from jaxshard.parallel.remat import parse_remat
from jaxshard.planner.confirm import Answers, Refused
from jaxshard.planner.host_memory import host_too_small, smallest_fitting, within_host
from jaxshard.planner.ranking import Scored, Search, limit_of, search
from jaxshard.planner.search import Pins, apply, words
from jaxshard.xla.hardware import Target


class NothingFits(InputError):
    """Legal layouts there are, but memory for none of them."""


def searched(config: Config, arch: Architecture, target: Target, pins: Pins, limit: float | None) -> Search:
    """As `ranking.search`; where no layout is legal the error says which pin stands in the way.

    Args:
        limit: bytes.
    """
    parse_remat(pins.fields.get("remat", "none"), SAVED_NAMES)
    try:
        return search(config, arch, target, pins, limit)
    except InputError as error:
        culprits = _culprits(pins, lambda fewer: bool(search(config, arch, target, fewer, limit).order))
        hint = f" ({' or '.join(culprits)} stands in the way: without it there are layouts)" if culprits else ""
        raise InputError(f"{error}{hint}") from None


def fitting(found: Search, pins: Pins, limit: float | None) -> list[Scored]:
    """The layouts that fit devices and hosts, in order; at least one.

    Raises:
        InputError: none does.
    """
    kept = within_host(found)
    if not kept:
        raise refused(found, pins, limit)
    return kept


def refused(found: Search, pins: Pins, limit: float | None, answers: Answers | None = None) -> NothingFits:
    """Nothing fits: what is missing, the smallest hardware that would do, and the pin without which a plan fits here.

    Args:
        found: a search that found nothing.
        pins: of the search.
        limit: bytes that the user allows; None: what a device has.
        answers: what the compiler said, where it was asked about what seemed a little too large.
    """
    answers = answers or Answers()
    least = None if found.fitting else answers.least
    error = host_too_small(found, pins, limit) if found.fitting else _nothing_fits(found, pins, limit, least)
    tried = " ".join(each.sentence for each in answers.refused if each is not least)
    culprits = _culprits(pins, lambda fewer: bool(within_host(search(*_asked(found), fewer, limit))))
    without = "it fits here without " + " or without ".join(culprits) if culprits else ""
    parts = [str(error), without, _unpacked(found, pins, limit), tried]
    return NothingFits("; ".join(part for part in parts if part))


def _unpacked(found: Search, pins: Pins, limit: float | None) -> str:
    """That a layout fits where no row holds several documents, whose mask fused attention takes; else ""."""
    config = replace(found.config, data=replace(found.config.data, pack=False))
    if not found.config.data.pack or not within_host(search(config, found.arch, found.target, pins, limit)):
        return ""
    return "it fits here with --data.pack false: a document a row, padded"


def _nothing_fits(found: Search, pins: Pins, memory_limit: float | None, compiled: Refused | None) -> InputError:
    """What is missing, by the compiler where it was asked, and the smallest hardware that would do."""
    least = compiled.scored if compiled else found.smallest()
    needs = compiled.needs if compiled else least.memory.total
    larger = smallest_fitting(found.config, found.arch, found.target, pins, memory_limit)
    fixed = f" with {pins}" if str(pins) else ""
    if larger is not None:
        hint = f"the smallest {found.target.chip.name} target that fits is {larger.target.name}"
    elif memory_limit is not None and needs <= limit_of(found.target, None):
        hint = "a device has more than that: raise the limit"
    elif str(pins):
        hint = "with this fixed no larger one fits either: fix less of it"
    else:
        hint = "no larger one of this chip fits either: shorten data.seq_len, or take a chip with more memory"
    batch = state_bytes(apply(found.config, least.candidate), found.arch, least.candidate.shape).batch
    if batch > found.limit:
        hint += f"; the tokens of a batch alone take {gib(batch)}: lower train.global_batch"
    which, by = (" of those that the compiler was asked about", " by its word") if compiled else ("", "")
    may = found.allowed if compiled else found.limit
    sizes = (gib(needs), gib(may)) if gib(needs) != gib(may) else (f"{needs:,} bytes", f"{int(may):,}")
    return InputError(
        f"the model fits nowhere on {found.target.name}{fixed}: the layout that takes the least{which} "
        f"({words(least.candidate)}, {found.config.train.precision}) needs {sizes[0]} on a device{by}, and "
        f"{sizes[1]} may be used; {hint}"
    )


def _asked(found: Search) -> tuple[Config, Architecture, Target]:
    return found.config, found.arch, found.target


def _culprits(pins: Pins, works: Callable[[Pins], bool]) -> list[str]:
    """The pins each of which, alone dropped, leaves something that works."""
    found = []
    each = [(Pins(pins.mesh, {}), Pins({}, pins.fields))] if pins.mesh else []
    for name, value in pins.fields.items():
        rest = {other: kept for other, kept in pins.fields.items() if other != name}
        each.append((Pins({}, {name: value}), Pins(pins.mesh, rest)))
    for one, rest in each:
        try:
            if works(rest):
                found.append(str(one))
        except InputError:
            continue
    return found
