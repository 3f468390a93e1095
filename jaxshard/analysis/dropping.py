"""Seconds that dropout adds to a step: random bits drawn for each element of both branches, and what is dropped.

The bits are Threefry's (Salmon et al. 2011, 20 rounds). In compiled programs an element takes 120 integer operations:
a round adds, xors and rotates, and a rotation of three is one instruction. They are in the kernel that adds the branch
to the stream, which takes the longer of both. They are drawn once in the forward pass and once more wherever a block is
recomputed; else what is dropped is kept, a byte an element.
"""

from typing import Any

import numpy as np

from jaxshard.analysis.kernels import Number, Rates, Work
from jaxshard.models.presets import Architecture

INSTRUCTIONS = 80
"""Integer instructions for the bits of one element."""


def integers(rates: Rates, instructions: Number) -> Number:
    """Seconds of integer instructions, one for each element of an array."""
    return instructions * rates.hw.matrix.integer / rates.hw.flops


def dropped(arch: Architecture, layout: Any, rates: Rates, seq_len: Number) -> tuple[Work, Work]:
    """Forward and backward work that dropout adds to a block; `layout` is a cost.Parallelism."""
    if not arch.dropout or rates.software.eager:  # the kernels of an eager framework have it in them
        return Work(), Work()
    wide = layout.sequences * seq_len * arch.d_model / np.where(layout.sequence_parallel, layout.model, 1)
    sum_of_branch = rates.software.forward.wide[0] * wide / rates.memory
    drawing = np.maximum(0.0, integers(rates, INSTRUCTIONS * wide) - sum_of_branch)
    mask, kept = wide / rates.memory, np.asarray(layout.remat) == "none"
    # Kept: written, copied into the stack over layers, copied out of it, read. Else written and read.
    before, after = np.where(kept, 3, 0), np.where(kept, 3, 2)
    return Work(elementwise=2 * (drawing + before * mask)), Work(elementwise=2 * after * mask)
