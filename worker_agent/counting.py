"""Count and sort expert ids with tensor operators only, so that graphs can capture these steps."""

from __future__ import annotations

import torch


def count_ids(ids: torch.Tensor, bins: int) -> torch.Tensor:
    """Return the number of occurrences of each id ``0..bins-1``, int64 ``[bins]``."""
    flat_N = ids.reshape(-1)
    counts = torch.zeros(bins, dtype=torch.int64, device=ids.device)
    return counts.index_add_(0, flat_N, torch.ones(flat_N.shape, dtype=torch.int64, device=ids.device))


def sorted_positions(ids_N: torch.Tensor) -> torch.Tensor:
    """Return the position of each id in the stably sorted ids, int64 ``[N]``.

    Examples
    --------
    >>> sorted_positions(torch.tensor([2, 0, 2, 1]))
    tensor([2, 0, 3, 1])
    """
    order_N = ids_N.argsort(stable=True)
    position_N = torch.arange(ids_N.shape[0], device=ids_N.device)
    return torch.empty_like(position_N).scatter_(0, order_N, position_N)
