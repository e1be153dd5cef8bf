"""Differences between two placements: layers that switch, and experts that ranks receive and send."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eplb_core.placement import Placement, with_entries
from eplb_core.planner.plan import Layout
from eplb_core.solver.topology import choose_senders


def arrivals(before_LRS: npt.NDArray[np.int32], after_LRS: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """Return how many experts each rank must receive because it did not hold them, int64 ``[L, R]``.

    Slots may be empty (-1). A rank may hold an expert in two slots; the second one needs no transfer.
    """
    known_LRSS = after_LRS[..., :, None] == before_LRS[..., None, :]
    arriving: npt.NDArray[np.int64] = ((after_LRS >= 0) & ~known_LRSS.any(axis=3)).sum(axis=2)
    return arriving


def sent(before: Placement, after: Placement, nodes_R: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """Return how many experts each rank sends to ranks that do not hold them ``before``, int64 ``[L, R]``."""
    sent_LR = np.zeros((before.layers, before.ranks), dtype=np.int64)
    for sent_R, before_RS, after_RS in zip(sent_LR, before.phy2log_LRS, after.phy2log_LRS, strict=True):
        moves_M5 = choose_senders(before_RS, after_RS, nodes_R)
        travels_M = (before_RS[moves_M5[:, 2]] != moves_M5[:, 4:]).all(axis=1)
        sent_R += np.bincount(moves_M5[travels_M, 0], minlength=before.ranks)
    return sent_LR


def for_each_layer(
    moved_LR: npt.NDArray[np.int64], each_L: npt.NDArray[np.int64]
) -> list[npt.NDArray[np.int64]]:
    """Repeat each row for all layers that it represents, rotated so that their busiest ranks differ."""
    each = zip(moved_LR, each_L, strict=True)
    return [np.roll(moved_R, turn) for moved_R, count in each for turn in range(count)]


def switched(before: Layout, after: Layout) -> npt.NDArray[np.bool_]:
    """Return a mask of the layers whose placements differ, bool ``[L]``."""
    switched_L: npt.NDArray[np.bool_] = (before.placement.phy2log_LRS != after.placement.phy2log_LRS).any(
        axis=(1, 2)
    )
    return switched_L


def tables_differ(one_RLE: npt.NDArray[np.int32], other_RLE: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    """Return a mask of the layers whose tables differ, bool ``[L]``; an external policy may change their width."""
    one = with_entries(one_RLE, 3)
    other = with_entries(other_RLE, 3)
    if one.shape != other.shape:
        return np.ones(one.shape[1], dtype=np.bool_)
    differ_L: npt.NDArray[np.bool_] = (one != other).any(axis=(0, 2, 3))
    return differ_L
