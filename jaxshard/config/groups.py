"""What a run is: frozen dataclasses, validated once, read everywhere, and free of jax.

The doc string under a field is its help text on the command line. Every field is read by something;
`tests/test_config.py` holds that.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal

from jaxshard.errors import InputError


def _require(ok: bool, name: str, value: object, must: str) -> None:
    if not ok:
        raise InputError(f"{name} is {value!r}: it must be {must}")


def _positive(value: float | None) -> bool:
    """True for a positive finite number; None stands for a default that is filled in later."""
    return value is None or 0 < value < math.inf


def _not_negative(value: float | None) -> bool:
    return value is None or 0 <= value < math.inf


def _within_bounds(path: str, values: Any) -> None:
    """Refuses numbers that arrays on devices cannot hold: whole numbers have 32 bits there, and so have fractions."""
    for each in fields(values):
        name = each.name if each.metadata.get("top") else f"{path}{each.name}"
        value = getattr(values, each.name)
        if is_dataclass(value):
            _within_bounds(f"{name}.", value)
        elif isinstance(value, int) and not isinstance(value, bool):
            _require(abs(value) < 2**31, name, value, "below 2^31")
        elif isinstance(value, float) and value != 0:
            _require(1e-37 < abs(value) < 1e37, name, value, "between 1e-37 and 1e37")
        elif isinstance(value, str):
            _require("\0" not in value, name, value, "free of NUL characters")


@dataclass(frozen=True)
class ModelConfig:
    """The model: a preset, single fields, or a preset with some fields replaced."""

    preset: str | None = None
    """Named size; `jaxshard inspect --presets` lists them. Fields given beside it replace its own."""
    family: Literal["gpt2", "llama"] | None = None
    """gpt2: LayerNorm, learned positions, GELU, biases. llama: RMSNorm, rotary positions, SwiGLU."""
    vocab_size: int | None = None
    """Number of token ids; by default the preset's, or the tokenizer's."""
    d_model: int | None = None
    """Width of the residual stream."""
    n_layers: int | None = None
    """Number of transformer blocks."""
    n_heads: int | None = None
    """Number of query heads."""
    n_kv_heads: int | None = None
    """Number of key and value heads (fewer than n_heads: grouped-query attention)."""
    head_dim: int | None = None
    """Width of one head; by default d_model / n_heads."""
    d_ff: int | None = None
    """Width of the hidden layer of the MLP."""
    max_seq_len: int | None = None
    """Longest sequence; gpt2 has one learned position vector for each."""
    tie_embeddings: bool | None = None
    """Use the token embedding as the output head too."""
    norm_eps: float | None = None
    """Epsilon of LayerNorm or RMSNorm."""
    rope_theta: float | None = None
    """Base of the rotary frequencies (llama)."""
    rope_scaling: Literal["none", "linear", "llama3"] | None = None
    """How rotary frequencies are stretched for long contexts (llama)."""
    rope_factor: float | None = None
    """Stretch factor of rope_scaling."""
    rope_low_freq_factor: float | None = None
    """rope_scaling llama3: wavelengths above original length / this are stretched in full."""
    rope_high_freq_factor: float | None = None
    """rope_scaling llama3: wavelengths below original length / this stay as they are."""
    rope_original_max: int | None = None
    """rope_scaling llama3: context length that the model was trained with first."""
    dropout: float = 0.0
    """Probability of dropping an element after the embedding, attention and MLP."""
    attention: Literal["auto", "xla", "cudnn"] = "auto"
    """Attention kernel; auto takes cudnn on GPUs with 16-bit precision, and xla elsewhere."""

    def __post_init__(self):
        for name in ("vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_ff", "max_seq_len"):
            value = getattr(self, name)
            _require(_positive(value), f"model.{name}", value, "a positive whole number")
        for name in ("norm_eps", "rope_theta", "rope_factor", "rope_low_freq_factor", "rope_high_freq_factor"):
            value = getattr(self, name)
            _require(_positive(value), f"model.{name}", value, "positive")
        _require(0 <= self.dropout < 1, "model.dropout", self.dropout, "in [0, 1)")


@dataclass(frozen=True)
class DataConfig:
    """The text and how it becomes token sequences."""

    path: str = "stdlib"
    """A .txt, .jsonl, .parquet or tokenised .bin file, a folder of text files, or stdlib: the Python sources of the
    running interpreter's standard library (./stdlib is a folder of that name)."""
    tokenizer: str = "bytes"
    """bytes, the path of a Hugging Face tokenizer.json, or, for a .bin file without one, ids or ids:EOD with the id
    that ends its documents."""
    text_field: str = "text"
    """Field that holds the text in .jsonl and .parquet files."""
    bin_dtype: Literal["uint16", "uint32"] | None = None
    """Integer type of a tokenised .bin file; by default what its header says (files of llm.c), or uint16."""
    seq_len: int = 128
    """Tokens in one sequence."""
    pack: bool = True
    """Put several documents into one sequence (they do not see each other); otherwise one document a row, padded.
    Padding is computed, but counts in neither tokens nor tokens/s nor mfu."""
    eval_fraction: float = 0.05
    """Share of the documents held out for evaluation."""

    def __post_init__(self):
        _require(_positive(self.seq_len), "data.seq_len", self.seq_len, "a positive whole number")
        _require(0 <= self.eval_fraction < 1, "data.eval_fraction", self.eval_fraction, "in [0, 1)")


_NOT_IN_OPTIMIZER = {"lion": ("eps",), "sgd": ("beta2", "eps"), "adafactor": ("beta1", "eps")}
_OF_LOSS_SCALE = ("loss_scale", "loss_scale_interval")


ONE_RUN = ("train.stop_after", "log.profile_steps")
"""Options that end with the run that they are given to: a run that goes on from it does not have them."""


def unread(values: Mapping[str, Any]) -> list[str]:
    """Names of options that nothing reads beside the others, and that are refused away from their default.

    Args:
        values: by dotted name, of all options.
    """
    names = [f"optim.{name}" for name in _NOT_IN_OPTIMIZER.get(values["optim.name"], ())]
    names += [f"train.{name}" for name in _OF_LOSS_SCALE if values["train.precision"] != "fp16"]
    return names + ["parallel.offload_mode"] * (values["parallel.offload"] == "none")


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer and its learning-rate schedule."""

    name: Literal["adamw", "adafactor", "lion", "muon", "sgd"] = "adamw"
    """Optimizer."""
    lr: float = 1e-3
    """Peak learning rate, reached at update warmup_steps."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """What follows the warm-up; wsd is constant and then linear over the last decay_fraction of the steps."""
    warmup_steps: int = 10
    """Updates over which the learning rate rises linearly; the first update uses lr / warmup_steps."""
    final_lr_fraction: float = 0.1
    """Learning rate at the end as a fraction of lr (cosine, linear, wsd)."""
    decay_fraction: float = 0.2
    """wsd: share of all steps over which the learning rate falls."""
    weight_decay: float = 0.1
    """Decoupled weight decay, applied to matrices and embeddings, never to norms and biases."""
    beta1: float = 0.9
    """Decay of the first moment (momentum for sgd and muon)."""
    beta2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    clip: float = 1.0
    """Largest global gradient norm; 0 turns clipping off."""

    def __post_init__(self):
        _require(_positive(self.lr), "optim.lr", self.lr, "positive")
        _require(_not_negative(self.warmup_steps), "optim.warmup_steps", self.warmup_steps, "0 or more")
        _require(0 <= self.final_lr_fraction <= 1, "optim.final_lr_fraction", self.final_lr_fraction, "in [0, 1]")
        _require(0 <= self.decay_fraction <= 1, "optim.decay_fraction", self.decay_fraction, "in [0, 1]")
        _require(_not_negative(self.weight_decay), "optim.weight_decay", self.weight_decay, "0 or more")
        _require(0 <= self.beta1 < 1, "optim.beta1", self.beta1, "in [0, 1)")
        _require(0 <= self.beta2 < 1, "optim.beta2", self.beta2, "in [0, 1)")
        _require(_positive(self.eps), "optim.eps", self.eps, "positive")
        _require(_not_negative(self.clip), "optim.clip", self.clip, "0 (off) or positive")
        for name in _NOT_IN_OPTIMIZER.get(self.name, ()):
            value = getattr(self, name)
            if value != getattr(OptimConfig, name):
                raise InputError(f"optim.{name} = {value} changes nothing: {self.name} does not have it; leave it out")


@dataclass(frozen=True)
class TrainConfig:
    """The training step and the run's length."""

    steps: int = 300
    """Optimizer updates in the whole run."""
    stop_after: int | None = None
    """End this run after so many updates in all; schedules are still laid out for `steps`. A run that goes on with
    --resume does not take it over."""
    global_batch: int = 32
    """Sequences per update, over all devices and accumulation steps."""
    seed: int = 0
    """Seed of parameters, dropout and data order."""
    precision: Literal["fp32", "bf16", "fp16", "pure-bf16", "fp64"] = "fp32"
    """Type of parameters and arithmetic. bf16 and fp16 keep fp32 masters and moments; pure-bf16 keeps
    neither. fp64 is for comparisons."""
    z_loss: float = 0.0
    """Weight of the squared log-normaliser, which keeps logits from drifting."""
    loss_scale: float = 65536.0
    """fp16: first loss scale; halved when gradients overflow, doubled after loss_scale_interval good updates."""
    loss_scale_interval: int = 1000
    """fp16: good updates in a row before the loss scale doubles."""
    max_skips: int = 20
    """Skipped updates in a row (overflow, NaN) after which the run stops."""

    def __post_init__(self):
        _require(_not_negative(self.steps), "train.steps", self.steps, "0 or more")
        _require(_not_negative(self.stop_after), "train.stop_after", self.stop_after, "0 or more")
        _require(_positive(self.global_batch), "train.global_batch", self.global_batch, "a positive whole number")
        _require(_not_negative(self.z_loss), "train.z_loss", self.z_loss, "0 or more")
        _require(1 <= self.loss_scale < math.inf, "train.loss_scale", self.loss_scale, "1 or more")
        _require(_positive(self.loss_scale_interval), "train.loss_scale_interval", self.loss_scale_interval, "positive")
        for name in _OF_LOSS_SCALE if self.precision != "fp16" else ():
            value = getattr(self, name)
            if value != getattr(TrainConfig, name):
                raise InputError(
                    f"train.{name} = {value:g} changes nothing: only fp16 scales the loss, and train.precision is "
                    f"{self.precision}; leave it out"
                )
        _require(_positive(self.max_skips), "train.max_skips", self.max_skips, "positive")


TOP = {"top": True}
"""Of a field that is named without its group, on the command line and in files: --mesh, not --parallel.mesh."""


@dataclass(frozen=True)
class ParallelConfig:
    """Where the step is computed: devices, parts, what is recomputed or moved. No number depends on it"""

    mesh: str | None = field(default=None, metadata=TOP)
    """Devices per axis, such as dp=4,tp=2 (axes: replica, pp or stage, dp or data, tp or model); one may be -1.
    By default all devices are on dp. auto, for train: the best plan for the devices that are present, where also what
    is left at its default of ZeRO, recomputation, accumulation, pipeline and offload is chosen."""
    zero: Literal[0, 1, 2, 3] | None = field(default=None, metadata=TOP)
    """ZeRO stage over the data axis: 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters. By default 1
    where layers are split into a pipeline over several data groups, else 0."""
    accumulation: int = 1
    """Parts that the global batch is cut into; gradients are summed over them in fp32 before the update."""
    remat: str = "none"
    """What the backward pass recomputes: none, dots (keep matmul outputs), full, offload (keep them in host memory),
    or names:a,b,... (keep these named activations)."""
    offload: Literal["none", "optimizer"] = "none"
    """optimizer: fp32 masters and moments live in host memory, the devices keep the working copy of the parameters."""
    offload_mode: Literal["stream", "host"] | None = None
    """How the update reaches offloaded state; stream (default): a layer at a time through the device; host: computed
    on the host from gradients that are sent there."""
    sequence_parallel: bool = False
    """Split norms and the residual stream over the model axis along the sequence."""
    loss_chunk: int = 512
    """Positions of a sequence whose logits exist at the same time."""
    microbatches: int | None = None
    """Pipeline: parts that travel through the stages, of each accumulation part; by default the smallest number that
    divides its sequences and is at least twice the stages."""
    schedule: Literal["gpipe", "1f1b", "interleaved"] | None = None
    """Pipeline: order of forwards and backwards; by default 1f1b, or interleaved with virtual_stages above 1."""
    virtual_stages: int | None = None
    """Pipeline, interleaved: chunks of layers that each stage holds; by default 2."""
    pipeline_gather: Literal["tick", "step"] | None = None
    """Pipeline with --zero 3: gather parameters in every tick, a layer at a time (default), or once a step, which
    holds the parameters of a whole stage."""
    allow_replicated: tuple[str, ...] = ()
    """Parameter paths that may stay replicated although --zero asks to shard them."""

    def __post_init__(self):
        _require(self.mesh is None or self.mesh.strip() != "", "mesh", self.mesh, "left out, or not empty")
        _require(self.zero in (None, 0, 1, 2, 3) and not isinstance(self.zero, bool), "zero", self.zero, "0, 1, 2 or 3")
        _require(_positive(self.accumulation), "parallel.accumulation", self.accumulation, "a positive whole number")
        for name in ("microbatches", "virtual_stages"):
            value = getattr(self, name)
            _require(_positive(value), f"parallel.{name}", value, "a positive whole number")
        _require(_positive(self.loss_chunk), "parallel.loss_chunk", self.loss_chunk, "a positive whole number")
        _require(self.offload in ("none", "optimizer"), "parallel.offload", self.offload, "none or optimizer")
        modes = (None, "stream", "host") if self.offload != "none" else (None,)
        must = "stream or host" if self.offload != "none" else "left out, or given with --parallel.offload optimizer"
        _require(self.offload_mode in modes, "parallel.offload_mode", self.offload_mode, must)


@dataclass(frozen=True)
class CheckpointConfig:
    """When the state is saved."""

    every: int = 100
    """Updates between checkpoints; 0 saves at the end only."""
    keep: int = 3
    """Newest checkpoints that are kept."""

    def __post_init__(self):
        _require(_not_negative(self.every), "checkpoint.every", self.every, "0 (at the end only) or positive")
        _require(_positive(self.keep), "checkpoint.keep", self.keep, "a positive whole number")


@dataclass(frozen=True)
class LogConfig:
    """What is reported while training."""

    every: int = 10
    """Updates between logged lines."""
    tensorboard: bool = True
    """Write TensorBoard event files."""
    wandb: str | None = None
    """Project name: also log to Weights & Biases (needs the package wandb)."""
    profile_steps: tuple[int, int] | None = None
    """First and last update of a profiler trace, written to <output>/profile; --resume does not take it over."""

    def __post_init__(self):
        _require(_positive(self.every), "log.every", self.every, "a positive whole number")
        _require(
            self.wandb is None or self.wandb.strip() != "", "log.wandb", self.wandb, "left out, or a project's name"
        )
        if self.profile_steps is not None:
            first, last = self.profile_steps
            _require(
                1 <= first <= last, "log.profile_steps", self.profile_steps, "[first, last] with 1 <= first <= last"
            )


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation on the held-out documents."""

    every: int = 100
    """Updates between evaluations; 0 evaluates at the end only."""
    batches: int = 16
    """Batches of held-out rows, spread evenly over them; 0 takes the whole held-out set."""

    def __post_init__(self):
        _require(_not_negative(self.every), "eval.every", self.every, "0 (at the end only) or positive")
        _require(_not_negative(self.batches), "eval.batches", self.batches, "0 (all) or positive")


@dataclass(frozen=True)
class Config:
    """Everything a run depends on."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    output: str | None = None
    """Folder of the run; by default runs/<config name>."""
    devices: Literal["auto", "cpu", "gpu", "tpu"] = "auto"
    """Kind of device to run on."""
    fake_devices: int | None = None
    """Number of faked CPU devices; by default the mesh's product when there is no accelerator."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)

    def __post_init__(self):
        _within_bounds("", self)
        _require(self.output is None or self.output.strip() != "", "output", self.output, "left out, or not empty")
        _require(self.train.seed >= 0, "train.seed", self.train.seed, "0 or more")
        profiled = self.log.profile_steps
        last = profiled is None or profiled[1] <= self.train.steps
        _require(last, "log.profile_steps", profiled, f"within train.steps = {self.train.steps}")
        _require(_positive(self.fake_devices), "fake_devices", self.fake_devices, "positive")

    def with_parallel(self, **changes: Any) -> "Config":
        """The same computation, laid out in another way: with these fields of `parallel`."""
        return replace(self, parallel=replace(self.parallel, **changes))

    @property
    def mesh(self) -> str | None:
        """Of `parallel`."""
        return self.parallel.mesh

    @property
    def zero(self) -> Literal[0, 1, 2, 3] | None:
        """Of `parallel`."""
        return self.parallel.zero


def grouped(**values: Any) -> dict[str, Any]:
    """The groups `train` and `parallel` from the names of their fields alone.

    `Config(**grouped(mesh="dp=4", zero=3, global_batch=8))` is short for a `ParallelConfig` and a `TrainConfig`.
    """
    where = {each.name for each in fields(ParallelConfig)}
    parallel = {name: value for name, value in values.items() if name in where}
    train = {name: value for name, value in values.items() if name not in where}
    return {"train": TrainConfig(**train), "parallel": ParallelConfig(**parallel)}
