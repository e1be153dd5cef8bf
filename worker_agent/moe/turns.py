"""Whose turn each choice is: what dealing tables and the stepwise split go by."""

from __future__ import annotations

import torch


def turns(ids_N: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
    """For each id how many of those before it are the same, int64 ``[N]``; ``counts_E``: how many there are of each."""
    order_N = ids_N.argsort(stable=True)
    first_E = counts_E.cumsum(0) - counts_E
    place_N = torch.arange(ids_N.shape[0], device=ids_N.device)
    turn_N = place_N - first_E.index_select(0, ids_N.index_select(0, order_N))
    return torch.empty_like(turn_N).scatter_(0, order_N, turn_N)
