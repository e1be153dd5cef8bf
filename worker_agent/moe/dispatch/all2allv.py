"""All-to-all of variable sizes: each rank sends each choice of its own tokens to the rank of its expert."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from worker_agent.moe.dispatch.interface import Dispatched, DispatchRequest, to_physical
from worker_agent.moe.ep_group import EpGroup
from worker_agent.moe.heat_ring import count_ids
from worker_agent.moe.operators import GroupListType, Operators
from worker_agent.moe.packing import pack_rows, unpack_rows


@dataclass(frozen=True)
class All2AllVMetadata:
    """The two permutations to undo, and the sizes of the exchange between them."""

    row_of_choice: torch.Tensor
    row_of_arrival: torch.Tensor
    sent: list[int]
    received: list[int]
    topk_weights_TK: torch.Tensor


class All2AllVDispatcher:
    """Three exchanges a step: counts, token rows, and expert outputs on the way back.

    Quantized rows travel as int8, each with its scale behind it.
    """

    def __init__(self, group: EpGroup, slots: int, operators: Operators) -> None:
        self._group = group
        self._slots = slots
        self._operators = operators

    def dispatch(self, request: DispatchRequest) -> Dispatched[All2AllVMetadata]:
        """Sort choices by physical expert, exchange them, and sort what arrives by local slot."""
        ranks, slots = self._group.size, self._slots
        physical_TK = to_physical(request.topk_ids_TK, request.log2phy_E)
        outgoing_NH, row_of_choice = self._operators.npu_moe_token_permute(request.hidden_TH, physical_TK)
        outgoing_RS = count_ids(physical_TK, ranks * slots).view(ranks, slots)
        arriving_RS = self._group.exchange(outgoing_RS)
        sent, received = outgoing_RS.sum(dim=1).tolist(), arriving_RS.sum(dim=1).tolist()
        columns = [outgoing_NH]
        if request.quantized:
            int8_NH, scale_N = self._operators.npu_dynamic_quant(outgoing_NH)
            columns = [int8_NH, scale_N.unsqueeze(1)]
        packed_NB = self._group.all_to_all(pack_rows(columns), sent, received)
        arrivals_NH, *scales = unpack_rows(packed_NB, columns)
        # Each rank's rows arrive sorted by slot, so the counts alone tell the slot of every row.
        slot_of_block = torch.arange(slots, device=arriving_RS.device).repeat(ranks)
        slot_of_arrival = slot_of_block.repeat_interleave(arriving_RS.view(-1), output_size=sum(received))
        rows_NH, row_of_arrival = self._operators.npu_moe_token_permute(arrivals_NH, slot_of_arrival)
        metadata = All2AllVMetadata(row_of_choice, row_of_arrival, sent, received, request.topk_weights_TK)
        dynamic_scale_N = None
        if scales:
            dynamic_scale_N = self._operators.npu_moe_token_permute(scales[0], slot_of_arrival)[0].squeeze(1)
        return Dispatched(rows_NH, arriving_RS.sum(dim=0), GroupListType.COUNTS, metadata, dynamic_scale_N)

    def combine(self, rows_NH: torch.Tensor, metadata: All2AllVMetadata) -> torch.Tensor:
        """Undo the second sort, return each row to its sender, and weigh and sum there."""
        returning_NH = self._operators.npu_moe_token_unpermute(rows_NH, metadata.row_of_arrival)
        outgoing_NH = self._group.all_to_all(returning_NH, metadata.received, metadata.sent)
        return self._operators.npu_moe_token_unpermute(
            outgoing_NH, metadata.row_of_choice, metadata.topk_weights_TK
        )
