"""Kernels over all layers of a window: steps summed into episodes, rank loads, and how much experts' heat jumps."""

from __future__ import annotations

import numpy as np

from eplb_service.solver.jit import kernel
from eplb_service.solver.model import Float64, Int32, Int64


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


@kernel
def loads_of_ranks(heat_NLE: Float64 | Int64 | Int32, phy2log_LRS: Int32, share_LP: Float64) -> Float64:
    """Tokens that each rank receives, float64 ``[N, L, R]``.

    ``share_LP`` float64 ``[L, R*S]`` is the part of its expert's tokens that each slot receives.
    """
    layers, ranks, slots = phy2log_LRS.shape
    loads_NLR = np.empty((heat_NLE.shape[0], layers, ranks))
    for n in range(heat_NLE.shape[0]):
        for layer in range(layers):
            heat_E = heat_NLE[n, layer]
            slot = 0
            for r in range(ranks):
                load = 0.0
                for s in range(slots):
                    load += heat_E[np.uint32(phy2log_LRS[layer, r, s])] * share_LP[layer, slot]
                    slot += 1
                loads_NLR[n, layer, r] = load
    return loads_NLR


@kernel
def volatility(heat_NLE: Float64, replicas_LE: Int32) -> Float64:
    """Variance of the experts' jumps, each expert's split over its replicas and summed over a layer; float64 ``[L]``.

    ``heat_NLE`` float64 ``[N, L, E]``, taken as parts of an episode's tokens; ``replicas_LE`` int32 ``[L, E]``.
    Half the mean square of the differences between episodes in a row is the variance of what changes without memory.
    Episodes without tokens are passed over; 0 where fewer than two have any.

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
                unrest_L[layer] += jump_E[e] / (2.0 * pairs * replicas_LE[layer, e])
    return unrest_L
