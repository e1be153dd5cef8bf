"""Mixture of grouped experts: a group on each rank, and equally many choices of every group for each token."""

from __future__ import annotations

from dataclasses import replace

import torch

from worker_agent.moe.dispatch.interface import (
    Dispatched,
    DispatchRequest,
    WeightAndReduce,
    Weights,
    sorted_rows,
)
from worker_agent.moe.expert_batch import ActivationFormat, ExpertBatch
from worker_agent.moe.operators import GroupListType, Operators, count_ids
from worker_agent.moe.rank_group import RankGroup


class MoGEDispatcher:
    """As the all-gather dispatcher, but each rank knows how many choices of a token are its own: at most K/R, or C.

    Pangu's grouped experts: a token chooses C experts of each rank's group, and a placement may move experts within
    their rank alone. Raises ``ValueError`` where K is no multiple of R, and if values are checked, where a token has
    more than C choices on a rank. Where values are not checked, the output of such a token is NaN.
    """

    format = ActivationFormat.STANDARD
    brings_weights = True

    def __init__(self, group: RankGroup, slots: int, operators: Operators) -> None:
        self._group = group
        self._slots = slots
        self._operators = operators

    def dispatch(self, request: DispatchRequest) -> Dispatched[WeightAndReduce]:
        """Take each token's choices of this rank's group, and sort them by slot; counts are cumulative."""
        ranks, slots = self._group.size, self._slots
        nowhere = ranks * slots
        self._check(request, nowhere)
        # A token's choices on this rank first, in order of slot; whatever is elsewhere or not real after them.
        first = self._group.rank * slots
        physical_TK = request.physical(nowhere)
        here_TK = (physical_TK >= first) & (physical_TK < first + slots)
        slot_TK, order_TK = (physical_TK - first).masked_fill(~here_TK, slots).sort(dim=1)
        share = physical_TK.shape[1] // ranks
        slot_TC, order_TC = slot_TK[:, :share], order_TK[:, :share]
        # Places without a choice sort behind all slots, where no group of the list reaches.
        absent_TC = slot_TC == slots
        counts_S = count_ids(slot_TC, slots + 1)[:-1]

        # A token with more choices here than its share cannot be served right: its output is NaN, on every device.
        too_many_T1 = here_TK.sum(dim=1, keepdim=True) > share
        checked_TK = request.topk_weights_TK.float().masked_fill(too_many_T1, torch.nan)
        weights = Weights.of(replace(request, topk_weights_TK=checked_TK))
        by_experts_TK = weights.by_experts_TK
        rows = sorted_rows(
            self._operators,
            request.hidden_TH,
            slot_TC,
            slots + 1,
            scale_T=request.scale_T,
            weights_TK=None if by_experts_TK is None else by_experts_TK.gather(1, order_TC),
            quantize=request.quantized and request.scale_T is None,
        )
        by_combine_TK = weights.by_combine_TK
        by_combine_TC = None if by_combine_TK is None else by_combine_TK.gather(1, order_TC)
        reduce = WeightAndReduce(rows.row_of_choice, share, by_combine_TC, absent_TC)
        batch = ExpertBatch(
            rows.rows_NH, counts_S.cumsum(0), GroupListType.CUMULATIVE, rows.scale_N, rows.weights_N
        )
        return Dispatched(batch, reduce)

    def combine(self, rows: torch.Tensor, metadata: WeightAndReduce) -> torch.Tensor:
        """Weigh and sum each token's local choices, in the tokens' dtype: the ranks' results are yet to be summed."""
        return metadata(self._operators, rows)

    def _check(self, request: DispatchRequest, nowhere: int) -> None:
        ranks, choices = self._group.size, request.topk_ids_TK.shape[1]
        if choices % ranks:
            raise ValueError(
                f"grouped experts: topk_ids must have a multiple of {ranks} choices, got {choices}"
            )
        if not request.check_values:
            return
        physical_TK = request.physical(nowhere)
        rank_TK = physical_TK // self._slots
        here_TKR = rank_TK.unsqueeze(2) == torch.arange(ranks, device=rank_TK.device)
        wrong_T = (here_TKR.sum(dim=1) > choices // ranks).any(dim=1)
        if wrong_T.any():
            token = int(wrong_T.nonzero()[0])
            raise ValueError(
                f"grouped experts: token {token} must choose at most {choices // ranks} experts on each of {ranks} "
                f"ranks; its choices are on ranks {rank_TK[token].tolist()}"
            )
