"""Random numbers for kernels: one seed, one sequence, whatever thread runs it."""

from __future__ import annotations

import numpy as np

from eplb_service.solver.arrays import UInt64
from eplb_service.solver.jit import kernel


@kernel
def draw(state_1: UInt64, below: int) -> int:
    """The next number from 0 to ``below - 1``, at most 2**32 - 1; ``state_1`` (uint64 ``[1]``) moves on.

    References
    ----------
    G. Steele, D. Lea, C. Flood, *Fast Splittable Pseudorandom Number Generators*, 2014 (SplitMix64).
    """
    state_1[0] += np.uint64(0x9E3779B97F4A7C15)
    mixed = state_1[0]
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    # The upper half, as a fraction of ``below``: no division. Signed, or numba would go on counting in floats.
    drawn: int = np.int64(((mixed >> np.uint64(32)) * np.uint64(below)) >> np.uint64(32))
    return drawn
