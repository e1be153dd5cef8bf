"""Differences between two layouts: layers that change, and numbers of experts that ranks receive and send."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eplb_core.placement import Placement, with_entries
from eplb_core.planner.plan import Layout
from eplb_core.solver.topology import choose_senders


def arrivals(before_LRS: npt.NDArray[np.int32], after_LRS: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """Return the number of experts that each rank must receive, int64 ``[L, R]``.

    An empty slot has the value -1. A second slot for an expert that is already on the rank needs no transfer.

    Examples
    --------
    Rank 0 receives expert 2 and rank 1 receives expert 0. Experts 1 and 3 only change their slots:

    >>> arrivals(np.array([[[0, 1], [2, 3]]]), np.array([[[1, 2], [3, 0]]])).tolist()
    [[1, 1]]
    """
    is_held_LRSS = after_LRS[..., :, None] == before_LRS[..., None, :]
    arriving_LR: npt.NDArray[np.int64] = ((after_LRS >= 0) & ~is_held_LRSS.any(axis=3)).sum(axis=2)
    return arriving_LR


def sent(before: Placement, after: Placement, nodes_R: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """Return the number of experts that each rank sends to other ranks, int64 ``[L, R]``.

    Parameters
    ----------
    before
        Current placement.
    after
        New placement.
    nodes_R
        int32 ``[R]``, node of each rank.
    """
    sent_LR = np.zeros((before.layers, before.ranks), dtype=np.int64)
    for sent_R, before_RS, after_RS in zip(sent_LR, before.phy2log_LRS, after.phy2log_LRS, strict=True):
        moves_M5 = choose_senders(before_RS, after_RS, nodes_R)
        # A rank that already has the expert in a different slot copies it locally.
        is_sent_M = (before_RS[moves_M5[:, 2]] != moves_M5[:, 4:]).all(axis=1)
        sent_R += np.bincount(moves_M5[is_sent_M, 0], minlength=before.ranks)
    return sent_LR


def repeat_layers(
    moved_LR: npt.NDArray[np.int64], each_L: npt.NDArray[np.int64]
) -> list[npt.NDArray[np.int64]]:
    """Repeat the row of each recorded layer for the ``each_L`` model layers that it represents.

    The repeated rows are rotated, so that the layers do not all have the same busiest rank.

    Examples
    --------
    >>> rows = repeat_layers(np.array([[5, 0, 1]]), each_L=np.array([2]))
    >>> [row.tolist() for row in rows]
    [[5, 0, 1], [1, 5, 0]]
    """
    rows = []
    for moved_R, count in zip(moved_LR, each_L, strict=True):
        rows += [np.roll(moved_R, shift) for shift in range(count)]
    return rows


def switched(before: Layout, after: Layout) -> npt.NDArray[np.bool_]:
    """Return a mask of the layers whose placements differ, bool ``[L]``."""
    before_LRS = before.placement.phy2log_LRS
    switched_L: npt.NDArray[np.bool_] = (before_LRS != after.placement.phy2log_LRS).any(axis=(1, 2))
    return switched_L


def tables_differ(
    before_RLE: npt.NDArray[np.int32], after_RLE: npt.NDArray[np.int32]
) -> npt.NDArray[np.bool_]:
    """Return a mask of the layers whose tables differ, bool ``[L]``.

    All layers differ if the number of entries per expert differs, which an external policy may change.
    """
    before_RLED = with_entries(before_RLE, 3)
    after_RLED = with_entries(after_RLE, 3)
    if before_RLED.shape != after_RLED.shape:
        return np.ones(before_RLED.shape[1], dtype=np.bool_)
    differ_L: npt.NDArray[np.bool_] = (before_RLED != after_RLED).any(axis=(0, 2, 3))
    return differ_L
