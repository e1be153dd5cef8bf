"""Mixture of grouped experts: a group on each rank, and equally many choices of every group for each token."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from worker_agent.moe.dispatch.interface import Dispatched, DispatchRequest, to_physical
from worker_agent.moe.dispatch.token_gather import gather_tokens
from worker_agent.moe.ep_group import EpGroup
from worker_agent.moe.heat_ring import count_ids
from worker_agent.moe.operators import GroupListType, Operators


@dataclass(frozen=True)
class MoGEMetadata:
    """Tokens of each rank, where each local choice's row stands, and the local choices' weights."""

    sizes: list[int]
    row_of_choice: torch.Tensor
    local_weights_NC: torch.Tensor


class MoGEDispatcher:
    """As the all-gather dispatcher, but each rank knows how many choices of a token are its own: K/R, or C.

    A placement may move experts within their rank alone. Raises ``ValueError`` where K is no multiple of R, and if
    values are checked, where a token does not choose C experts of each rank.
    """

    def __init__(self, group: EpGroup, slots: int, operators: Operators) -> None:
        self._group = group
        self._slots = slots
        self._operators = operators

    def dispatch(self, request: DispatchRequest) -> Dispatched[MoGEMetadata]:
        """Gather all tokens, take each one's choices of this rank's group, and sort them by slot."""
        self._check(request)
        gathered = gather_tokens(self._group, request)
        # Sorted by physical expert, a token's choices stand in order of rank, C for each.
        physical_NK, order_NK = to_physical(gathered.topk_ids_NK, request.log2phy_E).sort(dim=1)
        share = physical_NK.shape[1] // self._group.size
        first = self._group.rank * share
        slot_NC = physical_NK.narrow(1, first, share) - self._group.rank * self._slots
        weights_NC = gathered.topk_weights_NK.gather(1, order_NK.narrow(1, first, share))
        rows_NH, row_of_choice = self._operators.npu_moe_token_permute(gathered.hidden_NH, slot_NC)
        cumulative_S = count_ids(slot_NC, self._slots).cumsum(0)
        scale_N = None
        if request.quantized:
            rows_NH, scale_N = self._operators.npu_dynamic_quant(rows_NH)
        metadata = MoGEMetadata(gathered.sizes, row_of_choice, weights_NC)
        return Dispatched(rows_NH, cumulative_S, GroupListType.CUMULATIVE, metadata, scale_N)

    def combine(self, rows_NH: torch.Tensor, metadata: MoGEMetadata) -> torch.Tensor:
        """Weigh and sum each token's local choices, then the ranks' partial sums, all in float32."""
        partial_NH = self._operators.npu_moe_token_unpermute(
            rows_NH.float(), metadata.row_of_choice, metadata.local_weights_NC
        )
        return self._group.reduce_scatter(partial_NH, metadata.sizes).to(rows_NH.dtype)

    def _check(self, request: DispatchRequest) -> None:
        ranks, choices = self._group.size, request.topk_ids_TK.shape[1]
        if choices % ranks:
            raise ValueError(
                f"grouped experts: topk_ids must have a multiple of {ranks} choices, got {choices}"
            )
        if not request.check_values:
            return
        rank_TK = to_physical(request.topk_ids_TK, request.log2phy_E).sort(dim=1).values // self._slots
        wanted_K = torch.arange(ranks, device=rank_TK.device).repeat_interleave(choices // ranks)
        wrong_T = (rank_TK != wanted_K).any(dim=1)
        if wrong_T.any():
            token = int(wrong_T.nonzero()[0])
            raise ValueError(
                f"grouped experts: token {token} must choose {choices // ranks} experts on each of {ranks} ranks; "
                f"its choices are on ranks {rank_TK[token].tolist()}"
            )
