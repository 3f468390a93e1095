"""The command `eval`: the loss of a run's checkpoint on its held-out documents, on any mesh."""

import math
from functools import partial
from pathlib import Path
from typing import Any

from jaxshard.config import Config
from jaxshard.config.options import Given
from jaxshard.console import Console
from jaxshard.errors import InputError
from jaxshard.training.evaluate import Evaluator
from jaxshard.training.leftovers import for_forward, own_devices
from jaxshard.training.same_data import other_text
from jaxshard.training.start import open_run, restore_parameters


def run(config: Config, *, console: Console, given: Given, checkpoint: int | None) -> dict[str, Any]:
    """Evaluates a checkpoint of the run in `config.output`, on any mesh, on the same rows.

    Raises:
        InputError: there is no such checkpoint, or nothing was held out.
    """
    rows = config.train.global_batch
    dataset, program = open_run(own_devices(config, given), adapt=partial(for_forward, given))
    evaluator = Evaluator(program, dataset, rows)
    if not evaluator.possible:
        raise InputError("no documents were held out: train with --data.eval_fraction above 0")
    step, params = restore_parameters(program, Path(config.output or "."), checkpoint, console.warn)
    if changes := other_text(dataset, Path(config.output or ".") / "checkpoints", step):
        console.warn(
            f"this is not the text of the run, which may have trained on what is held out here: {'; '.join(changes)}"
        )
    result = evaluator(params)
    perplexity = math.exp(min(result["eval_loss"], 700.0))
    console.line(
        f"step {step}: eval_loss {result['eval_loss']:.4f} over {result['eval_tokens']:,} tokens "
        f"(perplexity {perplexity:.2f})"
    )
    return {"step": step, **result, "changed_data": changes}
