"""Parts of a plan: consecutive layers that ranks transfer together and switch with one vote."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_MAX_LAYERS = 4
"""Maximum size of a staging buffer, as a multiple of a rank's slots in one layer."""


def staging_rows(slots: int, bytes_per_expert: int, max_bytes: int) -> int:
    """Return the number of experts that fit in a rank's staging buffer.

    Parameters
    ----------
    slots
        Slots of a rank in one layer.
    bytes_per_expert
        Size of an expert in one layer, in bytes.
    max_bytes
        Upper bound on the size of the staging buffer, in bytes. The buffer is never larger than four layers' slots.

    Examples
    --------
    >>> staging_rows(slots=9, bytes_per_expert=44 << 20, max_bytes=512 << 20)
    11
    """
    return min(_MAX_LAYERS * slots, max_bytes // max(1, bytes_per_expert))


def part_end(moved_LC: npt.NDArray[np.integer], first: int, rows: int) -> int:
    """Return the end (exclusive) of the part that begins with layer ``first`` of a plan.

    Layers are added to the part as long as no rank receives or sends more than ``rows`` experts in total. The experts
    that a rank receives must fit in its staging buffer. The experts that it sends are limited because one busy sender
    would keep all other ranks waiting. A part has at least one layer, even if that layer exceeds the limit. All ranks
    compute the same parts because they use the same arguments.

    Parameters
    ----------
    moved_LC
        Number of experts that move in each layer, in the plan's order, integers ``[layers, C]``. Each rank has one
        column for the experts that it receives and one for the experts that it sends.
    first
        Index of the part's first layer in that order.
    rows
        Number of experts that fit in a rank's staging buffer.

    Examples
    --------
    Three layers on two ranks, whose staging buffers have room for two experts. The first two layers form one part, and
    the third begins the next:

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
