"""The parts of a plan: consecutive layers that ranks transfer together and switch by one vote."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_MAX_LAYERS = 4
"""Staging is for this many layers whose slots all receive an expert, at most."""


def staging_rows(slots: int, bytes_per_expert: int, max_bytes: int) -> int:
    """Return the number of experts that the staging of a rank holds.

    Parameters
    ----------
    slots
        Slots of a rank in one layer.
    bytes_per_expert
        Size of an expert in one layer, in bytes.
    max_bytes
        Bound on the staging, in bytes. Whatever it is, staging is for at most four layers' slots.

    Examples
    --------
    >>> staging_rows(slots=9, bytes_per_expert=44 << 20, max_bytes=512 << 20)
    11
    """
    return min(_MAX_LAYERS * slots, max_bytes // max(1, bytes_per_expert))


def part_end(moved_LC: npt.NDArray[np.integer], first: int, rows: int) -> int:
    """Return the end (exclusive) of the part that begins with layer ``first`` of a plan.

    The part takes in layers while no rank receives, and none sends, more than ``rows`` experts in all of them together:
    the staging bounds what arrives, and one busy sender would keep all others waiting. A part has at least one layer,
    whatever that layer needs. All ranks compute the same parts, because all arguments are the same on them.

    Parameters
    ----------
    moved_LC
        Experts that move in each layer, in the plan's order, integers ``[layers, C]``: a column for what each rank
        receives, and one for what each rank sends.
    first
        Index of the part's first layer in that order.
    rows
        Experts that the staging of a rank holds.

    Examples
    --------
    Of three layers on two ranks, the first two fit a staging of two experts; the third begins the next part:

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
