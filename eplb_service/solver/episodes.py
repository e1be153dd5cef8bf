"""Sums the steps of a window into episodes, in one pass over the heat."""

from __future__ import annotations

import numpy as np

from eplb_service.solver.arrays import Float64, Int32, Int64
from eplb_service.solver.jit import kernel


@kernel
def sum_episodes(heat_TLE: Float64 | Int64 | Int32, episodes: int) -> Float64:
    """Sum consecutive steps into ``episodes`` (at most one each step) of nearly equal length, float64 ``[N, L, E]``."""
    steps, layers, experts = heat_TLE.shape
    heat_NLE = np.zeros((episodes, layers, experts))
    for n in range(episodes):
        for t in range(n * steps // episodes, (n + 1) * steps // episodes):
            for layer in range(layers):
                for e in range(experts):
                    heat_NLE[n, layer, e] += heat_TLE[t, layer, e]
    return heat_NLE
