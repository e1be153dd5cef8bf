"""Sorting by heat: numba's own argsort takes longer to compile than all else that the solver does with it."""

from __future__ import annotations

import numpy as np

from eplb_service.solver.arrays import Float32, Int64
from eplb_service.solver.jit import kernel


@kernel
def descending(values: Float32) -> Int64:
    """Indices of ``values`` from largest to smallest, equal ones in order; int64. A bottom-up merge sort."""
    size = values.shape[0]
    order = np.arange(size)
    merged = np.empty_like(order)
    width = 1
    while width < size:
        for first in range(0, size, 2 * width):
            middle, last = min(first + width, size), min(first + 2 * width, size)
            left, right = first, middle
            for at in range(first, last):
                if left < middle and (right == last or values[order[left]] >= values[order[right]]):
                    merged[at] = order[left]
                    left += 1
                else:
                    merged[at] = order[right]
                    right += 1
        order, merged = merged, order
        width *= 2
    return order
