"""The command `inspect`: what a run's checkpoint holds, or the named model sizes, read without any device."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxshard.config import Config, ModelConfig
from jaxshard.config.file import saved_values
from jaxshard.console import Console
from jaxshard.models.presets import PRESETS, Architecture, architecture

if TYPE_CHECKING:
    from jaxshard.training.checkpoint import Description, SavedArray

SHOWN = 12
"""Arrays in the table; --json lists all."""
_SHOWN_APART = ("mesh", "zero", "precision", "model", "data", "config")
"""Of what was recorded with a checkpoint."""
_CLASSES = {
    "params": "parameters",
    "masters": "fp32 masters",
    "moments": "optimizer moments",
}
"""First part of an array's path -> class of state. The rest are counters."""


def run(config: Config, *, console: Console, presets: bool, checkpoint: int | None) -> dict[str, Any]:
    """Shows the presets, or a checkpoint of the run in `config.output`.

    Returns:
        {"presets": [...]}, or step, steps (of all complete checkpoints), parameters, bytes, config, meta (what was
        recorded with it), classes and arrays.

    Raises:
        InputError: there is no such checkpoint, or it is damaged.
    """
    if presets:
        return show_presets(console)
    # Reading checkpoints takes a while to import, which the table of presets need not wait for.
    from jaxshard.training.checkpoint import complete_steps, describe
    from jaxshard.training.saved import doubts

    folder = Path(config.output or ".") / "checkpoints"
    found, arch = describe(folder, checkpoint), architecture(config.model)
    for said in doubts(folder, found.step) if checkpoint is None else ():
        console.warn(said)
    result = summary(config, arch, found) | {"steps": complete_steps(folder)}
    show(console, config, arch, result)
    return result


def show_presets(console: Console) -> dict[str, Any]:
    """Prints and returns the named sizes."""
    rows = []
    for name in PRESETS:
        arch = architecture(ModelConfig(preset=name))
        rows.append({"name": name, "parameters": arch.parameters} | dataclasses.asdict(arch))
    columns = {
        "preset": "name",
        "parameters": "parameters",
        "family": "family",
        "layers": "n_layers",
        "width": "d_model",
        "heads": "n_heads",
        "kv heads": "n_kv_heads",
        "MLP": "d_ff",
        "vocabulary": "vocab_size",
        "positions": "max_seq_len",
        "tied": "tie_embeddings",
    }
    table = [[row[key] for key in columns.values()] for row in rows]
    console.table("Presets (--model.preset NAME; other --model fields replace its own)", list(columns), table)
    return {"presets": rows}


def summary(config: Config, arch: Architecture, found: "Description") -> dict[str, Any]:
    """What a checkpoint holds, as plain values; arrays from the largest to the smallest."""
    axes = weight_axes(arch)
    arrays = [
        {
            "path": array.path,
            "shape": array.shape,
            "dtype": array.dtype,
            "bytes": array.bytes,
            "axes": axes_of(array, axes),
        }
        for array in sorted(found.arrays, key=lambda array: (-array.bytes, array.path))
    ]
    classes: dict[str, dict[str, Any]] = {}
    for array in found.arrays:
        name = _CLASSES.get(array.path.partition(".")[0], "counters")
        entry = classes.setdefault(name, {"name": name, "arrays": 0, "bytes": 0, "dtypes": []})
        entry["arrays"] += 1
        entry["bytes"] += array.bytes
        entry["dtypes"] = sorted({*entry["dtypes"], array.dtype})
    return {
        "step": found.step,
        "parameters": arch.parameters,
        "bytes": found.bytes,
        "config": saved_values(config),
        "meta": found.meta,
        "classes": sorted(classes.values(), key=lambda entry: -entry["bytes"]),
        "arrays": arrays,
    }


def weight_axes(arch: Architecture) -> dict[str, tuple[str | None, ...]]:
    """Path of every weight, such as "blocks.attention.query" -> the logical names of its dims."""
    import jax

    from jaxshard.models.transformer import WeightRow, describe

    rows = jax.tree_util.tree_leaves_with_path(describe(arch).weights, is_leaf=lambda x: isinstance(x, WeightRow))
    return {jax.tree_util.keystr(path, simple=True, separator="."): row.axes for path, row in rows}


def axes_of(array: "SavedArray", axes: dict[str, tuple[str | None, ...]]) -> tuple[str | None, ...] | None:
    """Logical names of an array's dims: its weight's, where the array has that weight's dims; else None."""
    names = next((names for path, names in axes.items() if array.path.endswith(f".{path}")), None)
    return names if names is not None and len(names) == len(array.shape) else None


def show(console: Console, config: Config, arch: Architecture, result: dict[str, Any]) -> None:
    """Prints a checkpoint."""
    from jaxshard.training.describe import size_text

    train, meta = config.train, result["meta"]
    others = ", ".join(str(step) for step in result["steps"] if step != result["step"])
    console.heading(f"{config.output}: checkpoint of step {result['step']:,} of {train.steps:,}")
    console.line(f"others: {others or 'none'}")
    made = f"{arch.n_layers} layers of width {arch.d_model:,}, {arch.n_heads} heads ({arch.n_kv_heads} kv)"
    rows = [
        ("model", f"{config.model.preset or arch.family}, {arch.parameters:,} parameters: {made}"),
        ("vocabulary", f"{arch.vocab_size:,}{', embedding used as head too' * arch.tie_embeddings}"),
        ("data", f"{config.data.path} as {config.data.tokenizer}, sequences of {config.data.seq_len:,}"),
        ("optimizer", f"{config.optim.name}, peak learning rate {config.optim.lr:g}, {config.optim.schedule}"),
        (
            "batch",
            f"{train.global_batch:,} sequences"
            + f" in {config.parallel.accumulation} parts" * (config.parallel.accumulation > 1),
        ),
        ("mesh", f"{config.mesh}, ZeRO-{config.zero}, {train.precision}"),
        *((name, str(value)) for name, value in meta.items() if name not in _SHOWN_APART),
        *(
            (f"{group}.{name}", str(value))
            for group in ("data", "model")
            for name, value in meta.get(group, {}).items()
        ),
    ]
    console.table("Run", ("what", "value"), rows)
    classes = [(c["name"], c["arrays"], size_text(c["bytes"]), ", ".join(c["dtypes"])) for c in result["classes"]]
    console.table(f"State: {size_text(result['bytes'])}", ("class", "arrays", "size", "types"), classes)
    arrays = result["arrays"]
    more = f" (of {len(arrays)}; --json lists all)" if len(arrays) > SHOWN else ""
    console.table(
        f"Largest arrays{more}", ("array", "shape", "dims", "type", "size"), [_line(a) for a in arrays[:SHOWN]]
    )


def _line(array: dict[str, Any]) -> tuple[str, ...]:
    from jaxshard.training.describe import size_text

    dims = " x ".join(map(str, array["shape"])) or "1"
    names = ", ".join(name or "-" for name in array["axes"]) if array["axes"] else ""
    return array["path"], dims, names, array["dtype"], size_text(array["bytes"])
