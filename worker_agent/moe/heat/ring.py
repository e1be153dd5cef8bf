"""Heat counted on the device, one row of a ring per step, without waiting for the device."""

from __future__ import annotations

import torch


def count_ids(ids: torch.Tensor, bins: int) -> torch.Tensor:
    """How often each id ``0..bins-1`` occurs, int64 ``[bins]``."""
    flat_N = ids.reshape(-1)
    counts = torch.zeros(bins, dtype=torch.int64, device=ids.device)
    return counts.index_add_(0, flat_N, torch.ones(flat_N.shape, dtype=torch.int64, device=ids.device))


def write_row(ring_WX: torch.Tensor, counts_X: torch.Tensor, step: torch.Tensor) -> None:
    """Overwrite row ``step % W`` of a ring; ``step`` is an int64 scalar on the ring's device."""
    row = (step % ring_WX.shape[0]).reshape(1)
    ring_WX.index_copy_(0, row, counts_X.to(ring_WX.dtype).unsqueeze(0))
