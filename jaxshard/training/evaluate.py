"""Loss on the held-out documents, weighted by tokens over the whole set whatever the batch size."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxshard.config import Config
from jaxshard.config.options import Given
from jaxshard.console import Console
from jaxshard.data import Dataset, eval_batches
from jaxshard.data.packing import Batch
from jaxshard.errors import InputError
from jaxshard.training.leftovers import for_forward, own_devices
from jaxshard.training.program import Program
from jaxshard.training.start import open_run, restore_parameters


class Evaluator:
    """Evaluates parameters on a data set; the function is compiled once, at the first call.

    A batch has `rows` rows, by default the program's; one that is smaller than the program's is filled up with padding.
    """

    def __init__(self, program: Program, dataset: Dataset, rows: int | None = None):
        self._program, self._dataset = program, dataset
        self._rows = rows or program.config.train.global_batch
        self._compiled: jax.stages.Compiled | None = None

    @property
    def possible(self) -> bool:
        """Whether there are held-out documents."""
        return len(self._dataset.eval) > 0

    def __call__(self, params: Any) -> dict[str, float | int]:
        """Returns eval_loss (mean over tokens) and eval_tokens."""
        program, config = self._program, self._program.config
        if self._compiled is None:
            abstract = program.abstract_batch(accumulation=1)
            self._compiled = program.evaluate.lower(program.abstract.params, abstract).compile()
        empty = config.train.global_batch - self._rows
        batches = (_filled(batch, empty) for batch in eval_batches(self._dataset, self._rows, config.eval.batches))
        # All batches are dispatched before the first result is read.
        results = [self._compiled(params, program.place(batch)) for batch in batches]
        sums = [(float(loss), int(tokens)) for loss, tokens in results]
        tokens = sum(count for _, count in sums)
        return {"eval_loss": math.fsum(loss for loss, _ in sums) / max(tokens, 1), "eval_tokens": tokens}


def _filled(batch: Batch, rows: int) -> Batch:
    """A batch [B, T] with so many rows of padding behind it."""
    wide = lambda name, a: np.pad(a, ((0, rows), (0, 0)), constant_values=-1 if name == "targets" else 0)
    return {name: wide(name, a) for name, a in batch.items()} if rows else batch


def run(config: Config, *, console: Console, given: Given, checkpoint: int | None) -> dict[str, Any]:
    """The command `eval`: evaluates a checkpoint of the run in `config.output`, on any mesh, on the same rows.

    Raises:
        InputError: there is no such checkpoint, or nothing was held out.
    """
    rows = config.train.global_batch
    dataset, program = open_run(own_devices(config, given), adapt=partial(for_forward, given))
    evaluator = Evaluator(program, dataset, rows)
    if not evaluator.possible:
        raise InputError("no documents were held out: train with --data.eval_fraction above 0")
    step, params = restore_parameters(program, Path(config.output or "."), checkpoint, console.warn)
    result = evaluator(params)
    perplexity = math.exp(min(result["eval_loss"], 700.0))
    console.line(
        f"step {step}: eval_loss {result['eval_loss']:.4f} over {result['eval_tokens']:,} tokens "
        f"(perplexity {perplexity:.2f})"
    )
    return {"step": step, **result}
