"""Asks the real compiler about a configuration, and about the plans of a search, on targets that may be absent."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import jax

from jaxshard.analysis.memory import gib
from jaxshard.analysis.timeline import timeline
from jaxshard.config import Config
from jaxshard.data.tokenizer import IdTokenizer, load_tokenizer
from jaxshard.errors import InputError
from jaxshard.planner.correction import Correction
from jaxshard.planner.exploration import TRIES, Asked, Offer, Verdict, distinct, family
from jaxshard.planner.host_memory import host_limit
from jaxshard.planner.ranking import Scored, Search
from jaxshard.planner.search import apply, words
from jaxshard.training.program import Program, build_program
from jaxshard.xla.absent import devices_for, mesh_for, shape_for
from jaxshard.xla.compile import Compiled, DoesNotFit, compile_for
from jaxshard.xla.hardware import Target

EDGE = 1.4
"""Share of what may be used that the closed form may come to where the compiler is asked all the same: it was never too
high by as much (docs/planner-memory.md), but for what lies on a TPU's chip."""
ON_CHIP = 128 * 2**20
"""Bytes of on-chip memory of a TPU, where the compiler places temporaries that the closed form counts: VMEM of a v5e or
v6e, of both cores of a v5p, and CMEM of a v4 (jax-ml.github.io/scaling-book, part 2; Jouppi et al. 2023, TPU v4)."""
MERGED = "A step of one pass over its batch is the same program with ZeRO-1 and ZeRO-2: its row says 1."


@dataclass(frozen=True)
class Confirmed:
    """A configuration's step as the target's compiler made it, or why it refused."""

    program: Program
    result: Compiled | DoesNotFit


@dataclass(frozen=True)
class Refused:
    """A layout that the compiler does not take."""

    scored: Scored
    needs: int
    """Bytes on a device; 0 where that is not known."""
    sentence: str


@dataclass(frozen=True)
class Question:
    """A layout that the compiler is about to be asked about."""

    found: Search
    scored: Scored
    number: int
    """From 1."""
    most: int
    """Questions at most."""


@dataclass
class Answers:
    """What the compiler says beside its verdicts."""

    notes: list[str] = field(default_factory=list)
    """Sentences for the user."""
    refused: list[Refused] = field(default_factory=list)
    expected: Callable[[Scored], float] = lambda scored: scored.seconds
    """Seconds of a layout that fits: of its compiled schedule, or from shapes as compiled schedules correct them."""
    asking: Callable[[Question], AbstractContextManager[object]] = nullcontext
    """Entered for each compilation."""

    def refuse(self, scored: Scored, why: str, needs: int = 0) -> Verdict:
        """Takes a refusal down."""
        self.refused.append(Refused(scored, needs, f"Not offered: {words(scored.candidate)}: {why}"))
        self.notes.append(self.refused[-1].sentence)
        return Verdict(False)

    @property
    def least(self) -> Refused | None:
        """The refused layout that takes the least by the compiler."""
        return min((each for each in self.refused if each.needs), key=lambda each: each.needs, default=None)


def compile_step(config: Config, target: Target, vocabulary: int | None = None, buffers: bool = False) -> Confirmed:
    """Compiles the train step of a configuration for a target.

    Args:
        config: complete, with its mesh.
        target: present or absent devices.
        vocabulary: of the tokenizer, where the model leaves it open.
        buffers: also read the buffer assignment, as in `compile_for`.

    Raises:
        InputError: the compiler is not installed, or the configuration does not fit the target's devices.
    """
    devices = devices_for(target)
    shape = shape_for(target, config.mesh)
    program = build_program(config, devices, vocabulary, mesh=mesh_for(target, shape))
    # Not read from the shardings: those of absent GPUs have no memory kind, as these devices have no memories.
    low = (program.offloaded, False)
    step, batch = program.step, program.abstract_batch()
    result = compile_for(target, step, program.abstract, batch, host=(low, low), buffers=buffers)
    return Confirmed(program, result)


def compiler_missing(target: Target) -> str | None:
    """Why the target's compiler cannot be asked here, or None when it can."""
    try:
        devices_for(target)
    except InputError as error:
        return str(error)
    return None


def tokenizer_size(config: Config) -> int | None:
    """Vocabulary of the tokenizer, where the model takes it from there, as `train` does; None where only data can tell.

    Raises:
        InputError: there is no such tokenizer.
    """
    model = config.model
    if model.preset is not None or model.d_model is None or model.vocab_size is not None:
        return None
    tokenizer = load_tokenizer(config.data.tokenizer)
    return None if isinstance(tokenizer, IdTokenizer) else tokenizer.vocab_size


def confirmed(found: Search, count: int, answers: Answers) -> list[Offer]:
    """Fitting layouts, the best of each mesh and ZeRO stage, fastest first; at least `count` as the compiler sees them.

    Where nothing should fit, or the compiler refuses all that should, it is asked about the least of what is a little
    too large by the closed form.

    Args:
        found: a search.
        count: 0 asks nothing.
        answers: takes what is said of each layout that is not offered.
    """
    for offers in (
        lambda: _fitting(found, count, answers),
        lambda: _too_large(found, count, answers, on_host=False),
        lambda: _too_large(found, count, answers, on_host=True),
    ):
        if offered := offers():
            return offered
    return []


def _too_large(found: Search, count: int, answers: Answers, on_host: bool) -> list[Offer]:
    """What the compiler takes of the `count` least that are a little too large by the closed form, fastest first."""
    if count == 0:
        return []
    spare = ON_CHIP if found.target.chip.platform == "tpu" else 0
    near = found.above(EDGE * found.allowed + spare)
    if on_host:
        near = [scored for scored in near if 0 < scored.memory.host <= host_limit(found.target)]
    else:
        near = [scored for scored in near if scored.memory.host == 0]
    offers = []
    for number, scored in enumerate(near[:count], 1):
        with answers.asking(Question(found, scored, number, min(count, len(near)))):
            verdict = _verdict(found, scored, answers)
        if verdict.peak is not None:  # an estimate alone says that it does not fit
            offers.append(Offer(scored, verdict, verdict.timeline.seconds if verdict.timeline else scored.seconds))
    return sorted(offers, key=lambda offer: offer.expected) if found.timed else offers


def _fitting(found: Search, count: int, answers: Answers) -> list[Offer]:
    """Asks about `count` layouts, each of another mesh or stage, and then about whatever may still be faster.

    What a compiled schedule shows corrects the times from shapes of the layouts that are like it, so the next question
    goes to another kind when one came out slow, and to smaller layouts of the same mesh when it lay near the edge of
    the memory. More memory therefore adds layouts to choose from and takes none away.
    """
    pool, merged = distinct(found)
    asked = Asked(count, pool, Correction(found.target.chip.memory_bytes or math.inf))
    while (scored := asked.next()) is not None:
        with answers.asking(Question(found, scored, len(asked.verdicts) + 1, TRIES * count)):
            asked.take(scored, _verdict(found, scored, answers))
    answers.expected = asked.expected
    offers = asked.offers()
    rows = {family(offer.scored) for offer in offers}
    answers.notes += [MERGED] if rows & merged else []
    return offers


def _verdict(found: Search, scored: Scored, answers: Answers) -> Verdict:
    """Whether the compiler takes a layout, its bytes on a device and its time; an answer taken down where it does not.

    The bytes are None where host memory is used and the compiler for absent devices cannot handle that: it says so with
    an internal error, which is no verdict on the layout.

    Raises:
        InputError: of a layout that stays on the device; whatever stands in its way, it is not the compiler.
    """
    c = scored.candidate
    on_host = c.offload != "none" or c.remat == "offload"
    config = apply(found.config, c)
    try:
        result = compile_step(config, found.target, tokenizer_size(config)).result
    except (InputError, jax.errors.JaxRuntimeError) as error:
        if isinstance(error, InputError) and not on_host:
            raise
        said = str(error).splitlines()[0][:200]
        if on_host and said.startswith("INTERNAL"):
            answers.notes.append(f"Not confirmed: {words(c)}: the compiler for absent devices fails ({said}).")
            return Verdict(True)
        return answers.refuse(scored, f"the compiler says {said}")
    if isinstance(result, DoesNotFit):
        size = gib(result.needs) if result.needs else "more memory than there is"
        return answers.refuse(scored, f"the compiler refuses it ({size} needed).", result.needs)
    peak, may = result.memory.peak, found.allowed
    if peak > may:
        sizes = (gib(peak), gib(may)) if gib(peak) != gib(may) else (f"{peak:,} bytes", f"{int(may):,}")
        return answers.refuse(scored, f"{sizes[0]} by the compiler, {sizes[1]} may be used.", peak)
    mesh: dict[str, int] = c.shape.by_axis
    return Verdict(True, peak, timeline(result, mesh) if found.timed else None)
