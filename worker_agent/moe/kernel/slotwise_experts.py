"""Experts slot by slot in plain torch, in memory that is used again at every layer."""

from __future__ import annotations

import torch
from torch.nn.functional import silu

from worker_agent.moe.expert_batch import ActivationFormat, ExpertBatch
from worker_agent.moe.kernel.experts_part import Scratch, apply_row_weights
from worker_agent.moe.weights.expert_weights import ExpertWeights


class SlotwiseExperts:
    """For a CPU: nothing is allocated, and slots without rows cost nothing. Reads the counts on the host."""

    format = ActivationFormat.STANDARD
    chunks = True
    needs_scratch = True
    quantized: bool | None = False

    def __init__(self, *, weighs: bool = False) -> None:
        self.weighs = weighs

    def run(self, batch: ExpertBatch, weights: ExpertWeights, scratch: Scratch) -> torch.Tensor:
        """See ``ExpertsPart.run``."""
        rows_NH = batch.rows
        count, hidden = rows_NH.shape
        inner = weights.w2_SHI.shape[2]
        gate_up_NI = scratch.wide[: count * 2 * inner].view(count, 2 * inner)
        inner_NI = scratch.narrow[: count * inner].view(count, inner)
        blocks = _blocks(batch)
        for slot, (start, end) in blocks:
            torch.mm(rows_NH[start:end], weights.w13_SIH[slot].t(), out=gate_up_NI[start:end])
        used = blocks[-1][1][1] if blocks else 0
        gate_NI, up_NI = gate_up_NI[:used].chunk(2, dim=1)
        torch.mul(silu(gate_NI, inplace=True), up_NI, out=inner_NI[:used])
        # The first product has been used up: the outputs take its place.
        out_NH = scratch.wide[: count * hidden].view(count, hidden)
        for slot, (start, end) in blocks:
            torch.mm(inner_NI[start:end], weights.w2_SHI[slot].t(), out=out_NH[start:end])
        out_NH[used:] = 0
        return apply_row_weights(out_NH, batch) if self.weighs else out_NH


def _blocks(batch: ExpertBatch) -> list[tuple[int, tuple[int, int]]]:
    """The slots that have rows, each with the first of its rows and the row after its last."""
    ends = batch.counts_S.cumsum(0).tolist()
    starts = [0, *ends[:-1]]
    spans = zip(starts, ends, strict=True)
    return [(slot, span) for slot, span in enumerate(spans) if span[0] < span[1]]
