"""All-gather: every rank sees the tokens of all ranks and works on the choices whose experts it holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from worker_agent.moe.dispatch.interface import Dispatched, DispatchRequest, to_physical
from worker_agent.moe.dispatch.token_gather import gather_tokens
from worker_agent.moe.ep_group import EpGroup
from worker_agent.moe.operators import GroupListType, Operators, QuantMode


@dataclass(frozen=True)
class AllGatherMetadata:
    """Tokens of each rank, where each choice's row stands here, and the weights of the choices served here."""

    sizes: list[int]
    row_of_choice: torch.Tensor
    local_weights_NK: torch.Tensor


class AllGatherDispatcher:
    """Three exchanges a step: sizes, tokens with their choices, and partial outputs on the way back.

    Each rank looks up the experts of ALL tokens in its own log2phy, as host engines do: the tables of all
    ranks must be the same, or choices are lost or served twice.
    """

    def __init__(self, group: EpGroup, slots: int, operators: Operators) -> None:
        self._group = group
        self._slots = slots
        self._operators = operators

    def dispatch(self, request: DispatchRequest) -> Dispatched[AllGatherMetadata]:
        """Gather all tokens and their choices; sort the choices that are served here by local slot."""
        gathered = gather_tokens(self._group, request)
        physical_NK = to_physical(gathered.topk_ids_NK, request.log2phy_E)
        first = self._group.rank * self._slots
        served = [first, first + self._slots]
        rows_NH, row_of_choice, counts_S, scale_N = self._operators.npu_moe_init_routing_v2(
            gathered.hidden_NH,
            physical_NK,
            active_num=physical_NK.numel(),
            expert_num=self._group.size * self._slots,
            expert_tokens_num_type=GroupListType.COUNTS,
            expert_tokens_num_flag=True,
            active_expert_range=served,
            quant_mode=QuantMode.DYNAMIC if request.quantized else QuantMode.NONE,
        )
        here_NK = (physical_NK >= served[0]) & (physical_NK < served[1])
        metadata = AllGatherMetadata(gathered.sizes, row_of_choice, gathered.topk_weights_NK * here_NK)
        dynamic_scale_N = scale_N if request.quantized else None
        return Dispatched(rows_NH, counts_S.to(torch.int64), GroupListType.COUNTS, metadata, dynamic_scale_N)

    def combine(self, rows_NH: torch.Tensor, metadata: AllGatherMetadata) -> torch.Tensor:
        """Weigh and sum the local choices of all tokens, then the ranks' partial sums, all in float32."""
        # Choices served elsewhere have row -1: row 0 stands in for them and weighs nothing.
        partial_NH = self._operators.npu_moe_token_unpermute(
            rows_NH.float(), metadata.row_of_choice.clamp(min=0), metadata.local_weights_NK
        )
        return self._group.reduce_scatter(partial_NH, metadata.sizes).to(rows_NH.dtype)
