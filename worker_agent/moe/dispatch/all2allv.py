"""All-to-all of variable sizes: each rank sends each choice of its own tokens to the rank of its expert."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from worker_agent.moe.dispatch.interface import (
    Dispatched,
    DispatchRequest,
    InFlight,
    WeightAndReduce,
    Weights,
    travelling_tokens,
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


@dataclass(frozen=True)
class _Columns:
    """What travels for each choice: the token, and where they are wanted its scale and its weight."""

    rows_NH: torch.Tensor
    scale_N: torch.Tensor | None
    weights_N: torch.Tensor | None

    def tensors(self) -> list[torch.Tensor]:
        extra = [column.unsqueeze(1) for column in (self.scale_N, self.weights_N) if column is not None]
        return [self.rows_NH, *extra]

    def like(self, tensors: list[torch.Tensor]) -> _Columns:
        """The columns that ``tensors`` hold, of which there are as many as here."""
        extra = iter(tensors[1:])
        scale_N = None if self.scale_N is None else next(extra).squeeze(1)
        weights_N = None if self.weights_N is None else next(extra).squeeze(1)
        return _Columns(tensors[0], scale_N, weights_N)

    def permuted(self, operators: Operators, order_N: torch.Tensor) -> tuple[_Columns, torch.Tensor]:
        """All columns sorted by ``order_N``, and where each row went."""
        sorted_columns, rows = zip(
            *[operators.npu_moe_token_permute(column, order_N) for column in self.tensors()], strict=True
        )
        return self.like(list(sorted_columns)), rows[0]


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
        sent, received = outgoing_RS.sum(dim=1).tolist(), arriving_RS.sum(dim=1).tolist()

        weights = Weights.of(request)
        outgoing, row_of_choice = self._sorted_choices(request, weights.by_experts_TK, physical_TK)
        packed_NB = pack_rows([column[: sum(sent)] for column in outgoing.tensors()])
        absent_TK = request.topk_ids_TK < 0 if request.masked else None
        reduce = WeightAndReduce(row_of_choice, physical_TK.shape[1], weights.by_combine_TK, absent_TK)
        arriving = self._group.start_all_to_all(packed_NB, sent, received)

        def receive() -> Dispatched[All2AllVMetadata]:
            arrivals = outgoing.like(unpack_rows(arriving.wait(), outgoing.tensors()))
            # Each rank's rows arrive sorted by slot, so the counts alone give the slot of every row.
            slot_of_block = torch.arange(slots, device=arriving_RS.device).repeat(ranks)
            slot_N = slot_of_block.repeat_interleave(arriving_RS.view(-1), output_size=sum(received))
            rows, row_of_arrival = arrivals.permuted(operators, slot_N)
            batch = ExpertBatch(
                rows.rows_NH, arriving_RS.sum(dim=0), GroupListType.COUNTS, rows.scale_N, rows.weights_N
            )
            return Dispatched(batch, All2AllVMetadata(reduce, row_of_arrival, sent, received))

        return InFlight(arriving.wait, receive)

    def start_combine(self, rows: torch.Tensor, metadata: All2AllVMetadata) -> InFlight[torch.Tensor]:
        """Undo the second sort, and send each row back on its way."""
        returning_NH = self._operators.npu_moe_token_unpermute(rows, metadata.row_of_arrival)
        returned = self._group.start_all_to_all(returning_NH, metadata.received, metadata.sent)
        return InFlight(returned.wait, lambda: metadata.reduce(self._operators, returned.wait()))

    def _sorted_choices(
        self, request: DispatchRequest, weights_TK: torch.Tensor | None, physical_TK: torch.Tensor
    ) -> tuple[_Columns, torch.Tensor]:
        """A row for each choice in order of physical expert, and the row of each choice."""
        permute = self._operators.npu_moe_token_permute
        tokens_TH, scale_T = travelling_tokens(self._operators, request)
        rows_NH, row_of_choice = permute(tokens_TH, physical_TK)
        scale_N = weights_N = None
        if scale_T is not None:
            scale_N = permute(scale_T.unsqueeze(1), physical_TK)[0].squeeze(1)
        if weights_TK is not None:
            weights_N = permute(weights_TK.reshape(-1, 1), physical_TK.reshape(-1))[0].squeeze(1)
        return _Columns(rows_NH, scale_N, weights_N), row_of_choice
