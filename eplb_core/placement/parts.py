"""Parts of a plan: consecutive layers that ranks transfer together and switch with one vote."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_MAX_LAYERS = 4
"""Staging holds at most the slots of this many layers."""


def staging_rows(slots: int, bytes_per_expert: int, max_bytes: int) -> int:
    """Return the number of experts that a rank's staging holds.

    Parameters
    ----------
    slots
        Slots of a rank in one layer.
    bytes_per_expert
        Size of an expert in one layer, in bytes.
    max_bytes
        Upper bound on the staging, in bytes. Staging never holds more than four layers' slots.

    Examples
    --------
    >>> staging_rows(slots=9, bytes_per_expert=44 << 20, max_bytes=512 << 20)
    11
    """
    return min(_MAX_LAYERS * slots, max_bytes // max(1, bytes_per_expert))


def part_end(moved_LC: npt.NDArray[np.integer], first: int, rows: int) -> int:
    """Return the end (exclusive) of the part that begins with layer ``first`` of a plan.

    The part includes layers as long as no rank receives or sends more than ``rows`` experts in total. Arrivals are
    limited by the staging. Sends are limited because one busy sender would keep all other ranks waiting. A part has at
    least one layer, even if that layer alone exceeds the limit. All ranks compute the same parts because the arguments
    are the same on all of them.

    Parameters
    ----------
    moved_LC
        Experts that move in each layer, in the plan's order, integers ``[layers, C]``: one column for the experts that
        each rank receives, and one for those that it sends.
    first
        Index of the part's first layer in that order.
    rows
        Experts that a rank's staging holds.

    Examples
    --------
    Of three layers on two ranks, the first two fit in staging for two experts. The third begins the next part:

    >>> moved_LC = np.array([[1, 0, 0, 1], [1, 1, 1, 1], [0, 2, 2, 0]])
    >>> part_end(moved_LC, 0, rows=2)
    2
    >>> part_end(moved_LC, 2, rows=2)
    3
    """
    total_C = np.array(moved_LC[first], dtype=np.int64)
    end = first + 1
    while end < len(moved_LC):
        total_C += moved_LC[end]
        if total_C.max() > rows:
            break
        end += 1
    return end
