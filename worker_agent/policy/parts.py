"""Heat of an engine's window as policy mode passes it to the planner."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch


def parts_of_window(window_TX: torch.Tensor, parts: int) -> torch.Tensor:
    """Return the sums over consecutive parts of a window's steps, oldest first, ``[N, ...]`` on the window's device.

    Parameters
    ----------
    window_TX
        Counts of each step, oldest first, ``[T, ...]``.
    parts
        Maximum number of parts. There are never more than T.

    Examples
    --------
    >>> parts_of_window(torch.tensor([[1], [2], [3], [4], [5]]), 2).tolist()
    [[6], [9]]
    """
    return torch.stack(
        [part.sum(dim=0) for part in torch.tensor_split(window_TX, min(parts, len(window_TX)))]
    )


def heat_of_slots(counts_NLP: torch.Tensor, phy2log_LP: torch.Tensor, experts: int) -> torch.Tensor:
    """Sum counts per slot into counts per expert, int64 ``[N, L, experts]``; empty slots (-1) are ignored.

    Examples
    --------
    Expert 1 is in two slots, and the third slot is empty:

    >>> heat_of_slots(torch.tensor([[[1, 2, 3, 4]]]), torch.tensor([[0, 1, -1, 1]]), 2).tolist()
    [[[1, 6]]]
    """
    slot_LP = phy2log_LP.long().masked_fill(phy2log_LP < 0, experts)
    heat_NLE = counts_NLP.new_zeros((*counts_NLP.shape[:2], experts + 1), dtype=torch.int64)
    heat_NLE.scatter_add_(2, slot_LP.expand_as(counts_NLP), counts_NLP.long())
    return heat_NLE[..., :experts].contiguous()


def without_copies(heat_NLE: npt.NDArray[Any], ranks: int) -> npt.NDArray[Any]:
    """Divide the counts by R if every rank counted all tokens, and return them unchanged otherwise.

    If every rank counts all tokens, vLLM's sum over the ranks is R times too large, so all counts are multiples of R.
    """
    return heat_NLE if (heat_NLE % ranks).any() else heat_NLE // ranks
