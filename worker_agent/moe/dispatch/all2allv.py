"""All-to-all of variable sizes: each rank sends each choice of its own tokens to the rank of its expert."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from worker_agent.moe.dispatch.interface import (
    Dispatched,
    DispatchRequest,
    InFlight,
    SortedRows,
    WeightAndReduce,
    Weights,
    sorted_rows,
)
from worker_agent.moe.expert_batch import ActivationFormat, ExpertBatch
from worker_agent.moe.operators import GroupListType, Operators, count_ids
from worker_agent.moe.rank_group import RankGroup, pack_rows, unpack_rows


@dataclass(frozen=True)
class All2AllVMetadata:
    """The two permutations to undo, and the sizes of the exchange between them."""

    reduce: WeightAndReduce
    row_of_arrival: torch.Tensor
    sent: list[int]
    received: list[int]


class All2AllVDispatcher:
    """Three exchanges per step: counts, token rows, and expert outputs on the way back.

    Quantized rows travel as int8, each with its scale behind it. The last two exchanges can overlap other work.
    """

    format = ActivationFormat.STANDARD
    brings_weights = True

    def __init__(self, group: RankGroup, slots: int, operators: Operators) -> None:
        self._group = group
        self._slots = slots
        self._operators = operators

    def dispatch(self, request: DispatchRequest) -> Dispatched[All2AllVMetadata]:
        """Sort choices by physical expert, exchange them, and sort what arrives by local slot."""
        return self.start_dispatch(request).receive()

    def combine(self, rows: torch.Tensor, metadata: All2AllVMetadata) -> torch.Tensor:
        """Undo the second sort, return each row to its sender, and weigh and sum there."""
        return self.start_combine(rows, metadata).receive()

    def start_dispatch(self, request: DispatchRequest) -> InFlight[Dispatched[All2AllVMetadata]]:
        """Exchange counts, and send the tokens on their way."""
        ranks, slots, operators = self._group.size, self._slots, self._operators
        nowhere = ranks * slots
        physical_TK = request.physical(nowhere)
        outgoing_RS = count_ids(physical_TK, nowhere + 1)[:-1].view(ranks, slots)
        arriving_RS = self._group.exchange(outgoing_RS)
        weights = Weights.of(request)
        outgoing = sorted_rows(
            operators,
            request.hidden_TH,
            physical_TK,
            nowhere + 1,
            scale_T=request.scale_T,
            weights_TK=weights.by_experts_TK,
            quantize=request.quantized and request.scale_T is None,
        )
        # The one wait for the device, with the sort queued before it.
        sent, received = torch.stack((outgoing_RS, arriving_RS)).sum(dim=2).tolist()
        columns = _columns(outgoing)
        forms = [column[:0].clone() for column in columns]
        packed_NB = pack_rows([column[: sum(sent)] for column in columns])
        absent_TK = request.topk_ids_TK < 0 if request.masked else None
        reduce = WeightAndReduce(
            outgoing.row_of_choice, physical_TK.shape[1], weights.by_combine_TK, absent_TK
        )
        scaled, weighed = outgoing.scale_N is not None, outgoing.weights_N is not None
        arriving = self._group.start_all_to_all(packed_NB, sent, received)
        del outgoing, columns, packed_NB

        def receive() -> Dispatched[All2AllVMetadata]:
            arrived = iter(unpack_rows(arriving.wait(), forms))
            # Each rank's rows arrive sorted by slot, so the counts alone give the slot of every row.
            slot_of_block = torch.arange(slots, dtype=torch.int32, device=arriving_RS.device).repeat(ranks)
            slot_N = slot_of_block.repeat_interleave(arriving_RS.view(-1), output_size=sum(received))
            rows = sorted_rows(
                operators,
                next(arrived),
                slot_N.unsqueeze(1),
                slots,
                scale_T=next(arrived).squeeze(1) if scaled else None,
                weights_TK=next(arrived) if weighed else None,
            )
            batch = ExpertBatch(
                rows.rows_NH, arriving_RS.sum(dim=0), GroupListType.COUNTS, rows.scale_N, rows.weights_N
            )
            return Dispatched(batch, All2AllVMetadata(reduce, rows.row_of_choice, sent, received))

        return InFlight(arriving.wait, receive)

    def start_combine(self, rows: torch.Tensor, metadata: All2AllVMetadata) -> InFlight[torch.Tensor]:
        """Undo the second sort, and send each row back on its way."""
        if rows.shape[0]:
            rows = self._operators.npu_moe_token_unpermute(rows, metadata.row_of_arrival)
        returned = self._group.start_all_to_all(rows, metadata.received, metadata.sent)
        return InFlight(returned.wait, lambda: metadata.reduce(self._operators, returned.wait()))


def _columns(outgoing: SortedRows) -> list[torch.Tensor]:
    """What travels for each choice: the token, and where they are wanted its scale and its weight."""
    extra = [column.unsqueeze(1) for column in (outgoing.scale_N, outgoing.weights_N) if column is not None]
    return [outgoing.rows_NH, *extra]
