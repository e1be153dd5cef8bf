"""How much experts' heat jumps from one episode to the next."""

from __future__ import annotations

import numpy as np

from eplb_service.solver.arrays import Float64, Int32
from eplb_service.solver.jit import kernel


@kernel
def unrest(heat_NLE: Float64, copies_LE: Int32) -> Float64:
    """Variance of the experts' jumps, each expert's split over its copies and summed over a layer; float64 ``[L]``.

    ``heat_NLE`` float64 ``[N, L, E]``, taken as parts of an episode's tokens; ``copies_LE`` int32 ``[L, E]``. Half the
    mean square of the differences between episodes in a row is the variance of what changes without memory. Episodes
    without tokens are passed over; 0 where fewer than two have any.

    References
    ----------
    J. von Neumann, *Distribution of the Ratio of the Mean Square Successive Difference to the Variance*, 1941.
    """
    episodes, layers, experts = heat_NLE.shape
    unrest_L = np.zeros(layers)
    for layer in range(layers):
        before_E = np.zeros(experts)
        jump_E = np.zeros(experts)
        pairs = -1
        for n in range(episodes):
            heat_E = heat_NLE[n, layer]
            tokens = heat_E.sum()
            if tokens <= 0:
                continue
            pairs += 1
            scale = 1.0 / tokens
            if pairs > 0:
                for e in range(experts):
                    jump = heat_E[e] * scale - before_E[e]
                    jump_E[e] += jump * jump
            for e in range(experts):
                before_E[e] = heat_E[e] * scale
        if pairs > 0:
            for e in range(experts):
                unrest_L[layer] += jump_E[e] / (2.0 * pairs * copies_LE[layer, e])
    return unrest_L
