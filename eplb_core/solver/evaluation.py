"""Objective of the search: the hottest rank's mean + z*std over the episodes, the second of FlashLB's three ideas.

An episode's heat is scaled so that the mean rank load is 1; a layer's risk then reads as a peak-to-average ratio. All
that is needed of the episodes is each expert's mean and the experts' covariance, so the cost of a candidate does not
grow with their number. A search on the maximum alone leaves many ranks just below it, and the next window pushes one of
them over: so the local search lowers a smooth maximum, in which a rank's risk x counts ((x - base) / (peak - base))**8
where it lies above the base (its *smooth term*).

Ours departs from FlashLB in that z is no fixed number but where the hottest of so many ranks is expected (Blom's
formula, ``planner``), and in that the mean may lean to the newest episodes, or leave bursts out (``forecast``). What is
reported is the realised ratio, the mean over the episodes of the hottest rank's load, not the objective.

References
----------
vLLM-Ascend pull requests 3042 and 6477, *FlashLB algorithm*, https://github.com/vllm-project/vllm-ascend/pull/3042.
G. Blom, *Statistical Estimates and Transformed Beta-Variables*, 1958.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from eplb_core.solver.jit import kernel, part
from eplb_core.solver.model import Bool, Float32, Heat, Int32

MIN_GAIN = 1e-5
"""Peak-to-average ratio below which a change is rounding, not progress."""
_BELOW_MEAN = 12.0
"""The base lies this many times as far below the mean risk as the peak lies above it. The farther, the more the ranks
behind the hottest count, and the better what little is moved holds where heat drifts. It and the power 8 were chosen by
hand in closed loops of 256 experts on 32 ranks x 9 slots; in those of ``local_search.MIN_RELIEF`` 4 and 30 realise
1.3 and 1.8 % more on drift than 12, with 1.7 and 1.5 times the moves."""


@kernel
def risk(load: float, variance: float, z: float) -> float:
    """Mean + z*std of one load; rounding may have left the variance a hair below zero."""
    found: float = load + z * np.sqrt(max(variance, np.float32(0.0)))
    return found


@kernel
def expert_heat(heat: Heat, z: float) -> Float32:
    """Mean + z*std of each expert, float32 ``[E]``."""
    heat_E = np.empty_like(heat.mean_E)
    for e in range(heat_E.shape[0]):
        heat_E[e] = risk(heat.mean_E[e], heat.gram_EE[e, e], z)
    return heat_E


@kernel
def max_rank_loads(scaled_EN: Float32, phy2log_RS: Int32, weight_RS: Float32) -> Float32:
    """Load of the hottest rank in each episode, float32 ``[N]``.

    ``weight_RS`` is the part of its expert's tokens that each slot receives.
    """
    load_RN = loads_in_episodes(phy2log_RS, weight_RS, scaled_EN)
    peak_N = np.zeros(load_RN.shape[1], dtype=np.float32)
    for r in range(load_RN.shape[0]):
        for n in range(peak_N.shape[0]):
            peak_N[n] = max(peak_N[n], load_RN[r, n])
    return peak_N


@kernel
def mean_peak(peak_N: Float32, share_N: Float32) -> float:
    """Peak-to-average ratio of episodes whose hottest ranks have so much, by the episodes' weights; 1.0 without any."""
    found, weight = 0.0, 0.0
    for n in range(share_N.shape[0]):
        found += np.float64(peak_N[n] * share_N[n])
        weight += share_N[n]
    return found if weight > 0 else 1.0


def mean_of_max(scaled_EN: Float32, share_N: Float32, phy2log_RS: Int32, weight_RS: Float32) -> float:
    """Peak-to-average ratio: the hottest rank of each episode, averaged with the episodes' weights.

    ``weight_RS`` as for ``max_rank_loads``. 1.0 where there are no tokens.
    """
    return mean_peak(max_rank_loads(scaled_EN, phy2log_RS, weight_RS), share_N)


@kernel
def loads_in_episodes(phy2log_RS: Int32, share_RS: Float32, scaled_EN: Float32) -> Float32:
    """Load of each rank in each episode, float32 ``[R, N]``, where slots get ``share_RS`` of their experts' tokens."""
    ranks, slots = phy2log_RS.shape
    load_RN = np.zeros((ranks, scaled_EN.shape[1]), dtype=np.float32)
    for r in range(ranks):
        for s in range(slots):
            share = share_RS[r, s]
            expert_N = scaled_EN[phy2log_RS[r, s]]
            for n in range(expert_N.shape[0]):
                load_RN[r, n] += share * expert_N[n]
    return load_RN


class SmoothMax(NamedTuple):
    """Pressures of all ranks, and the scale that they are taken on."""

    base: float
    scale: float
    """1 / (peak - base)."""
    peak: float
    """The highest risk."""
    of_R: Float32
    """float32 ``[R]``; 1 for the hottest rank, 0 at the base."""


@kernel
def smooth_term(x: float, base: float, scale: float) -> float:
    """Pressure of one rank at risk ``x``."""
    relative = max((x - base) * scale, np.float32(0.0))
    squared = relative * relative
    fourth = squared * squared
    found: float = fourth * fourth
    return found


@kernel
def smooth_max_of(load_R: Float32, variance_R: Float32, z: float) -> SmoothMax:
    """Pressures on the scale of the ranks' risks now."""
    ranks = load_R.shape[0]
    risk_R = np.empty(ranks, dtype=np.float32)
    for r in range(ranks):
        risk_R[r] = risk(load_R[r], variance_R[r], z)
    peak, total = risk_R[0], np.float32(0.0)
    for r in range(ranks):
        peak = max(peak, risk_R[r])
        total += risk_R[r]
    mean = total / np.float32(ranks)
    base = np.float32(mean - np.float32(_BELOW_MEAN) * (peak - mean))
    scale = np.float32(1.0) / max(peak - base, np.float32(1e-6))
    of_R = np.empty(ranks, dtype=np.float32)
    for r in range(ranks):
        of_R[r] = smooth_term(risk_R[r], base, scale)
    return SmoothMax(base, scale, peak, of_R)


@kernel
def hottest_of(now: SmoothMax) -> int:
    """Return the rank with the highest risk."""
    hot = 0
    for r in range(now.of_R.shape[0]):
        if now.of_R[r] > now.of_R[hot]:
            hot = r
    return hot


@part
def smooth_peak(now: SmoothMax) -> float:
    """The smooth maximum, on the scale of risks: base + 8-norm of what lies above it."""
    total = np.float32(0.0)
    for r in range(now.of_R.shape[0]):
        total += now.of_R[r]
    found: float = now.base + total**0.125 / now.scale
    return found


_TOP = 3
"""Ranks kept of each episode: a move changes two, so that the third is the hottest of all others."""


class TopRanks(NamedTuple):
    """Rank loads per episode with their three largest; all arrays change in place."""

    load_RN: Float32
    """float32 ``[R, N]``."""
    load_NR: Float32
    """float32 ``[N, R]``, the same with a whole episode in a row."""
    rank_KN: Int32
    """int32 ``[3, N]``, the hottest ranks of each episode, hottest first; ``R`` where there are fewer ranks."""
    peak_KN: Float32
    """float32 ``[3, N]``, their loads; 0 where there are fewer ranks."""


@kernel
def top_ranks_of(load_RN: Float32) -> TopRanks:
    """``TopRanks`` of rank loads float32 ``[R, N]``, which become part of it."""
    ranks, episodes = load_RN.shape
    load_NR = np.empty((episodes, ranks), dtype=np.float32)
    for r in range(ranks):
        for n in range(episodes):
            load_NR[n, r] = load_RN[r, n]
    rank_KN = np.empty((_TOP, episodes), dtype=np.int32)
    peak_KN = np.empty((_TOP, episodes), dtype=np.float32)
    for n in range(episodes):
        _look(load_NR, rank_KN, peak_KN, n)
    return TopRanks(load_RN, load_NR, rank_KN, peak_KN)


@kernel
def _look(load_NR: Float32, rank_KN: Int32, peak_KN: Float32, n: int) -> None:
    """Find the three hottest ranks of one episode; of equally hot ones the first come first."""
    ranks = load_NR.shape[1]
    first = second = third = ranks
    most = more = much = np.float32(-1.0)
    for r in range(ranks):
        load = load_NR[n, r]
        if load <= much:
            continue
        if load <= more:
            third, much = r, load
        elif load <= most:
            second, third, more, much = r, second, load, more
        else:
            first, second, third, most, more, much = r, first, second, load, most, more
    zero = np.float32(0.0)
    rank_KN[0, n], rank_KN[1, n], rank_KN[2, n] = first, second, third
    peak_KN[0, n], peak_KN[1, n], peak_KN[2, n] = max(most, zero), max(more, zero), max(much, zero)


@kernel
def update_loads(top: TopRanks, rank_K: Int32, count: int, changed_R1: Bool, changed_RN: Float32) -> None:
    """Make the changed loads, given as for ``peak_of_changed``, those that count."""
    load_RN, load_NR, rank_KN, peak_KN = top
    for n in range(peak_KN.shape[1]):
        stale = changed_R1[rank_KN[0, n]] or changed_R1[rank_KN[1, n]] or changed_R1[rank_KN[2, n]]
        for k in range(count):
            rank = rank_K[k]
            load = changed_RN[rank, n]
            load_RN[rank, n] = load
            load_NR[n, rank] = load
            stale = stale or load > peak_KN[2, n]
        if stale:
            _look(load_NR, rank_KN, peak_KN, n)


@kernel
def peak_of_two_changed(
    top: TopRanks, share_N: Float32, one: int, other: int, one_N: Float32, other_N: Float32
) -> float:
    """Mean of the peaks of ``top``, by the weights ``share_N``, once two ranks have other loads.

    Rank ``one`` has ``one_N`` and rank ``other`` ``other_N``, float32 ``[N]`` both.
    """
    rank_KN, peak_KN = top.rank_KN, top.peak_KN
    total = np.float32(0.0)
    for n in range(share_N.shape[0]):
        rest = peak_KN[2, n]
        if rank_KN[1, n] != one and rank_KN[1, n] != other:
            rest = peak_KN[1, n]
        if rank_KN[0, n] != one and rank_KN[0, n] != other:
            rest = peak_KN[0, n]
        total += share_N[n] * max(rest, one_N[n], other_N[n])
    mean: float = total
    return mean
