"""All-gather: every rank has the tokens of all ranks and works on the choices whose experts it holds."""

from __future__ import annotations

import torch

from worker_agent.moe.dispatch.interface import Dispatched, DispatchRequest, WeightAndReduce, Weights
from worker_agent.moe.expert_batch import ActivationFormat, ExpertBatch
from worker_agent.moe.operators import GroupListType, Operators, QuantMode
from worker_agent.moe.rank_group import RankGroup


class AllGatherDispatcher:
    """No exchange of its own: tokens have been gathered before, and outputs are partial sums to be reduced after.

    Each rank looks up the experts of ALL tokens in its own log2phy, as host engines do: the tables of all
    ranks must be the same, or choices are lost or served twice.
    """

    format = ActivationFormat.STANDARD
    brings_weights = True

    def __init__(self, group: RankGroup, slots: int, operators: Operators) -> None:
        self._group = group
        self._slots = slots
        self._operators = operators

    def dispatch(self, request: DispatchRequest) -> Dispatched[WeightAndReduce]:
        """Sort the choices that are served here by local slot."""
        nowhere = self._group.size * self._slots
        physical_TK = request.physical(nowhere)
        first = self._group.rank * self._slots
        end = first + self._slots
        quantize = request.quantized and request.scale_T is None
        if not physical_TK.numel():
            return self._nothing(request, physical_TK)
        rows_NH, row_of_choice, counts_S, scale_N = self._operators.npu_moe_init_routing_v2(
            request.hidden_TH,
            physical_TK.to(torch.int32),
            scale=request.scale_T,
            active_num=physical_TK.numel(),
            expert_num=nowhere + 1 if request.masked else nowhere,
            expert_tokens_num_type=GroupListType.COUNTS,
            expert_tokens_num_flag=True,
            active_expert_range=[first, end],
            quant_mode=QuantMode.DYNAMIC if quantize else QuantMode.NONE,
        )
        elsewhere_TK = (physical_TK < first) | (physical_TK >= end)
        weights = Weights.of(request)
        weights_N = None
        if weights.by_experts_TK is not None:
            weights_N = _by_row(weights.by_experts_TK, row_of_choice)
        reduce = WeightAndReduce(row_of_choice, physical_TK.shape[1], weights.by_combine_TK, elsewhere_TK)
        batch = ExpertBatch(
            rows_NH,
            counts_S.to(torch.int64),
            GroupListType.COUNTS,
            scale_N if request.quantized else None,
            weights_N,
        )
        return Dispatched(batch, reduce)

    def _nothing(self, request: DispatchRequest, physical_TK: torch.Tensor) -> Dispatched[WeightAndReduce]:
        """No tokens on any rank: no operator is called."""
        hidden_TH, quantized = request.hidden_TH, request.quantized
        rows_NH = hidden_TH.new_empty(
            0, hidden_TH.shape[1], dtype=torch.int8 if quantized else hidden_TH.dtype
        )
        none_N = hidden_TH.new_empty(0, dtype=torch.float32)
        counts_S = physical_TK.new_zeros(self._slots, dtype=torch.int64)
        batch = ExpertBatch(
            rows_NH,
            counts_S,
            GroupListType.COUNTS,
            none_N if quantized else None,
            none_N if request.experts_weigh else None,
        )
        reduce = WeightAndReduce(
            physical_TK.new_empty(0, dtype=torch.int32), physical_TK.shape[1], request.real_weights()
        )
        return Dispatched(batch, reduce)

    def combine(self, rows: torch.Tensor, metadata: WeightAndReduce) -> torch.Tensor:
        """Weigh and sum the local choices of all tokens; the ranks' results, of the tokens' dtype, are to be summed."""
        return metadata(self._operators, rows)


def _by_row(weights_TK: torch.Tensor, row_of_choice: torch.Tensor) -> torch.Tensor:
    """The weight of each row; rows that no choice here has weigh nothing."""
    weights_N = weights_TK.new_zeros(weights_TK.numel() + 1)
    # Choices served elsewhere have row -1: the last place takes them, and is dropped.
    place_N = (row_of_choice % weights_N.shape[0]).long()
    return weights_N.index_copy_(0, place_N, weights_TK.reshape(-1))[:-1]
