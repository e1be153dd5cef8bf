"""Experts as batched matrix products over ``[S, M, H]``: one shape at every step."""

from __future__ import annotations

import torch
from torch.nn.functional import silu

from worker_agent.moe.expert_batch import ActivationFormat, ExpertBatch
from worker_agent.moe.kernel.experts_part import Scratch, apply_row_weights
from worker_agent.moe.weights.expert_weights import ExpertWeights


class BatchedExperts:
    """All M rows of all slots, real or not, without a look at the counts: a graph can capture it."""

    format = ActivationFormat.BATCHED
    chunks = True
    needs_scratch = True
    quantized: bool | None = False

    def __init__(self, *, weighs: bool = False) -> None:
        self.weighs = weighs

    def run(self, batch: ExpertBatch, weights: ExpertWeights, scratch: Scratch) -> torch.Tensor:
        """See ``ExpertsPart.run``."""
        slots, rows, hidden = batch.rows.shape
        inner = weights.w2_SHI.shape[2]
        gate_up_SMI = scratch.wide[: slots * rows * 2 * inner].view(slots, rows, 2 * inner)
        inner_SMI = scratch.narrow[: slots * rows * inner].view(slots, rows, inner)
        torch.bmm(batch.rows, weights.w13_SIH.transpose(1, 2), out=gate_up_SMI)
        gate_SMI, up_SMI = gate_up_SMI.chunk(2, dim=2)
        torch.mul(silu(gate_SMI, inplace=True), up_SMI, out=inner_SMI)
        # The first product has been used up: the outputs take its place.
        out_SMH = scratch.wide[: slots * rows * hidden].view(slots, rows, hidden)
        torch.bmm(inner_SMI, weights.w2_SHI.transpose(1, 2), out=out_SMH)
        return apply_row_weights(out_SMH, batch) if self.weighs else out_SMH
