"""Dispatchers of local operators and plain exchanges, and the batched layout of any dispatcher's rows."""

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

    def _arrived(self, batch: ExpertBatch, reduce: WeightAndReduce) -> Callable[[], Dispatched]:
        """Rows that did not travel, and whose outputs need not: the ranks' sums are added up afterwards."""

        def combine(rows: torch.Tensor) -> Callable[[], torch.Tensor]:
            out_TH = reduce(self._operators, rows)
            return lambda: out_TH

        return lambda: Dispatched(batch, combine)


class All2AllVDispatcher(_Dispatcher):
    """Sends each choice of a rank's own tokens to the rank of its expert, in exchanges of variable sizes.

    There are three per step: counts, token rows, and expert outputs on the way back. Quantized rows travel as int8,
    each with its scale behind it. The last two exchanges can overlap other work.
    """

    def dispatch(self, request: DispatchRequest) -> Callable[[], Dispatched]:
        """Sort choices by physical expert, exchange counts, send the rows, and sort what arrives by local slot."""
        ranks, slots, operators = self._group.size, self._slots, self._operators
        nowhere = ranks * slots
        physical_TK = request.physical(nowhere)
        outgoing_RS = count_ids(physical_TK, nowhere + 1)[:-1].view(ranks, slots)
        arriving_RS = self._group.exchange(outgoing_RS)
        rows_NH, scale_N, row_of_choice = sorted_rows(
            operators,
            request.hidden_TH,
            physical_TK,
            nowhere + 1,
            scale_T=request.scale_T,
            quantize=request.quantizes,
        )
        # The one wait for the device, with the sort queued before it.
        sent, received = torch.stack((outgoing_RS, arriving_RS)).sum(dim=2).tolist()
        scaled = scale_N is not None
        columns = [rows_NH] if scale_N is None else [rows_NH, scale_N.unsqueeze(1)]
        forms = [column[:0].clone() for column in columns]
        packed_NB = pack_rows([column[: sum(sent)] for column in columns])
        reduce = WeightAndReduce(row_of_choice, request.real_weights_TK)
        arriving = self._group.start_all_to_all(packed_NB, sent, received)

        def receive() -> Dispatched:
            arrived = iter(unpack_rows(arriving(), forms))
            # Each rank's rows arrive sorted by slot, so the counts alone give the slot of every row.
            slot_of_block = torch.arange(slots, dtype=torch.int32, device=arriving_RS.device).repeat(ranks)
            slot_N = slot_of_block.repeat_interleave(arriving_RS.view(-1), output_size=sum(received))
            rows_NH, scale_N, row_of_arrival = sorted_rows(
                operators,
                next(arrived),
                slot_N.unsqueeze(1),
                slots,
                scale_T=next(arrived).squeeze(1) if scaled else None,
            )
            batch = ExpertBatch(rows_NH, arriving_RS.sum(dim=0), GroupListType.COUNTS, scale_N)
            return Dispatched(batch, self._way_back(reduce, row_of_arrival, sent, received))

        return receive

    def _way_back(
        self, reduce: WeightAndReduce, row_of_arrival: torch.Tensor, sent: list[int], received: list[int]
    ) -> Callable[[torch.Tensor], Callable[[], torch.Tensor]]:
        """Undo the second sort, return each row to its sender, and weigh and sum there."""

        def combine(rows: torch.Tensor) -> Callable[[], torch.Tensor]:
            if rows.shape[0]:
                rows = self._operators.npu_moe_token_unpermute(rows, row_of_arrival)
            returned = self._group.start_all_to_all(rows, received, sent)
            return lambda: reduce(self._operators, returned())

        return combine


class AllGatherDispatcher(_Dispatcher):
    """Every rank has the tokens of all ranks and works on the choices whose experts it holds.

    No exchange of its own: tokens have been gathered before, and outputs are partial sums to be reduced after, in the
    tokens' dtype. Each rank looks up the experts of ALL tokens in its own log2phy, as host engines do: the tables of
    all ranks must be the same, or choices are lost or served twice.
    """

    def dispatch(self, request: DispatchRequest) -> Callable[[], Dispatched]:
        """Sort the choices that are served here by local slot."""
        nowhere = self._group.size * self._slots
        physical_TK = request.physical(nowhere)
        first = self._group.rank * self._slots
        end = first + self._slots
        elsewhere_TK = (physical_TK < first) | (physical_TK >= end)
        scale_N: torch.Tensor | None
        if physical_TK.numel():
            rows_NH, row_of_choice, counts_S, scale_N = self._operators.npu_moe_init_routing_v2(
                request.hidden_TH,
                physical_TK.to(torch.int32),
                scale=request.scale_T,
                active_num=physical_TK.numel(),
                expert_num=nowhere + 1,
                expert_tokens_num_type=GroupListType.COUNTS,
                expert_tokens_num_flag=True,
                active_expert_range=[first, end],
                quant_mode=QuantMode.DYNAMIC if request.quantizes else QuantMode.NONE,
            )
        else:
            # No tokens on any rank: no operator is called.
            rows_NH, scale_N, row_of_choice = sorted_rows(
                self._operators,
                request.hidden_TH,
                physical_TK,
                nowhere,
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
        return self._arrived(batch, WeightAndReduce(row_of_choice, request.real_weights_TK, elsewhere_TK))


class MoGEDispatcher(_Dispatcher):
    """As the all-gather dispatcher, but each rank knows how many choices of a token are its own: at most K/R, or C.

    Pangu's mixture of grouped experts: a token chooses C experts of each rank's group, and a placement may move experts
    within their rank alone. Raises ``ValueError`` where K is no multiple of R, and if values are checked, where a token
    has more than C choices on a rank. Where values are not checked, the output of such a token is NaN.
    """

    def dispatch(self, request: DispatchRequest) -> Callable[[], Dispatched]:
        """Take each token's choices of this rank's group, and sort them by slot; counts are cumulative."""
        ranks, slots = self._group.size, self._slots
        nowhere = ranks * slots
        physical_TK = request.physical(nowhere)
        self._check(physical_TK // slots, request.check_values)
        # A token's choices on this rank first, in order of slot; whatever is elsewhere or not real after them.
        first = self._group.rank * slots
        here_TK = (physical_TK >= first) & (physical_TK < first + slots)
        slot_TK, order_TK = (physical_TK - first).masked_fill(~here_TK, slots).sort(dim=1)
        share = physical_TK.shape[1] // ranks
        slot_TC, order_TC = slot_TK[:, :share], order_TK[:, :share]
        # Places without a choice sort behind all slots, where no group of the list reaches.
        absent_TC = slot_TC == slots
        counts_S = count_ids(slot_TC, slots + 1)[:-1]

        # A token with more choices here than its share cannot be served right: its output is NaN, on every device.
        too_many_T1 = here_TK.sum(dim=1, keepdim=True) > share
        weights_TK = request.real_weights_TK.masked_fill(too_many_T1, torch.nan)
        rows_NH, scale_N, row_of_choice = sorted_rows(
            self._operators,
            request.hidden_TH,
            slot_TC,
            slots + 1,
            scale_T=request.scale_T,
            quantize=request.quantizes,
        )
        batch = ExpertBatch(rows_NH, counts_S.cumsum(0), GroupListType.CUMULATIVE, scale_N)
        return self._arrived(batch, WeightAndReduce(row_of_choice, weights_TK.gather(1, order_TC), absent_TC))

    def _check(self, rank_TK: torch.Tensor, check_values: bool) -> None:
        ranks, choices = self._group.size, rank_TK.shape[1]
        if choices % ranks:
            raise ValueError(
                f"grouped experts: topk_ids must have a multiple of {ranks} choices, got {choices}"
            )
        if not check_values:
            return
        here_TKR = rank_TK.unsqueeze(2) == torch.arange(ranks, device=rank_TK.device)
        wrong_T = (here_TKR.sum(dim=1) > choices // ranks).any(dim=1)
        if wrong_T.any():
            token = int(wrong_T.nonzero()[0])
            raise ValueError(
                f"grouped experts: token {token} must choose at most {choices // ranks} experts on each of {ranks} "
                f"ranks; its choices are on ranks {rank_TK[token].tolist()}"
            )


class BatchedDispatcher:
    """The rows of any dispatcher as ``[S, M, H]``: no routing changes its size, as graphs and batched products like it.

    M is R times ``max_rank_tokens``, all that can come to one slot. No rank may have more tokens, and no token may
    choose an expert twice: whoever calls sees to that.
    """

    format = ActivationFormat.BATCHED

    def __init__(self, inner: TokenDispatcher, ranks: int, slots: int, max_rank_tokens: int) -> None:
        self._inner = inner
        self._slots = slots
        self._max_tokens = ranks * max_rank_tokens

    def dispatch(self, request: DispatchRequest) -> Callable[[], Dispatched]:
        """Dispatch, and put the rows of each slot behind one another, zeros after them."""
        receive = self._inner.dispatch(request)
        return lambda: self._laid_out(receive())

    def _laid_out(self, arrived: Dispatched) -> Dispatched:
        batch, inner_combine = arrived.batch, arrived.combine
        place_N = self._places(batch.counts_S, batch.rows.shape[0])
        # The last row takes what belongs to no slot, and is dropped.
        flat_NH = batch.rows.new_zeros(self._slots * self._max_tokens + 1, batch.rows.shape[1])
        flat_NH.index_copy_(0, place_N, batch.rows)
        rows_SMH = flat_NH[:-1].view(self._slots, self._max_tokens, -1)

        def combine(rows: torch.Tensor) -> Callable[[], torch.Tensor]:
            real_N = place_N.clamp(max=self._slots * self._max_tokens - 1)
            return inner_combine(rows.flatten(0, 1)[real_N])

        batched = ExpertBatch(rows_SMH, batch.counts_S, GroupListType.COUNTS, idle_S=batch.idle_S)
        return Dispatched(batched, combine)

    def _places(self, counts_S: torch.Tensor, rows: int) -> torch.Tensor:
        """Return the place of each row in the flattened batch, int64 ``[N]``; past its end for rows of no slot."""
        end_S = counts_S.cumsum(0)
        row_N = torch.arange(rows, device=counts_S.device)
        slot_N = torch.searchsorted(end_S, row_N, right=True)
        within_N = row_N - (end_S - counts_S)[slot_N.clamp(max=self._slots - 1)]
        return (slot_N * self._max_tokens + within_N).clamp(max=self._slots * self._max_tokens)
