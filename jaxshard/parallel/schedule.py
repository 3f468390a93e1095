"""Pipeline schedules as plain tables: what every stage does in every tick. numpy only, no jax.

Legend: S stages, M microbatches, V chunks of layers per stage. Virtual stage k = v*S + s is chunk v of stage s: the
layers are dealt out to the stages round robin, so that a send always goes to the next stage (S-1 wraps to 0).
A *unit* is the forward or the backward of one microbatch through one virtual stage.

All stages run in lock-step as one program. A tick has a forward half, a backward half, or both; a half exists when
at least one stage has a unit in it, and then all stages compute (idle ones on values that nobody reads).

Forward half, at every stage at once:
    x = the embedding of the microbatch if the unit is virtual stage 0, else received_forward[fwd_take]
    saved[fwd_save] = x
    y = chunk fwd_chunk of microbatch fwd_microbatch, applied to x
    what the stage before sent: received_forward[fwd_put] = roll(y, +1)
Backward half:
    x = saved[bwd_load]; y = the chunk recomputed from x
    dy = gradient of the loss at y if the unit is the last virtual stage, else received_backward[bwd_take]
    dx, dweights = vjp of the chunk (dy = 0 at idle stages); dx of virtual stage 0 goes to the embedding
    what the stage after sent: received_backward[bwd_put] = roll(dx, -1)

The loss is taken in the backward half, from the output that is recomputed there anyway. So outputs are never stored
(GPipe would need M of them), and a backward may follow its forward after any number of ticks.

In columns -1 means "none": an idle stage (microbatch), an input that is not received (take), an arrival that nobody
needs (put).
"""

import heapq
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

import numpy as np

from jaxshard.errors import InputError, nearest

FORWARD_COLUMNS = ("fwd_microbatch", "fwd_chunk", "fwd_take", "fwd_save", "fwd_put")
BACKWARD_COLUMNS = ("bwd_microbatch", "bwd_chunk", "bwd_load", "bwd_take", "bwd_put")
COLUMNS = FORWARD_COLUMNS + BACKWARD_COLUMNS
NAMES = ("gpipe", "1f1b", "interleaved")

How = Literal["never", "sometimes", "always"]


@dataclass(frozen=True)
class Phase:
    """Ticks start to stop - 1, which run the same halves: one scan of the executor."""

    start: int
    stop: int
    forward: bool
    backward: bool
    embed: How
    """Whether its ticks embed a microbatch (input of virtual stage 0)."""
    loss: How
    """Whether its ticks take the loss of a microbatch."""
    embed_gradient: How
    """Whether its ticks bring a gradient of the embedding."""

    @property
    def kind(self) -> str:
        """F, B, or FB."""
        return "F" * self.forward + "B" * self.backward


@dataclass(frozen=True, eq=False)
class Schedule:
    """One table. Columns are int32 [ticks, S]; the module's docstring says how a row is run."""

    name: str
    stages: int
    microbatches: int
    chunks: int
    saved_slots: int
    """Slots of the buffer of saved inputs at each stage, each one microbatch [b, T, D]."""
    fwd_slots: int
    """Slots of the buffer of received activations at each stage (1 or more)."""
    bwd_slots: int
    """Slots of the buffer of received gradients at each stage (1 or more)."""
    fwd_microbatch: np.ndarray
    fwd_chunk: np.ndarray
    fwd_take: np.ndarray
    fwd_save: np.ndarray
    fwd_put: np.ndarray
    bwd_microbatch: np.ndarray
    bwd_chunk: np.ndarray
    bwd_load: np.ndarray
    bwd_take: np.ndarray
    bwd_put: np.ndarray

    @property
    def ticks(self) -> int:
        """Rows of the table."""
        return len(self.fwd_microbatch)

    @cached_property
    def fwd_live(self) -> np.ndarray:
        """bool [ticks, S]: the stage runs a forward unit."""
        return self.fwd_microbatch >= 0

    @cached_property
    def bwd_live(self) -> np.ndarray:
        """bool [ticks, S]: the stage runs a backward unit."""
        return self.bwd_microbatch >= 0

    @property
    def forward_halves(self) -> int:
        """Forward halves in a step; each takes 1/V of a stage's forward time."""
        return int(self.fwd_live.any(1).sum())

    @property
    def backward_halves(self) -> int:
        """Backward halves in a step; each takes 1/V of a stage's backward time."""
        return int(self.bwd_live.any(1).sum())

    @cached_property
    def embed_microbatch(self) -> np.ndarray:
        """[ticks] microbatch that is embedded in the forward half for virtual stage 0, or -1."""
        return np.where(self.fwd_chunk[:, 0] == 0, self.fwd_microbatch[:, 0], -1)

    @cached_property
    def loss_microbatch(self) -> np.ndarray:
        """[ticks] microbatch whose loss is taken in the backward half at the last virtual stage, or -1."""
        return np.where(self.bwd_chunk[:, -1] == self.chunks - 1, self.bwd_microbatch[:, -1], -1)

    @cached_property
    def embed_gradient_microbatch(self) -> np.ndarray:
        """[ticks] microbatch whose embedding gradient leaves stage 0 in the backward half, or -1."""
        return np.where(self.bwd_chunk[:, 0] == 0, self.bwd_microbatch[:, 0], -1)

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """Ticks grouped by the halves they run; ticks before the first and after the last loss stand apart.

        The three schedules have at most four, however many microbatches: the compiled program does not grow.
        """
        forward, backward = self.fwd_live.any(1), self.bwd_live.any(1)
        loss = np.flatnonzero(self.loss_microbatch >= 0)
        change = (np.diff(forward) != 0) | (np.diff(backward) != 0)
        edges = sorted({0, self.ticks, *(np.flatnonzero(change) + 1), *loss[:1], *(loss[-1:] + 1)})
        return tuple(self._phase(int(a), int(b)) for a, b in pairwise(edges))

    def _phase(self, start: int, stop: int) -> Phase:
        def how(microbatch: np.ndarray) -> How:
            present = microbatch[start:stop] >= 0
            return "always" if present.all() else "sometimes" if present.any() else "never"

        forward, backward = bool(self.fwd_live[start].any()), bool(self.bwd_live[start].any())
        ticks = (self.embed_microbatch, self.loss_microbatch, self.embed_gradient_microbatch)
        return Phase(start, stop, forward, backward, *map(how, ticks))

    def rows(self, phase: Phase) -> dict[str, np.ndarray]:
        """The phase's rows for the executor to scan over: every index is safe to use without a further test.

        [n, S] int32: the ten columns. Where a column says "none", indices that are read (microbatch, chunk, take,
        load) become 0, and slots that are written (save, put) become the size of their buffer, which a scatter with
        mode="drop" leaves out.
        [n, S] bool: fwd_live, fwd_embed (the input is the embedding), bwd_live, bwd_loss (dy is the loss's).
        [n] int32 and bool: embed_microbatch, embed_live; loss_microbatch, loss_live; embed_gradient_microbatch,
        embed_gradient_live.
        """
        part = slice(phase.start, phase.stop)
        none = {"fwd_save": self.saved_slots, "fwd_put": self.fwd_slots, "bwd_put": self.bwd_slots}
        rows = {}
        for name in COLUMNS:
            column = getattr(self, name)[part]
            rows[name] = np.where(column < 0, none.get(name, 0), column).astype(np.int32)
        for name in ("embed", "loss", "embed_gradient"):
            column = getattr(self, f"{name}_microbatch")[part]
            rows[f"{name}_microbatch"] = np.maximum(column, 0).astype(np.int32)
            rows[f"{name}_live"] = column >= 0
        stage = np.arange(self.stages)
        rows["fwd_live"], rows["bwd_live"] = self.fwd_live[part], self.bwd_live[part]
        rows["fwd_embed"] = rows["embed_live"][:, None] & (stage == 0)
        rows["bwd_loss"] = rows["loss_live"][:, None] & (stage == self.stages - 1)
        return rows


def _lowest_slots(write: np.ndarray, read: np.ndarray) -> tuple[np.ndarray, int]:
    """Gives each value [n] the lowest slot that is free from its write to its read; returns slots [n] and their number.

    Taking values in the order of their writes colours intervals with as few colours as there can be.
    A slot may be written again in the half in which it was read, since a half reads before it writes.
    """
    slots, free, busy, count = np.empty(len(write), np.int64), [], [], 0
    for i in np.argsort(write, kind="stable"):
        while busy and busy[0][0] <= write[i]:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            heapq.heappush(free, count)
            count += 1
        slots[i] = heapq.heappop(free)
        heapq.heappush(busy, (read[i], slots[i]))
    return slots, count


def _unit_ticks(S: int, M: int, V: int, start: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Ticks of the forward and of the backward units, [V*S, M] each.

    Microbatches go through in groups of n >= S: a group passes chunk 0, then chunk 1, and so on. Stage 0 is busy
    without a gap when it takes up chunk v + 1 of a microbatch n ticks after chunk v, and n = S is when the value comes
    back from stage S - 1. M is cut into floor(M/S) nearly equal groups, so a remainder of M / S costs no tick; it costs
    n - S slots for values that wait. The backward mirrors it: stages and chunks from the last to the first.
    `start` is the tick of the first backward; by default the earliest that leaves no gap later.
    """
    groups = max(1, M // S)
    size = np.full(groups, M // groups)
    size[: M % groups] += 1
    first = np.repeat(np.cumsum(size) - size, size)  # [M] first microbatch of each one's group
    stride = np.maximum(np.repeat(size, size), S)  # [M] ticks between two chunks of a microbatch
    base = V * first + np.arange(M) - first  # [M] tick at which stage 0 takes up chunk 0
    chunk, stage = np.divmod(np.arange(V * S)[:, None], S)
    forward = base + chunk * stride + stage
    if start is None:
        start = (V - 1) * int(stride.max()) + S - 1
    return forward, start + base + (V - 1 - chunk) * stride + S - 1 - stage


def _build(name: str, S: int, M: int, V: int, start: int | None = None) -> Schedule:
    """The table of `_unit_ticks`, with slots."""
    for what, value in (("stages", S), ("microbatches", M), ("chunks per stage", V)):
        if value < 1:
            raise InputError(f"{what}: {value}; a pipeline needs 1 or more")
    forward, backward = _unit_ticks(S, M, V, start)
    ticks = int(backward.max()) + 1
    columns = {column: np.full((ticks, S), -1, np.int32) for column in COLUMNS}
    slots = {"saved": 1, "fwd": 1, "bwd": 1}
    microbatch = np.broadcast_to(np.arange(M), (V, M))
    chunk = np.broadcast_to(np.arange(V)[:, None], (V, M))

    def place(buffer, s, write, read, writes, reads):
        """Slots for values that live from half-tick `write` to half-tick `read` at stage s."""
        slot, count = _lowest_slots(write.ravel(), read.ravel())
        columns[writes][write.ravel() // 2, s] = columns[reads][read.ravel() // 2, s] = slot
        slots[buffer] = max(slots[buffer], count)

    for s in range(S):
        own = np.arange(s, V * S, S)  # virtual stages of this stage
        columns["fwd_microbatch"][forward[own], s] = columns["bwd_microbatch"][backward[own], s] = microbatch
        columns["fwd_chunk"][forward[own], s] = columns["bwd_chunk"][backward[own], s] = chunk
        place("saved", s, 2 * forward[own], 2 * backward[own] + 1, "fwd_save", "bwd_load")
        later, earlier = own[own > 0], own[own < V * S - 1]
        place("fwd", s, 2 * forward[later - 1], 2 * forward[later], "fwd_put", "fwd_take")
        place("bwd", s, 2 * backward[earlier + 1] + 1, 2 * backward[earlier] + 1, "bwd_put", "bwd_take")
    return Schedule(name, S, M, V, slots["saved"], slots["fwd"], slots["bwd"], **columns)


def gpipe(S: int, M: int) -> Schedule:
    """All forwards, then all backwards; M saved inputs (Huang et al. 2019, arXiv 1811.06965)."""
    return _build("gpipe", S, M, 1, start=M + S - 1)


def one_f_one_b(S: int, M: int) -> Schedule:
    """Forward of microbatch t - s and backward of t - 2(S-1) + s in tick t; min(M, 2S-1) saved inputs.

    1F1B (Narayanan et al. 2021, arXiv 2104.04473) in lock-step: as fast as GPipe, memory flat in M.
    """
    return _build("1f1b", S, M, 1)


def interleaved(S: int, M: int, V: int) -> Schedule:
    """1F1B over V*S virtual stages: a bubble V times shorter; (V+1)S - 1 saved inputs when S divides M and M > S.

    Narayanan et al. 2021, arXiv 2104.04473; any M works.
    """
    return _build("interleaved", S, M, V)


def make(name: str, S: int, M: int, V: int = 1) -> Schedule:
    """The schedule called `name` ("gpipe", "1f1b", "interleaved"). Raises InputError."""
    if name not in NAMES:
        raise InputError(f"schedule {name!r} is not known{nearest(name, NAMES)}; there are {', '.join(NAMES)}")
    if name == "interleaved":
        return interleaved(S, M, V)
    if V != 1:
        raise InputError(
            f"schedule {name!r} with {V} chunks per stage: it keeps the layers of a stage in one piece; "
            "choose 1 chunk, or schedule 'interleaved'"
        )
    return gpipe(S, M) if name == "gpipe" else one_f_one_b(S, M)


def step_cost(schedule: Schedule, forward: float = 1.0, backward: float = 3.0) -> float:
    """Time of a step in forwards of one microbatch through one whole stage.

    backward = 3: input and weight gradients cost a forward each, and the chunk is recomputed.
    """
    return (schedule.forward_halves * forward + schedule.backward_halves * backward) / schedule.chunks


def bubble_fraction(schedule: Schedule, forward: float = 1.0, backward: float = 3.0) -> float:
    """Share of the stages' time that is idle, counted from the table."""
    busy = schedule.fwd_live.sum() * forward + schedule.bwd_live.sum() * backward
    return 1 - float(busy) / (schedule.stages * schedule.chunks * step_cost(schedule, forward, backward))


def bubble_formula(name: str, S: int, M: int, V: int = 1) -> float:
    """(S-1) / (V*M + S-1) for M >= S, with V = 1 for gpipe and 1f1b.

    Below M = S the first microbatch's way through V*S virtual stages counts: 1 - V*M / (V*S + M - 1).
    The two agree for V = 1.
    """
    V = V if name == "interleaved" else 1
    return 1 - V * M / (V * max(M, S) + min(M, S) - 1)


def layer_order(layers: int, S: int, V: int = 1) -> np.ndarray:
    """[S, V, layers / (S*V)] index of the layer at each place: chunk v of stage s holds those of virtual stage v*S + s.

    Raises InputError when the layers do not divide.
    """
    if layers % (S * V):
        down = layers - layers % (S * V)
        sizes = f"{down} or {down + S * V}" if down else f"{S * V}"
        fewer = max((stages for stages in range(1, S) if layers % (stages * V) == 0), default=0)
        raise InputError(
            f"{layers} layers on {S} stages x {V} chunks: each of the {S * V} pieces needs the same number of layers; "
            f"nearest: {sizes} layers" + (f", or {fewer} stages" if fewer else "")
        )
    return np.arange(layers).reshape(V, S, -1).swapaxes(0, 1)
