"""The command `generate`: what the model of a run writes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxshard.config import Config
from jaxshard.config.options import Given
from jaxshard.console import Console
from jaxshard.data.tokenizer import Tokenizer, load_tokenizer
from jaxshard.inference.generate import check_prompts, continuation, generator, prompt_ids, room_for
from jaxshard.inference.sampling import Sampling
from jaxshard.models.presets import architecture
from jaxshard.parallel.axes import MeshShape
from jaxshard.parallel.mesh import open_devices, resolve_mesh
from jaxshard.training.leftovers import for_forward, own_devices
from jaxshard.training.pipeline_plan import OPTIONS
from jaxshard.training.program import build_program
from jaxshard.training.saved import describe
from jaxshard.training.start import restore_parameters


def run(
    config: Config,
    *,
    console: Console,
    given: Given,
    prompt: str,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    greedy: bool,
    samples: int,
    checkpoint: int | None,
) -> dict[str, Any]:
    """Continues a prompt with a checkpoint of the run in `config.output`.

    Returns step, prompt, and samples: text (of the new tokens), tokens, and end (whether the document ended).

    Raises:
        InputError: there is no such checkpoint, or the model cannot take the prompt.
    """
    tokenizer = load_tokenizer(config.data.tokenizer)
    config = own_devices(config, given)
    devices = open_devices(config.mesh, config.devices, config.fake_devices)
    fitting = _for_generation(config, given, tokenizer.vocab_size, resolve_mesh(config.mesh, len(devices)))
    program = build_program(fitting, devices, tokenizer.vocab_size)
    ids = prompt_ids(tokenizer, prompt)
    check_prompts(program.model.arch, [ids], max_new_tokens)
    step, params = restore_parameters(program, Path(config.output or "."), checkpoint, console.warn)
    if said := _other_tokenizer(tokenizer, Path(config.output or ".") / "checkpoints", step):
        console.warn(said)
    room = room_for(program.model.arch, len(ids))
    if max_new_tokens > room:
        console.warn(f"beyond {room:,} new tokens the text is longer than what the model was made for (max_seq_len)")
    sampling = Sampling(temperature, top_k, top_p, greedy)
    write = generator(program)
    console.line(f"compiling for {samples} sample{'s' * (samples > 1)} of up to {max_new_tokens:,} tokens ...")
    written = write(params, [ids] * samples, max_new_tokens, sampling, config.train.seed, tokenizer.eod)
    results = []
    for number, new in enumerate(written, 1):
        text, ended = continuation(tokenizer, ids, new), len(new) < max_new_tokens
        results.append({"text": text, "tokens": len(new), "end": ended})
        console.heading(f"step {step}, sample {number} of {samples}: {len(new):,} tokens{', its end' * ended}")
        console.line(prompt + text)
    return {"step": step, "prompt": prompt, "samples": results}


def _for_generation(config: Config, given: Given, vocab_size: int, shape: MeshShape) -> Config:
    """The configuration without what only training needs, its batch and its schedule too."""
    unused = {name: None for name in OPTIONS if f"parallel.{name}" not in given.options}
    parallel = replace(config.parallel, accumulation=1, sequence_parallel=False, **unused)
    config = replace(config, train=replace(config.train, global_batch=shape.batch_ways), parallel=parallel)
    return for_forward(given, config, architecture(config.model, vocab_size, config.data.seq_len), shape)


def _other_tokenizer(tokenizer: Tokenizer, checkpoints: Path, step: int) -> str:
    """What to say where the text is not made with the tokenizer of the checkpoint, as far as it recorded it."""
    before = describe(checkpoints, step).meta.get("data", {}).get("tokenizer", tokenizer.identity)
    if before == tokenizer.identity:
        return ""
    return (
        f"data.tokenizer {tokenizer.name!r} is not the one that checkpoint {step} was trained with: it is "
        f"{tokenizer.identity} and was {before}, so ids stand for other text"
    )
