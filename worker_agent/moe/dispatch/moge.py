"""Mixture of grouped experts: a group on each rank, and equally many choices of every group for each token."""

from __future__ import annotations

import torch

from worker_agent.moe.dispatch.interface import (
    Dispatched,
    DispatchRequest,
    WeightAndReduce,
    Weights,
    travelling_tokens,
)
from worker_agent.moe.expert_batch import ActivationFormat, ExpertBatch
from worker_agent.moe.operators import GroupListType, Operators, count_ids
from worker_agent.moe.rank_group import RankGroup


class MoGEDispatcher:
    """As the all-gather dispatcher, but each rank knows how many choices of a token are its own: K/R, or C.

    A placement may move experts within their rank alone. A token is real or padding as a whole. Raises
    ``ValueError`` where K is no multiple of R, and if values are checked, where a token does not choose C experts of
    each rank.
    """

    format = ActivationFormat.STANDARD
    brings_weights = True

    def __init__(self, group: RankGroup, slots: int, operators: Operators) -> None:
        self._group = group
        self._slots = slots
        self._operators = operators

    def dispatch(self, request: DispatchRequest) -> Dispatched[WeightAndReduce]:
        """Take each token's choices of this rank's group, and sort them by slot; counts are cumulative."""
        ranks, slots, operators = self._group.size, self._slots, self._operators
        nowhere = ranks * slots
        self._check(request, nowhere)
        # Sorted by physical expert, a token's choices are in order of rank, C for each.
        physical_TK, order_TK = request.physical(nowhere).sort(dim=1)
        share = physical_TK.shape[1] // ranks
        own = slice(self._group.rank * share, (self._group.rank + 1) * share)
        padding_TC = physical_TK[:, own] == nowhere
        # Padding sorts behind all slots, where no group of the list reaches.
        slot_TC = (physical_TK[:, own] - self._group.rank * slots).masked_fill(padding_TC, slots)
        counts_S = count_ids(slot_TC, slots + 1)[:-1]

        permute = operators.npu_moe_token_permute
        tokens_TH, scale_T = travelling_tokens(operators, request)
        rows_NH, row_of_choice = permute(tokens_TH, slot_TC)
        scale_N = weights_N = None
        if scale_T is not None:
            scale_N = permute(scale_T.unsqueeze(1), slot_TC)[0].squeeze(1)
        weights = Weights.of(request)
        if weights.by_experts_TK is not None:
            own_TC = weights.by_experts_TK.gather(1, order_TK[:, own])
            weights_N = permute(own_TC.reshape(-1, 1), slot_TC.reshape(-1))[0].squeeze(1)
        by_combine_TK = weights.by_combine_TK
        by_combine_TC = None if by_combine_TK is None else by_combine_TK.gather(1, order_TK[:, own])
        absent_TC = padding_TC if request.masked else None
        reduce = WeightAndReduce(row_of_choice, share, by_combine_TC, absent_TC)
        batch = ExpertBatch(rows_NH, counts_S.cumsum(0), GroupListType.CUMULATIVE, scale_N, weights_N)
        return Dispatched(batch, reduce)

    def combine(self, rows: torch.Tensor, metadata: WeightAndReduce) -> torch.Tensor:
        """Weigh and sum each token's local choices, in float32: the ranks' results are yet to be summed."""
        return metadata(self._operators, rows.float())

    def _check(self, request: DispatchRequest, nowhere: int) -> None:
        ranks, choices = self._group.size, request.topk_ids_TK.shape[1]
        if choices % ranks:
            raise ValueError(
                f"grouped experts: topk_ids must have a multiple of {ranks} choices, got {choices}"
            )
        if not request.check_values:
            return
        rank_TK = request.physical(nowhere).sort(dim=1).values // self._slots
        wanted_K = torch.arange(ranks, device=rank_TK.device).repeat_interleave(choices // ranks)
        wrong_T = (rank_TK != wanted_K).any(dim=1) & (rank_TK != ranks).any(dim=1)
        if wrong_T.any():
            token = int(wrong_T.nonzero()[0])
            raise ValueError(
                f"grouped experts: token {token} must choose {choices // ranks} experts on each of {ranks} ranks; "
                f"its choices are on ranks {rank_TK[token].tolist()}"
            )
