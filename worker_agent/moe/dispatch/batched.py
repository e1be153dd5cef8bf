"""Any dispatcher's rows laid out in the batched format: a fixed number of rows for each slot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic

import torch

from worker_agent.moe.dispatch.interface import (
    Dispatched,
    DispatchRequest,
    InFlight,
    Metadata,
    TokenDispatcher,
    started_combine,
    started_dispatch,
)
from worker_agent.moe.expert_batch import ActivationFormat, ExpertBatch
from worker_agent.moe.operators import GroupListType


@dataclass(frozen=True)
class BatchedMetadata(Generic[Metadata]):
    """The place of each row of the standard format in the batch, and what the dispatcher within wants back."""

    place_N: torch.Tensor
    inner: Metadata


class BatchedDispatcher(Generic[Metadata]):
    """Rows ``[S, M, H]`` whose size no routing changes, as graphs and batched matrix products like them.

    M is R times ``max_rank_tokens``, all that can come to one slot. No rank may have more tokens, and no token may
    choose an expert twice: whoever calls sees to that.
    """

    format = ActivationFormat.BATCHED

    def __init__(
        self, inner: TokenDispatcher[Metadata], ranks: int, slots: int, max_rank_tokens: int
    ) -> None:
        self._inner = inner
        self._slots = slots
        self._max_tokens = ranks * max_rank_tokens
        self.brings_weights = inner.brings_weights

    def dispatch(self, request: DispatchRequest) -> Dispatched[BatchedMetadata[Metadata]]:
        """Dispatch, and put the rows of each slot behind one another, zeros after them."""
        return self.start_dispatch(request).receive()

    def combine(self, rows: torch.Tensor, metadata: BatchedMetadata[Metadata]) -> torch.Tensor:
        """Take the real rows out of ``[S, M, H]``, and combine them."""
        return self.start_combine(rows, metadata).receive()

    def start_dispatch(self, request: DispatchRequest) -> InFlight[Dispatched[BatchedMetadata[Metadata]]]:
        """As ``dispatch``, without waiting for the tokens where the dispatcher within can."""
        travelling = started_dispatch(self._inner, request)
        return InFlight(travelling.hook, lambda: self._laid_out(travelling.receive()))

    def start_combine(
        self, rows: torch.Tensor, metadata: BatchedMetadata[Metadata]
    ) -> InFlight[torch.Tensor]:
        """As ``combine``, without waiting for the outputs where the dispatcher within can."""
        place_N = metadata.place_N.clamp(max=self._slots * self._max_tokens - 1)
        return started_combine(self._inner, rows.flatten(0, 1)[place_N], metadata.inner)

    def _laid_out(self, arrived: Dispatched[Metadata]) -> Dispatched[BatchedMetadata[Metadata]]:
        batch = arrived.batch
        place_N = self._places(batch.counts_S, batch.rows.shape[0])

        def spread(rows: torch.Tensor) -> torch.Tensor:
            # The last row takes what belongs to no slot, and is dropped.
            flat = rows.new_zeros(self._slots * self._max_tokens + 1, *rows.shape[1:])
            flat.index_copy_(0, place_N, rows)
            return flat[:-1].view(self._slots, self._max_tokens, *rows.shape[1:])

        batched = ExpertBatch(
            spread(batch.rows),
            batch.counts_S,
            GroupListType.COUNTS,
            None if batch.scale is None else spread(batch.scale),
            None if batch.weights is None else spread(batch.weights),
            batch.idle_S,
        )
        return Dispatched(batched, BatchedMetadata(place_N, arrived.metadata))

    def _places(self, counts_S: torch.Tensor, rows: int) -> torch.Tensor:
        """The place of each row in the flattened batch, int64 ``[N]``; past its end for rows of no slot."""
        end_S = counts_S.cumsum(0)
        row_N = torch.arange(rows, device=counts_S.device)
        slot_N = torch.searchsorted(end_S, row_N, right=True)
        within_N = row_N - (end_S - counts_S)[slot_N.clamp(max=self._slots - 1)]
        return (slot_N * self._max_tokens + within_N).clamp(max=self._slots * self._max_tokens)


def batched(
    inner: TokenDispatcher[Any], ranks: int, slots: int, max_rank_tokens: int
) -> TokenDispatcher[Any]:
    """``inner`` in the batched format; ``ValueError`` where ``max_rank_tokens`` is not positive."""
    if max_rank_tokens < 1:
        raise ValueError(f"the batched format needs room for one token per rank, got {max_rank_tokens}")
    return BatchedDispatcher(inner, ranks, slots, max_rank_tokens)
