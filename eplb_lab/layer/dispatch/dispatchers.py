"""Dispatchers built from local operators and plain exchanges, and one that converts rows to the batched format."""

from __future__ import annotations

from collections.abc import Callable

import torch

from eplb_lab.layer.dispatch.interface import (
    Dispatched,
    DispatchRequest,
    TokenDispatcher,
    WeightAndReduce,
    sorted_rows,
)
from eplb_lab.layer.experts import ActivationFormat, ExpertBatch
from eplb_lab.layer.operators import GroupListType, Operators, QuantMode
from eplb_lab.layer.rank_group import RankGroup, pack_rows, unpack_rows
from worker_agent.counting import count_ids


class _Dispatcher:
    format = ActivationFormat.STANDARD

    def __init__(self, group: RankGroup, slots: int, operators: Operators) -> None:
        self._group = group
        self._slots = slots
        self._operators = operators

    def _without_exchange(self, batch: ExpertBatch, reduce: WeightAndReduce) -> Callable[[], Dispatched]:
        """Return the result of a dispatch without exchanges.

        Combine returns this rank's partial sums, which the preparation later adds up across ranks.
        """

        def combine(rows: torch.Tensor) -> Callable[[], torch.Tensor]:
            out_TH = reduce(self._operators, rows)
            return lambda: out_TH

        return lambda: Dispatched(batch, combine)


class All2AllVDispatcher(_Dispatcher):
    """Sends each choice of the rank's own tokens to the rank that holds its expert, in exchanges of variable size.

    There are three exchanges per step: counts, token rows, and the experts' outputs. The last two can overlap with
    other work. Quantised rows are sent as int8, each followed by its scale.
    """

    def dispatch(self, request: DispatchRequest) -> Callable[[], Dispatched]:
        """Sort the choices by physical expert, exchange counts and rows, and sort received rows by local slot."""
        ranks = self._group.size
        slots = self._slots
        padding_id = ranks * slots
        physical_TK = request.physical(padding_id)
        outgoing_RS = count_ids(physical_TK, padding_id + 1)[:-1].view(ranks, slots)
        arriving_RS = self._group.exchange(outgoing_RS)
        rows_NH, scale_N, row_of_choice = sorted_rows(
            self._operators,
            request.hidden_TH,
            physical_TK,
            padding_id + 1,
            scale_T=request.scale_T,
            quantize=request.quantizes,
        )
        # This is the step's only wait for the device. The sort is queued before it.
        sent, received = torch.stack((outgoing_RS, arriving_RS)).sum(dim=2).tolist()
        has_scales = scale_N is not None
        columns = [rows_NH] if scale_N is None else [rows_NH, scale_N.unsqueeze(1)]
        templates = [column[:0].clone() for column in columns]
        packed_NB = pack_rows([column[: sum(sent)] for column in columns])
        reduce = WeightAndReduce(row_of_choice, request.real_weights_TK)
        wait_for_rows = self._group.start_all_to_all(packed_NB, sent, received)

        def receive() -> Dispatched:
            columns = iter(unpack_rows(wait_for_rows(), templates))
            # The rows from each rank are sorted by slot, so the counts determine the slot of every row.
            slot_of_block = torch.arange(slots, dtype=torch.int32, device=arriving_RS.device).repeat(ranks)
            slot_N = slot_of_block.repeat_interleave(arriving_RS.view(-1), output_size=sum(received))
            rows_NH, scale_N, row_of_arrival = sorted_rows(
                self._operators,
                next(columns),
                slot_N.unsqueeze(1),
                slots,
                scale_T=next(columns).squeeze(1) if has_scales else None,
            )
            batch = ExpertBatch(rows_NH, arriving_RS.sum(dim=0), GroupListType.COUNTS, scale_N)
            return Dispatched(batch, self._combine(reduce, row_of_arrival, sent, received))

        return receive

    def _combine(
        self, reduce: WeightAndReduce, row_of_arrival: torch.Tensor, sent: list[int], received: list[int]
    ) -> Callable[[torch.Tensor], Callable[[], torch.Tensor]]:
        """Return the function that undoes the second sort and sends each row back to its sender, which sums them."""

        def combine(rows: torch.Tensor) -> Callable[[], torch.Tensor]:
            if rows.shape[0]:
                rows = self._operators.npu_moe_token_unpermute(rows, row_of_arrival)
            wait_for_rows = self._group.start_all_to_all(rows, received, sent)
            return lambda: reduce(self._operators, wait_for_rows())

        return combine


class AllGatherDispatcher(_Dispatcher):
    """Dispatcher for ranks that each have the tokens of all ranks. A rank computes the choices whose experts it holds.

    It does not exchange anything: the preparation gathers the tokens beforehand and reduces the outputs, which are
    partial sums in the tokens' dtype. As in the engines, each rank looks up the experts of all tokens in its own
    ``log2phy``. The tables of all ranks must therefore be the same, or choices are lost or computed twice.
    """

    def dispatch(self, request: DispatchRequest) -> Callable[[], Dispatched]:
        """Sort the choices of this rank's experts by local slot."""
        padding_id = self._group.size * self._slots
        physical_TK = request.physical(padding_id)
        first = self._group.rank * self._slots
        end = first + self._slots
        absent_TK = (physical_TK < first) | (physical_TK >= end)
        scale_N: torch.Tensor | None
        if physical_TK.numel():
            rows_NH, row_of_choice, counts_S, scale_N = self._operators.npu_moe_init_routing_v2(
                request.hidden_TH,
                physical_TK.to(torch.int32),
                scale=request.scale_T,
                active_num=physical_TK.numel(),
                expert_num=padding_id + 1,
                expert_tokens_num_type=GroupListType.COUNTS,
                expert_tokens_num_flag=True,
                active_expert_range=[first, end],
                quant_mode=QuantMode.DYNAMIC if request.quantizes else QuantMode.NONE,
            )
        else:
            # No rank has tokens, so no operator is called.
            rows_NH, scale_N, row_of_choice = sorted_rows(
                self._operators,
                request.hidden_TH,
                physical_TK,
                padding_id,
                scale_T=request.scale_T,
                quantize=request.quantizes,
            )
            counts_S = physical_TK.new_zeros(self._slots)
        batch = ExpertBatch(
            rows_NH,
            counts_S.to(torch.int64),
            GroupListType.COUNTS,
            scale_N if request.quantized else None,
        )
        reduce = WeightAndReduce(row_of_choice, request.real_weights_TK, absent_TK)
        return self._without_exchange(batch, reduce)


class MoGEDispatcher(_Dispatcher):
    """Dispatcher for Pangu's mixture of grouped experts (MoGE), in which every rank has all ranks' tokens.

    Each rank holds one group of experts, and a placement may move experts only within their rank. A token chooses K/R
    experts from each group, so at most C = K/R of its choices are on one rank.

    Dispatch raises ``ValueError`` if K is not a multiple of R. A token with more than C choices on a rank also raises
    ``ValueError`` if values are checked; otherwise its output is NaN.
    """

    def dispatch(self, request: DispatchRequest) -> Callable[[], Dispatched]:
        """Select the choices of this rank's group and sort them by local slot; row counts are cumulative."""
        ranks = self._group.size
        slots = self._slots
        physical_TK = request.physical(ranks * slots)
        self._check(physical_TK // slots, request.check_values)
        # Sort each token's choices: first those on this rank, in slot order, then all others.
        first = self._group.rank * slots
        local_TK = (physical_TK >= first) & (physical_TK < first + slots)
        slot_TK, order_TK = (physical_TK - first).masked_fill(~local_TK, slots).sort(dim=1)
        share = physical_TK.shape[1] // ranks
        slot_TC = slot_TK[:, :share]
        order_TC = order_TK[:, :share]
        # Missing choices are sorted after all slots, outside the groups of the group list.
        absent_TC = slot_TC == slots
        counts_S = count_ids(slot_TC, slots + 1)[:-1]

        # A token with more than its share of choices on this rank would lose some of them. Its output is therefore set
        # to NaN, on CPUs and accelerators alike.
        excess_T1 = local_TK.sum(dim=1, keepdim=True) > share
        weights_TK = request.real_weights_TK.masked_fill(excess_T1, torch.nan)
        rows_NH, scale_N, row_of_choice = sorted_rows(
            self._operators,
            request.hidden_TH,
            slot_TC,
            slots + 1,
            scale_T=request.scale_T,
            quantize=request.quantizes,
        )
        batch = ExpertBatch(rows_NH, counts_S.cumsum(0), GroupListType.CUMULATIVE, scale_N)
        reduce = WeightAndReduce(row_of_choice, weights_TK.gather(1, order_TC), absent_TC)
        return self._without_exchange(batch, reduce)

    def _check(self, rank_TK: torch.Tensor, check_values: bool) -> None:
        ranks = self._group.size
        choices = rank_TK.shape[1]
        if choices % ranks:
            raise ValueError(
                f"grouped experts: the number of choices in topk_ids must be a multiple of {ranks}, got {choices}"
            )
        if not check_values:
            return
        on_rank_TKR = rank_TK.unsqueeze(2) == torch.arange(ranks, device=rank_TK.device)
        excess_T = (on_rank_TKR.sum(dim=1) > choices // ranks).any(dim=1)
        if excess_T.any():
            token = int(excess_T.nonzero()[0])
            raise ValueError(
                f"grouped experts: token {token} must choose at most {choices // ranks} experts on each of {ranks} "
                f"ranks; its choices are on ranks {rank_TK[token].tolist()}"
            )


class BatchedDispatcher:
    """Wraps a dispatcher and returns its rows in the batched format ``[S, M, H]``, whose size is constant.

    Graphs and batched matmuls need a size that does not depend on the routing. M is R times ``max_rank_tokens``, the
    maximum number of rows that one slot can receive. The caller must ensure that no rank has more tokens, and that no
    token chooses an expert twice.
    """

    format = ActivationFormat.BATCHED

    def __init__(self, inner: TokenDispatcher, ranks: int, slots: int, max_rank_tokens: int) -> None:
        self._inner = inner
        self._slots = slots
        self._max_tokens = ranks * max_rank_tokens

    def dispatch(self, request: DispatchRequest) -> Callable[[], Dispatched]:
        """Dispatch with the inner dispatcher, and pad the rows of each slot with zeros."""
        receive = self._inner.dispatch(request)
        return lambda: self._batched(receive())

    def _batched(self, result: Dispatched) -> Dispatched:
        batch = result.batch
        combine_rows = result.combine
        position_N = self._positions(batch.counts_S, batch.rows.shape[0])
        # Rows that belong to no slot are written to one extra row, which is dropped.
        flat_NH = batch.rows.new_zeros(self._slots * self._max_tokens + 1, batch.rows.shape[1])
        flat_NH.index_copy_(0, position_N, batch.rows)
        rows_SMH = flat_NH[:-1].view(self._slots, self._max_tokens, -1)

        def combine(rows: torch.Tensor) -> Callable[[], torch.Tensor]:
            clamped_N = position_N.clamp(max=self._slots * self._max_tokens - 1)
            return combine_rows(rows.flatten(0, 1)[clamped_N])

        padded_batch = ExpertBatch(rows_SMH, batch.counts_S, GroupListType.COUNTS, padding_S=batch.padding_S)
        return Dispatched(padded_batch, combine)

    def _positions(self, counts_S: torch.Tensor, rows: int) -> torch.Tensor:
        """Return the position of each row in the flattened batch, int64 ``[N]``.

        Rows that belong to no slot get the position after the last slot's rows.
        """
        end_S = counts_S.cumsum(0)
        row_N = torch.arange(rows, device=counts_S.device)
        slot_N = torch.searchsorted(end_S, row_N, right=True)
        within_N = row_N - (end_S - counts_S)[slot_N.clamp(max=self._slots - 1)]
        return (slot_N * self._max_tokens + within_N).clamp(max=self._slots * self._max_tokens)
