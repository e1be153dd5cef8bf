"""Whose turn each choice is: what dealing tables and the stepwise split go by."""

from __future__ import annotations

import torch


def places(ids_N: torch.Tensor) -> torch.Tensor:
    """Where each id is when all are sorted, those that are the same in their order: int64 ``[N]``."""
    order_N = ids_N.argsort(stable=True)
    place_N = torch.arange(ids_N.shape[0], device=ids_N.device)
    return torch.empty_like(place_N).scatter_(0, order_N, place_N)


def turns(ids_N: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
    """For each id how many of those before it are the same, int64 ``[N]``; ``counts_E``: how many there are of each."""
    first_E = counts_E.cumsum(0) - counts_E
    return places(ids_N) - first_E.index_select(0, ids_N)
