"""Kernels over all layers of a window: steps summed into episodes, rank loads, and how much heat jumps."""

from __future__ import annotations

import numpy as np

from eplb_service.solver.jit import kernel
from eplb_service.solver.model import Float64, Int32, Int64

_BLOCK = 8
"""Steps whose loads are summed side by side: one SIMD register, or two."""


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
def _loads_of_block(
    heat_TLE: Float64 | Int64 | Int32,
    layer: int,
    first: int,
    phy2log_RS: Int32,
    share_P: Float64,
    loads_RB: Float64,
) -> None:
    """Fill in the ranks' loads in one layer and the block of steps from ``first`` on; steps past the end stay empty."""
    ranks, slots = phy2log_RS.shape
    experts = heat_TLE.shape[2]
    heat_EB = np.zeros((experts, _BLOCK))
    for b in range(min(_BLOCK, heat_TLE.shape[0] - first)):
        for e in range(experts):
            heat_EB[e, b] = heat_TLE[first + b, layer, e]
    slot = 0
    for r in range(ranks):
        for b in range(_BLOCK):
            loads_RB[r, b] = 0.0
        for s in range(slots):
            e = np.uint32(phy2log_RS[r, s])
            share = share_P[slot]
            slot += 1
            for b in range(_BLOCK):
                loads_RB[r, b] += heat_EB[e, b] * share


@kernel
def loads_of_ranks(heat_NLE: Float64 | Int64 | Int32, phy2log_LRS: Int32, share_LP: Float64) -> Float64:
    """Tokens that each rank receives, float64 ``[N, L, R]``.

    ``share_LP`` float64 ``[L, R*S]`` is the part of its expert's tokens that each slot receives.
    """
    layers, ranks, _ = phy2log_LRS.shape
    episodes = heat_NLE.shape[0]
    loads_NLR = np.empty((episodes, layers, ranks))
    loads_RB = np.empty((ranks, _BLOCK))
    for layer in range(layers):
        for first in range(0, episodes, _BLOCK):
            _loads_of_block(heat_NLE, layer, first, phy2log_LRS[layer], share_LP[layer], loads_RB)
            for b in range(min(_BLOCK, episodes - first)):
                for r in range(ranks):
                    loads_NLR[first + b, layer, r] = loads_RB[r, b]
    return loads_NLR


@kernel
def step_loads(
    heat_TLE: Float64 | Int64 | Int32, layer_K: Int64, phy2log_KRS: Int32, share_KP: Float64
) -> tuple[Float64, Float64, Float64]:
    """What ``loads_of_ranks`` gives, in short: a window has millions of loads, and deciding needs these of them alone.

    Parameters
    ----------
    heat_TLE
        ``[T, L, E]``, tokens of each expert.
    layer_K
        int64 ``[K]``, the layers asked for.
    phy2log_KRS, share_KP
        Of these layers: int32 ``[K, R, S]`` their placements, float64 ``[K, R*S]`` as ``loads_of_ranks`` takes it.

    Returns
    -------
    peak_TK, tokens_TK
        float64 ``[T, K]``, tokens of the rank that has most of them, and of all ranks.
    variance_K
        float64 ``[K]``, the ``volatility`` of the ranks' loads.
    """
    layers, ranks, _ = phy2log_KRS.shape
    steps = heat_TLE.shape[0]
    peak_TK, tokens_TK = np.empty((steps, layers)), np.empty((steps, layers))
    variance_K = np.zeros(layers)
    loads_RB = np.empty((ranks, _BLOCK))
    before_R = np.empty(ranks)
    for k in range(layers):
        pairs, squares = -1, 0.0
        for first in range(0, steps, _BLOCK):
            _loads_of_block(heat_TLE, layer_K[k], first, phy2log_KRS[k], share_KP[k], loads_RB)
            for b in range(min(_BLOCK, steps - first)):
                peak, tokens = 0.0, 0.0
                for r in range(ranks):
                    load = loads_RB[r, b]
                    tokens += load
                    peak = max(peak, load)
                peak_TK[first + b, k] = peak
                tokens_TK[first + b, k] = tokens
                if tokens <= 0:
                    continue
                pairs += 1
                scale = 1.0 / tokens
                for r in range(ranks):
                    share = loads_RB[r, b] * scale
                    if pairs > 0:
                        squares += (share - before_R[r]) * (share - before_R[r])
                    before_R[r] = share
        if pairs > 0:
            variance_K[k] = squares / (2.0 * pairs)
    return peak_TK, tokens_TK, variance_K


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
    variance_L = np.zeros(layers)
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
                variance_L[layer] += jump_E[e] / (2.0 * pairs * replicas_LE[layer, e])
    return variance_L
