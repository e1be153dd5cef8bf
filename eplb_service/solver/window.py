"""Kernels over all layers of a window: steps summed into episodes, rank loads, and how much heat jumps."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from eplb_service.solver.jit import kernel, part
from eplb_service.solver.model import Float64, Int32, Int64

_BLOCK = 8
"""Steps whose loads are summed side by side: one SIMD register, or two."""


@kernel
def sum_episodes(heat_TLE: Float64 | Int64 | Int32, layer_K: Int64, episodes: int) -> Float64:
    """Sum consecutive steps into ``episodes`` (at most one each step) of nearly equal length.

    ``layer_K`` int64 ``[K]`` are the layers asked for; float64 ``[K, N, E]``.
    """
    steps, _, experts = heat_TLE.shape
    heat_KNE = np.zeros((layer_K.shape[0], episodes, experts))
    for k in range(layer_K.shape[0]):
        for n in range(episodes):
            for t in range(n * steps // episodes, (n + 1) * steps // episodes):
                for e in range(experts):
                    heat_KNE[k, n, e] += heat_TLE[t, layer_K[k], e]
    return heat_KNE


@part
def _fill_block(heat_TLE: Float64 | Int64 | Int32, layer: int, first: int, heat_EB: Float64) -> None:
    """Copy one layer's block of steps from ``first`` on; steps past the end stay empty."""
    experts, steps = heat_TLE.shape[2], heat_TLE.shape[0] - first
    if steps < _BLOCK:
        for e in range(experts):
            for b in range(_BLOCK):
                heat_EB[e, b] = heat_TLE[first + b, layer, e] if b < steps else 0.0
        return
    # Written out, so that the compiler stores eight steps at once: a loop over them takes twice as long.
    a_E, b_E = heat_TLE[first, layer], heat_TLE[first + 1, layer]
    c_E, d_E = heat_TLE[first + 2, layer], heat_TLE[first + 3, layer]
    e_E, f_E = heat_TLE[first + 4, layer], heat_TLE[first + 5, layer]
    g_E, h_E = heat_TLE[first + 6, layer], heat_TLE[first + 7, layer]
    for e in range(experts):
        heat_EB[e, 0] = a_E[e]
        heat_EB[e, 1] = b_E[e]
        heat_EB[e, 2] = c_E[e]
        heat_EB[e, 3] = d_E[e]
        heat_EB[e, 4] = e_E[e]
        heat_EB[e, 5] = f_E[e]
        heat_EB[e, 6] = g_E[e]
        heat_EB[e, 7] = h_E[e]


@part
def _loads_of_block(heat_EB: Float64, phy2log_RS: Int32, share_P: Float64, loads_RB: Float64) -> None:
    """Fill in the ranks' loads in a block of steps."""
    ranks, slots = phy2log_RS.shape
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
    episodes, _, experts = heat_NLE.shape
    loads_NLR = np.empty((episodes, layers, ranks))
    heat_EB, loads_RB = np.empty((experts, _BLOCK)), np.empty((ranks, _BLOCK))
    for layer in range(layers):
        for first in range(0, episodes, _BLOCK):
            _fill_block(heat_NLE, layer, first, heat_EB)
            _loads_of_block(heat_EB, phy2log_LRS[layer], share_LP[layer], loads_RB)
            for b in range(min(_BLOCK, episodes - first)):
                for r in range(ranks):
                    loads_NLR[first + b, layer, r] = loads_RB[r, b]
    return loads_NLR


class Served(NamedTuple):
    """What ``loads_of_ranks`` gives, in short: a window has millions of loads, and deciding needs these of them alone.

    Variances are those of jumps: half the mean square of the differences between the parts of the tokens in two steps
    or episodes in a row, which is the variance of what changes without memory; those without tokens are passed over,
    and the variance is 0 where fewer than two have any.

    References
    ----------
    J. von Neumann, *Distribution of the Ratio of the Mean Square Successive Difference to the Variance*, 1941.
    """

    peak_TK: Float64
    """float64 ``[T, K]``, tokens of the rank that has most of them."""
    tokens_TK: Float64
    """float64 ``[T, K]``, tokens of all ranks."""
    variance_K: Float64
    """float64 ``[K]``, of the ranks' jumps from step to step, summed over the ranks."""
    loads_NKR: Float64
    """float64 ``[N, K, R]``, the ranks' loads in each episode."""
    rank_variance_K: Float64
    """float64 ``[K]``, of the ranks' jumps from episode to episode, summed over the ranks."""
    expert_variance_K: Float64
    """float64 ``[K]``, of the experts' jumps from episode to episode, each split over its replicas, and summed."""


@kernel
def served_window(
    heat_TLE: Float64 | Int64 | Int32, layer_K: Int64, phy2log_KRS: Int32, share_KP: Float64, episodes: int
) -> Served:
    """Go through a window once.

    Parameters
    ----------
    heat_TLE
        ``[T, L, E]``, tokens of each expert.
    layer_K
        int64 ``[K]``, the layers asked for.
    phy2log_KRS, share_KP
        Of these layers: int32 ``[K, R, S]`` their placements, float64 ``[K, R*S]`` as ``loads_of_ranks`` takes it.
    episodes
        N, as for ``sum_episodes``; 0 where episodes are not asked for.
    """
    layers, ranks, _ = phy2log_KRS.shape
    steps, _, experts = heat_TLE.shape
    peak_TK, tokens_TK = np.empty((steps, layers)), np.empty((steps, layers))
    loads_NKR = np.zeros((episodes, layers, ranks))
    variance_3K = np.zeros((3, layers))
    heat_EB, loads_RB = np.empty((experts, _BLOCK)), np.empty((ranks, _BLOCK))
    peak_B, load_R = np.empty(_BLOCK), np.empty(ranks)
    before_R, jump_R = np.empty(ranks), np.empty(ranks)
    for k in range(layers):
        busy, n = _start_jumps(before_R, jump_R), 0
        for first in range(0, steps, _BLOCK):
            _fill_block(heat_TLE, layer_K[k], first, heat_EB)
            _loads_of_block(heat_EB, phy2log_KRS[k], share_KP[k], loads_RB)
            for b in range(_BLOCK):
                peak_B[b] = 0.0
            for r in range(ranks):
                for b in range(_BLOCK):
                    peak_B[b] = max(peak_B[b], loads_RB[r, b])
            for b in range(min(_BLOCK, steps - first)):
                tokens = 0.0
                for r in range(ranks):
                    load_R[r] = loads_RB[r, b]
                    tokens += load_R[r]
                peak_TK[first + b, k] = peak_B[b]
                tokens_TK[first + b, k] = tokens
                busy += _add_jumps(load_R, tokens, before_R, jump_R)
                if episodes > 0:
                    for r in range(ranks):
                        loads_NKR[n, k, r] += load_R[r]
                    n += first + b + 1 == (n + 1) * steps // episodes
        variance_3K[0, k] = jump_R.sum() / (2.0 * max(busy - 1, 1))
        if episodes > 1:
            busy = _start_jumps(before_R, jump_R)
            for n in range(episodes):
                busy += _add_jumps(loads_NKR[n, k], loads_NKR[n, k].sum(), before_R, jump_R)
            variance_3K[1, k] = jump_R.sum() / (2.0 * max(busy - 1, 1))
            variance_3K[2, k] = _variance_of_experts(heat_TLE, layer_K[k], phy2log_KRS[k], episodes)
    return Served(peak_TK, tokens_TK, variance_3K[0], loads_NKR, variance_3K[1], variance_3K[2])


@part
def _start_jumps(before_E: Float64, jump_E: Float64) -> int:
    """Make ready for ``_add_jumps``; 0, the times so far that there were tokens."""
    before_E[0] = -1.0
    for e in range(jump_E.shape[0]):
        jump_E[e] = 0.0
    return 0


@part
def _add_jumps(heat_E: Float64, tokens: float, before_E: Float64, jump_E: Float64) -> int:
    """Add to ``jump_E`` the squared jumps since ``before_E``, parts of the tokens which become those of ``heat_E``.

    ``tokens`` is the sum of ``heat_E``. Returns how many times it was that there were tokens: 1, or 0.
    """
    if tokens <= 0:
        return 0
    scale, first = 1.0 / tokens, before_E[0] < 0
    for e in range(heat_E.shape[0]):
        share = heat_E[e] * scale
        jump = 0.0 if first else share - before_E[e]
        jump_E[e] += jump * jump
        before_E[e] = share
    return 1


@part
def _variance_of_experts(
    heat_TLE: Float64 | Int64 | Int32, layer: int, phy2log_RS: Int32, episodes: int
) -> float:
    """One layer's ``Served.expert_variance_K``."""
    steps, _, experts = heat_TLE.shape
    replicas_E, heat_E = np.zeros(experts), np.empty(experts)
    for r in range(phy2log_RS.shape[0]):
        for s in range(phy2log_RS.shape[1]):
            replicas_E[phy2log_RS[r, s]] += 1.0
    before_E, jump_E = np.empty(experts), np.empty(experts)
    busy = _start_jumps(before_E, jump_E)
    for n in range(episodes):
        for e in range(experts):
            heat_E[e] = 0.0
        for t in range(n * steps // episodes, (n + 1) * steps // episodes):
            for e in range(experts):
                heat_E[e] += heat_TLE[t, layer, e]
        busy += _add_jumps(heat_E, heat_E.sum(), before_E, jump_E)
    variance = 0.0
    for e in range(experts):
        variance += jump_E[e] / replicas_E[e]
    return variance / (2.0 * max(busy - 1, 1))
