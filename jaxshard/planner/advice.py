"""Why a plan: what the model and the hardware ask for, and what the neighbouring layouts would cost, in words."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from jaxshard.analysis.arithmetic import flops_per_token
from jaxshard.analysis.memory import gib
from jaxshard.analysis.roofline import seconds_text
from jaxshard.parallel.axes import MeshShape
from jaxshard.planner.host_memory import host_limit
from jaxshard.planner.ranking import PREFERENCE, Scored, Search, same_program
from jaxshard.planner.search import REMATS, Candidate
from jaxshard.xla.pool import DEFAULT, MOST, VARIABLE, pool_bytes

PARTS = {
    "matmul": "matmuls",
    "attention": "attention",
    "elementwise": "memory-bound kernels",
    "model_comm": "collectives over tp",
    "data_comm": "collectives over dp that nothing hides",
    "sends": "sends between stages",
    "bubble": "the pipeline's bubble",
    "optimizer": "the optimizer's update",
    "offload": "transfers to host memory",
}
"""Field of `StepTime` -> its name in a sentence."""

SIMPLER = float(PREFERENCE @ (4, 3, 3, 1, 1, 1))
"""Share of the time that the simplest layout may take more than the most complicated one and still come first."""

Matches = Callable[[Candidate], bool]
Expected = Callable[[Scored], float]


def reasons(search: Search, plan: Scored, expected: Expected = lambda scored: scored.seconds) -> list[str]:
    """Sentences: the situation, the choice, where the time goes, and the neighbours.

    Args:
        search: that the plan is of.
        plan: a layout that fits.
        expected: seconds of a layout that fits, as compiled schedules have or suggest them; by default from shapes.
    """
    return [
        *situation(search, plan),
        *choice(search, plan.candidate),
        *time_of(search, plan),
        *neighbours(search, plan, expected),
    ]


def situation(search: Search, plan: Scored) -> Iterator[str]:
    """What the model needs and what the hardware has."""
    whole, limit, target = search.whole_state, search.limit, search.target
    device = f"a device's {gib(limit)}" if limit < float("inf") else "a device"
    parts = f"({gib(whole)}: parameters, masters, moments, one set of gradients)"
    plain = lambda c: c.zero == 0 and c.offload == "none" and c.shape.model * c.shape.stage == 1
    whole_step = search.best(plain) if whole <= limit else None
    if whole > limit:
        yield f"The whole state {parts} is more than {device}, so it has to be split or moved to host memory."
    elif whole_step is None or whole_step[0]:
        yield f"The whole state {parts} fits into {device}."
    else:
        yield (
            f"The whole state {parts} alone is less than {device}, but a step takes "
            f"{gib(whole_step[1].memory.total)} with activations and buffers, so it has to be split or moved to host "
            "memory all the same."
        )
    layer = search.layer_state
    if layer > limit:
        yield (
            f"One layer with its state takes {gib(layer)}, more than a device has: a pipeline cannot split a layer, "
            "only tensor parallelism and ZeRO can."
        )
    of = f" of {gib(limit)}" if limit < float("inf") else ""
    usable = target.chip.usable_bytes
    if search.memory_limit is None and usable:
        of += f" (of {gib(usable)}; the rest is left for the error of estimates)"
    yield f"At the peak a device holds {gib(plan.memory.total)}{of}: {_largest(plan)}."
    if target.chip.platform == "gpu" and usable:
        memory = target.chip.memory_bytes
        yield (
            f"A GPU has {gib(memory)}: jax takes {gib(pool_bytes(memory, DEFAULT))} by itself and {gib(usable)} with "
            f"{VARIABLE}={MOST:g}; the rest is left to CUDA's context and kernels and to NCCL's buffers."
        )
    if plan.memory.host:
        host = host_limit(target)
        beside = f" of {gib(host)}" if host < float("inf") else ""
        yield f"Beside it there are {gib(plan.memory.host)}{beside} in host memory for each device."
    if target.hosts > 1 and target.chip.platform == "gpu":
        net, link = target.chip.network.bandwidth / 1e9, target.chip.link.bandwidth / 1e9
        yield (
            f"{target.hosts} hosts: a device sends {net:.3g} GB/s between hosts and {link:.3g} GB/s inside one "
            f"({'a slow' if net < 0.05 * link else 'a fast'} network)."
        )


def _largest(plan: Scored) -> str:
    return ", ".join(f"{name} {gib(size)}" for name, size in plan.memory.largest(3) if size)


def choice(search: Search, c: Candidate) -> Iterator[str]:
    """What the layout does about it."""
    s = c.shape
    if c.offload != "none":
        without = search.best(lambda other: other.offload == "none")
        why = (
            ", as pinned" if without is None else "" if without[0] else "; without that no layout of these devices fits"
        )
        yield f"Masters and moments lie in host memory (ZeRO-Offload){why}."
    if s.devices == 1:
        yield (
            "One device: nothing is split." if c.offload == "none" else "One device computes; the host holds the rest."
        )
    if s.data * s.replica > 1:
        yield {
            0: f"{_ways(s)} hold copies of the parameters and all-reduce gradients (DDP).",
            1: f"{_ways(s)} share the optimizer's state (ZeRO-1): the traffic of DDP, less memory.",
            2: f"{_ways(s)} share optimizer state and gradients (ZeRO-2), which are reduced as they are produced.",
            3: f"{_ways(s)} share parameters too (ZeRO-3): each layer is gathered for use, forward and backward.",
        }[c.zero]
    if s.model > 1:
        inside = "within a host" if search.target.chip.platform == "gpu" else "within the slice"
        inside = inside if s.model <= search.target.devices_per_host or inside != "within a host" else "across hosts"
        yield f"tp={s.model} splits every layer {inside}, where two reductions a layer and direction are cheap."
    if s.stage > 1:
        chunks = f", {c.virtual_stages} chunks each" if c.virtual_stages else ""
        one = c.microbatches == 1
        work = "one microbatch visits one after the other" if one else f"{c.microbatches} microbatches keep them busy"
        yield f"pp={s.stage} cuts the layers into stages{chunks}; only activations travel between them, and {work}."
    if s.replica > 1:
        yield (
            f"replica={s.replica} keeps the shards' collectives off the slowest network; gradients are all-reduced "
            "over it."
        )
    if c.remat != "none":
        what = {
            "full": "Blocks are recomputed in the backward pass",
            "dots": "Matmul outputs are kept, the rest is recomputed",
            "offload": "Matmul outputs wait in host memory",
        }.get(c.remat, "Activations are kept")
        yield f"{what} (remat {c.remat}){_why_recomputed(search, c)}."


def _why_recomputed(search: Search, c: Candidate) -> str:
    """Why not the same layout with less of it."""
    less = REMATS[: REMATS.index(c.remat)] if c.remat in REMATS else REMATS
    found = [search.best(lambda other, remat=remat: other == replace(c, remat=remat)) for remat in less]
    if not any(found):
        return ", as pinned"
    return ": with less of that this layout would not fit" if not any(each[0] for each in found if each) else ""


def _ways(s: MeshShape) -> str:
    return f"{s.data * s.replica} groups" if s.stage * s.model > 1 else f"{s.data * s.replica} devices"


def time_of(search: Search, plan: Scored) -> Iterator[str]:
    """Where the predicted time goes."""
    if not search.timed:
        yield "No time is predicted: this machine's speed is not known. The order is by the work each layout does."
        return
    parts = sorted(((plan.parts[name], name) for name in PARTS if plan.parts[name] > 0), reverse=True)
    share = lambda seconds: f"{100 * seconds / plan.seconds:.0f} %"
    yield "Of the step, " + ", ".join(f"{share(seconds)} {PARTS[name]}" for seconds, name in parts[:4]) + "."
    used = search.mfu(plan)
    if used is not None:
        seq_len = search.config.data.seq_len
        full = used * flops_per_token(search.arch, seq_len, causal=False) / flops_per_token(search.arch, seq_len)
        yield f"From shapes: MFU {100 * used:.0f} % counting causal attention, {100 * full:.0f} % counting all of it."


def neighbours(search: Search, plan: Scored, expected: Expected = lambda scored: scored.seconds) -> Iterator[str]:
    """Each neighbour that is legal: it does not fit, or is slower, and why; `expected` as in `reasons`."""
    c = plan.candidate
    for name, matches in _neighbours(c):
        found = search.best(matches)
        if found is None:
            continue
        fits, other = found
        if same_program(search.config, c, other.candidate):
            yield f"{name}: the same program."
            continue
        if not fits:
            yield f"{name}: does not fit (at least {gib(other.memory.total)} on a device)."
        elif other.memory.host > host_limit(search.target):
            yield f"{name}: needs {gib(other.memory.host)} of host memory for a device, more than there is."
        elif not search.timed:
            continue
        elif abs(other.seconds / plan.seconds - 1) < 0.0005:
            yield f"{name}: no faster."
        elif other.seconds >= plan.seconds:
            yield f"{name}: {100 * (other.seconds / plan.seconds - 1):.1f} % slower ({_difference(plan, other)})."
        else:
            faster = 1 - other.seconds / plan.seconds
            simpler = PREFERENCE @ other.candidate.complexity <= PREFERENCE @ c.complexity
            why = ", less than its error, and less simple" if faster < SIMPLER and not simpler else ""
            slower = expected(other) / expected(plan) - 1
            if slower > 0:
                why = f", but {100 * slower:.1f} % slower as the compiled schedules have it"
            yield f"{name}: {100 * faster:.1f} % faster by the prediction from shapes{why}."


def _neighbours(c: Candidate) -> Iterator[tuple[str, Matches]]:
    s = c.shape
    same = lambda other: other.shape == s
    for zero in (c.zero - 1, c.zero + 1):
        if 0 <= zero <= 3:
            yield f"ZeRO-{zero} on this mesh", lambda o, zero=zero: o == replace(c, zero=zero)
    if c.remat in REMATS and c.remat != "none":
        weaker = REMATS[REMATS.index(c.remat) - 1]
        yield f"remat {weaker}", lambda o: same(o) and o.zero == c.zero and o.remat == weaker
    for tp in (s.model // 2, s.model * 2):
        if tp >= 1:
            yield f"tp={tp}", lambda o, tp=tp: o.shape.model == tp and o.shape.stage == s.stage
    for pp in (s.stage // 2, s.stage * 2):
        if pp >= 1:
            label = f"pp={pp}" if pp > 1 else "no pipeline"
            yield label, lambda o, pp=pp: o.shape.stage == pp and o.shape.model == s.model
    if s.model * s.stage > 1:
        yield "data parallelism alone", lambda o: o.shape.model == o.shape.stage == 1


def _difference(plan: Scored, other: Scored) -> str:
    """The part of the step that grows most."""
    grows = max(PARTS, key=lambda name: other.parts[name] - plan.parts[name])
    before, after = plan.parts[grows], other.parts[grows]
    if after >= 0.1:
        return f"{PARTS[grows]} {1e3 * before:,.0f} -> {1e3 * after:,.0f} ms"
    return f"{PARTS[grows]} {seconds_text(before)} -> {seconds_text(after)}"
