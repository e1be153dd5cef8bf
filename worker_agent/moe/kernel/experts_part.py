"""The part of the kernel that computes: rows in, expert outputs in the same places out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from worker_agent.moe.expert_batch import ActivationFormat, ExpertBatch
from worker_agent.moe.weights.expert_weights import ExpertWeights


@dataclass(frozen=True)
class Scratch:
    """Memory that an experts part may write: its contents mean nothing before and after a call."""

    wide: torch.Tensor
    """1-D, of the outputs' dtype: room for the first product, and later for the down-projection's output."""

    narrow: torch.Tensor
    """1-D, room for the activation."""


class ExpertsPart(Protocol):
    """Gated feed-forward experts, one per local slot."""

    format: ActivationFormat
    """What it takes, and gives back."""

    weighs: bool
    """Whether it multiplies each row's output by the batch's weight; ``combine`` then only sums."""

    chunks: bool
    """Whether a batch may come in parts."""

    needs_scratch: bool
    """Whether it writes into scratch; otherwise its operators have memory of their own, and scratch is empty."""

    quantized: bool | None
    """Whether it takes int8 weights (True), floating-point ones (False) or either (None)."""

    def run(self, batch: ExpertBatch, weights: ExpertWeights, scratch: Scratch) -> torch.Tensor:
        """Each row through the expert of its slot: shaped as the batch, of the scratch's dtype and perhaps in it."""
        ...


def apply_row_weights(out: torch.Tensor, batch: ExpertBatch) -> torch.Tensor:
    """Outputs times the batch's weights, in place."""
    assert batch.weights is not None, "the kernel has seen to it that rows bring their weights"
    return out.mul_(batch.weights.unsqueeze(-1).to(out.dtype))
