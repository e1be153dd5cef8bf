"""MC2: one fused communication operator each way."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from worker_agent.moe.dispatch.interface import Dispatched, DispatchRequest, to_physical
from worker_agent.moe.ep_group import EpGroup
from worker_agent.moe.operators import DispatchQuantMode, GroupListType, Operators


@dataclass(frozen=True)
class MC2Metadata:
    """The padded tokens' choices, and what the dispatch operator wants back."""

    tokens: int
    physical_TK: torch.Tensor
    topk_weights_TK: torch.Tensor
    active_T: torch.Tensor
    assist_info: torch.Tensor
    received_counts: torch.Tensor


class MC2Dispatcher:
    """Tokens are padded to the largest rank's count, and a mask keeps the padding at home."""

    def __init__(self, group: EpGroup, slots: int, operators: Operators) -> None:
        self._group = group
        self._experts = group.size * slots
        self._operators = operators

    def dispatch(self, request: DispatchRequest) -> Dispatched[MC2Metadata]:
        """Pad, and let the fused operator send, receive and sort; counts come cumulative."""
        tokens = request.hidden_TH.shape[0]
        length = self._common_length(tokens, request.hidden_TH.device)
        missing = (0, 0, 0, length - tokens)
        physical_TK = pad(to_physical(request.topk_ids_TK, request.log2phy_E), missing)
        active_T = torch.arange(length, device=physical_TK.device) < tokens
        received = self._operators.npu_moe_distribute_dispatch_v2(
            pad(request.hidden_TH, missing),
            physical_TK,
            self._group.name,
            self._group.size,
            self._group.rank,
            self._experts,
            x_active_mask=active_T,
            quant_mode=DispatchQuantMode.DYNAMIC if request.quantized else DispatchQuantMode.NONE,
            global_bs=length * self._group.size,
            expert_token_nums_type=GroupListType.CUMULATIVE,
        )
        rows_AH, scale_A, assist_info, cumulative_S, received_counts = received[:5]
        weights_TK = pad(request.topk_weights_TK.float(), missing)
        metadata = MC2Metadata(tokens, physical_TK, weights_TK, active_T, assist_info, received_counts)
        dynamic_scale_A = scale_A if request.quantized else None
        return Dispatched(rows_AH, cumulative_S, GroupListType.CUMULATIVE, metadata, dynamic_scale_A)

    def combine(self, rows_NH: torch.Tensor, metadata: MC2Metadata) -> torch.Tensor:
        """Let the fused operator return, weigh and sum; drop the padding."""
        combined_TH = self._operators.npu_moe_distribute_combine_v2(
            rows_NH,
            metadata.physical_TK,
            metadata.assist_info,
            metadata.received_counts,
            metadata.topk_weights_TK,
            self._group.name,
            self._group.size,
            self._group.rank,
            self._experts,
            x_active_mask=metadata.active_T,
            global_bs=metadata.active_T.shape[0] * self._group.size,
        )
        return combined_TH[: metadata.tokens]

    def _common_length(self, tokens: int, device: torch.device) -> int:
        """The largest rank's number of tokens, at least one: the operators take no empty batch."""
        counts_R = self._group.exchange(torch.full((self._group.size,), tokens, device=device))
        return max(1, int(counts_R.max()))
