"""Before local experts under sequence parallelism: every rank of the EP group has tokens of its own."""

from __future__ import annotations

import torch

from worker_agent.moe.operators import Operators
from worker_agent.moe.prepare.allgather import GatheredMetadata
from worker_agent.moe.prepare.gathering import gather, scatter
from worker_agent.moe.prepare.interface import Prepared, Tokens
from worker_agent.moe.rank_group import RankGroup


class SequenceParallelPreparation:
    """Gathers over the whole EP group; the way back reduce-scatters over it.

    With ``quantize_with`` tokens are quantized to int8 before the gather, so that less travels (W8A8).
    """

    def __init__(self, ep: RankGroup, quantize_with: Operators | None = None) -> None:
        self._ep = ep
        self._operators = quantize_with

    def prepare(self, tokens: Tokens) -> Prepared[GatheredMetadata]:
        """The tokens of all ranks, in int8 with their scales where they were quantized."""
        hidden_TH, routing = tokens.hidden_TH, tokens.routing
        if self._operators is not None:
            int8_TH, scale_T = self._operators.npu_dynamic_quant(hidden_TH)
            tokens = Tokens(int8_TH, (*routing, scale_T))
        active_T = torch.ones(hidden_TH.shape[0], dtype=torch.bool, device=hidden_TH.device)
        gathered = gather(self._ep, tokens, active_T)
        metadata = GatheredMetadata([gathered.own], hidden_TH.dtype)
        everything = gathered.tokens
        scale_N = everything.routing[-1] if self._operators is not None else None
        return Prepared(
            everything.hidden_TH,
            everything.routing[: len(routing)],
            metadata,
            gathered.active_N,
            everything.hidden_TH.shape,
            scale_N,
        )

    def finalize(self, out_TH: torch.Tensor, metadata: GatheredMetadata) -> torch.Tensor:
        """This rank's own outputs, summed over the group."""
        return scatter(self._ep, out_TH, metadata.owns[0]).to(metadata.dtype)
