"""The commands: one row each. Adding a command adds a row (and, if it has options of its own, a dataclass).

A row names the function as "module:function". It is imported when the command runs, so that --help and bad input
cost no import of jax, and called as

    function(config, console=console, option=value, ...)

with one keyword for each field of the row's options. It returns None, the exit code, or a dict: the result that --json
prints (its key "exit_code", if there is one, is taken out and becomes the exit code).
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxshard.errors import InputError

SavedRun = Literal["no", "if there", "if named and there", "if named", "needed"]
"""Whether a command starts from <output>/config.yaml of an earlier run. "if named": needed when --output is given; "if
named and there": read when --output is given and names a run."""


@dataclass(frozen=True)
class NoOptions:
    """No options of its own."""


@dataclass(frozen=True)
class TrainOptions:
    """Options of train"""

    resume: Literal["required", "auto"] | int | None = field(default=None, metadata={"bare": "required"})
    """Go on from the newest checkpoint in the output folder, which must hold a run; with the value auto: if it holds
    one; with a number: go back to the checkpoint of that step (0: begin again). Newer checkpoints are then set aside
    and later lines of the log moved to metrics.dropped.jsonl. Without --config, the run's own config.yaml is read
    first."""
    allow_changed_data: bool = False
    """With --resume: go on although the text, its tokenizer, data.seq_len, data.pack, data.eval_fraction or train.seed
    is not what the checkpoint was trained on. Rows may be skipped or repeated. (Another train.global_batch needs no
    permission: it takes the rows from where the run is.)"""

    def __post_init__(self):
        if self.allow_changed_data and self.resume is None:
            raise InputError("--allow_changed_data is for a run that goes on: give --resume too, or drop it")

    @property
    def saved_run(self) -> SavedRun:
        return "no" if self.resume is None else "if there" if self.resume == "auto" else "needed"


@dataclass(frozen=True)
class EvalOptions:
    """Options of eval"""

    checkpoint: int | None = None
    """Step of the checkpoint; by default the newest."""


@dataclass(frozen=True)
class GenerateOptions:
    """Options of generate"""

    prompt: str = ""
    """Text that the model goes on from; by default it begins a document."""
    max_new_tokens: int = 200
    """Tokens to generate; a sample ends earlier at the end of its document."""
    temperature: float = 1.0
    """Divides the logits: below 1 more certain, above 1 more varied."""
    top_k: int = 0
    """Draw from the k likeliest tokens only; 0 from all."""
    top_p: float = 1.0
    """Draw from the smallest set of likeliest tokens whose probabilities sum to at least this."""
    greedy: bool = False
    """Always take the likeliest token; temperature, top_k and top_p do not matter then."""
    samples: int = 1
    """Number of samples."""
    checkpoint: int | None = None
    """Step of the checkpoint; by default the newest."""

    def __post_init__(self):
        for name, ok, must in (
            ("max_new_tokens", self.max_new_tokens > 0, "a positive whole number"),
            ("temperature", 0 < self.temperature < float("inf"), "positive (--greedy takes the likeliest token)"),
            ("top_k", self.top_k >= 0, "0 (all tokens) or positive"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("samples", self.samples > 0, "a positive whole number"),
        ):
            if not ok:
                raise InputError(f"{name} is {getattr(self, name)!r}: it must be {must}")


@dataclass(frozen=True)
class InspectOptions:
    """Options of inspect"""

    presets: bool = False
    """List the named model sizes instead of looking at a run."""
    checkpoint: int | None = None
    """Step of the checkpoint; by default the newest."""

    @property
    def saved_run(self) -> SavedRun:
        return "no" if self.presets else "needed"


@dataclass(frozen=True)
class CheckOptions:
    """Options of check"""

    tolerance: float = 1e-10
    """Largest relative error of loss and gradients; in fp64 rounding is some 1e-15."""

    def __post_init__(self):
        if not 0 < self.tolerance < 1:
            raise InputError(f"tolerance is {self.tolerance!r}: it must be between 0 and 1, such as 1e-10")


@dataclass(frozen=True)
class PlanOptions:
    """Options of plan"""

    target: str = "local"
    """Hardware to plan for: h100:64, a100:8, h200:8, b200:72, v4:4x4x4, v5e:4x4, v5p:4x4x8, v6e:16x16, cpu:8, or local:
    the devices that are present."""
    best: bool = False
    """Print nothing but the command of the best plan."""
    network: str | None = None
    """Network between hosts where it is not the target's usual one: gbps=25 is 25 Gbit/s that each device can send."""
    memory_limit: float | None = None
    """GiB that a plan may use on a device, by the estimate and by the compiler; by default what a program can have
    there (on a GPU nine tenths), less a margin for the estimate's error."""
    fewest: bool = False
    """Look for the smallest number of devices, up to the target's, on which a plan fits."""
    confirm: int = 3
    """Plans that the target's compiler is asked about, where it is installed; 0 keeps to estimates."""
    report: str | None = None
    """HTML file to write: memory of each plan, memory against time, and the step's timeline."""
    calibration: str | None = None
    """File that `collectives --calibration` wrote on such devices: its network goes before the datasheet's."""

    def __post_init__(self):
        for name, ok, must in (
            ("memory_limit", self.memory_limit is None or 0 < self.memory_limit < float("inf"), "positive (GiB)"),
            ("confirm", self.confirm >= 0, "0 or a positive whole number"),
        ):
            if not ok:
                raise InputError(f"{name} is {getattr(self, name)!r}: it must be {must}")


@dataclass(frozen=True)
class CollectivesOptions:
    """Options of collectives"""

    largest: str | None = None
    """Largest size, such as 64MiB; by default what the devices' memory allows, and 4MiB on a CPU."""
    calibration: str | None = None
    """File to write: the network's start, hop and bandwidths fitted to the measurements, for `plan --calibration`."""


@dataclass(frozen=True)
class ExplainOptions:
    """Options of explain"""

    target: str = "local"
    """Hardware to compile for: h100:64, a100:8, h200:8, b200:72, v4:4x4x4, v5e:4x4, v5p:4x4x8, v6e:16x16, cpu:8, or
    local: the devices that are present or faked."""
    report: str | None = None
    """HTML file to write: mesh, slices of every weight, ledger, memory; by default report.html in the folder that
    --output names, if it is there."""
    lock: str | None = None
    """JSON file of peak bytes, FLOPs and bytes per axis: written if it is not there; else what exceeds it by more than
    the tolerance is printed and the exit code is 1."""
    tolerance: float | None = None
    """Share by which a locked figure may be exceeded, by default 0.02."""
    threshold: int | None = None
    """Unexpected bytes a step from which the exit code is 1; by default 0.5 % of all bytes, and at least 1 KiB."""
    compare: tuple[str, str] | None = None
    """Two files that --json printed: shows what differs, and compiles nothing."""
    schedule: bool = False
    """Draw the pipeline, ticks across and stages down, with its bubble; compiles nothing."""
    png: str | None = None
    """Folder for pictures as PNG: those of the report; with --schedule the pipeline's."""

    def __post_init__(self):
        others = [name for name in ("compare", "schedule", "report", "lock", "png") if getattr(self, name)]
        for first, second in itertools.combinations(others, 2):
            if first == "compare" or (first == "schedule" and second != "png"):
                raise InputError(f"--{first} compiles nothing, and so --{second} beside it has no meaning: drop one")
        if others and others[0] in ("compare", "schedule") and self.threshold is not None:
            raise InputError(f"--{others[0]} compiles nothing, and so --threshold beside it has no meaning: drop one")
        if self.tolerance is not None and not self.lock:
            raise InputError(f"--tolerance {self.tolerance:g} is of --lock alone: name its file too, or drop it")
        for name, ok, must in (
            ("tolerance", self.tolerance is None or 0 <= self.tolerance < float("inf"), "0 or a positive number"),
            ("threshold", self.threshold is None or self.threshold >= 0, "0 or a positive whole number"),
        ):
            if not ok:
                raise InputError(f"{name} is {getattr(self, name)!r}: it must be {must}")


@dataclass(frozen=True)
class Command:
    """One row: the name, one line of help, the function to import, its options, and whether it needs a run."""

    name: str
    help: str
    function: str
    options: Any = NoOptions()
    saved_run: Callable[[Any], SavedRun] = lambda options: "no"
    wants_given: bool = False
    """The function also takes `given`: the options of the configuration that stood on the command line."""
    reads: tuple[str, ...] | None = None
    """How the names of those options of the configuration start that its help lists; None: all."""


_DEVICES = ("mesh", "zero", "output", "devices", "fake_devices")
_STEP = ("mesh", "zero", "parallel.", "model.", "data.", "optim.", "train.")

COMMANDS = (
    Command(
        "train",
        "Train a model (the default command).",
        "jaxshard.commands.train:run",
        TrainOptions(),
        lambda options: options.saved_run,
        wants_given=True,
    ),
    Command(
        "eval",
        "Evaluate a run's checkpoint on the held-out documents.",
        "jaxshard.commands.eval:run",
        EvalOptions(),
        lambda options: "needed",
        wants_given=True,
        reads=(*_DEVICES, "data.", "train.global_batch", "eval.batches"),
    ),
    Command(
        "generate",
        "Write text with a run's checkpoint.",
        "jaxshard.commands.generate:run",
        GenerateOptions(),
        lambda options: "needed",
        wants_given=True,
        reads=(*_DEVICES, "train.seed"),
    ),
    Command(
        "inspect",
        "Show what a run's checkpoint holds, without devices.",
        "jaxshard.commands.inspect:run",
        InspectOptions(),
        lambda options: options.saved_run,
        reads=("output",),
    ),
    Command(
        "plan",
        "Find the best layout for a model on a target, with its memory, time and reasons; needs no devices.",
        "jaxshard.commands.plan:run",
        PlanOptions(),
        wants_given=True,
        reads=_STEP,
    ),
    Command(
        "explain",
        "Compile the train step, for absent hardware too, and say why every collective is there.",
        "jaxshard.commands.explain:run",
        ExplainOptions(),
        lambda options: "if named and there",
        wants_given=True,
        reads=(*_DEVICES, *_STEP),
    ),
    Command(
        "collectives",
        "Measure every collective over every mesh axis on the devices present, and check each result.",
        "jaxshard.commands.collectives:run",
        CollectivesOptions(),
        reads=("mesh", "devices", "fake_devices"),
    ),
    Command(
        "check",
        "Compute one step on the mesh and on one device, and say whether they agree.",
        "jaxshard.commands.check:run",
        CheckOptions(),
        lambda options: "if named",
        reads=(*_DEVICES, *_STEP),
    ),
)
