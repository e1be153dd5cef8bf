"""Search objective: the hottest rank's risk, which is mean + z*std of the rank's load over the episodes.

This is the second of FlashLB's three ideas. The heat of an episode is scaled to a mean rank load of 1, so a layer's
risk reads as a peak-to-average ratio (PAR). The objective needs only the mean heat of each expert and the covariance of
the experts, so judging a candidate costs the same for any number of episodes.

A search that lowers only the maximum leaves many ranks just below it, and one of these exceeds it in the next window.
The local search therefore lowers a smooth maximum, to which each rank contributes a *pressure*. For a rank with risk x,
the pressure is ((x - base) / (peak - base))**8 if x is above the base, and 0 otherwise.

This differs from FlashLB in two ways. First, z is not a constant: the planner computes it from the number of ranks, as
the expected maximum of that many standard normal values (Blom's formula). Second, the mean may give more weight to
recent episodes or exclude bursts (``window.Forecast``).

The solver does not report the objective. It reports the realised PAR, which is the hottest rank's load averaged over
the episodes.

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
"""Minimum PAR reduction that counts as progress; smaller ones are treated as rounding errors."""
_BELOW_MEAN = 12.0
"""Distance of the base below the mean risk, as a multiple of the peak's distance above it.

With a larger distance, the ranks just below the hottest one carry more weight, and the gain from a few moves lasts
longer if heat drifts. The distance and the exponent 8 were tuned by hand in closed-loop runs with 256 experts on 32
ranks x 9 slots. In the runs described at ``swaps.MIN_RELIEF``, distances of 4 and 30 raise the realised PAR on drifting
heat by 1.3 % and 1.8 %, with 1.7 and 1.5 times as many moves.
"""
_TOP = 3
"""Number of hottest ranks stored per episode. A swap changes the loads of two ranks, so one of the three is always the
hottest of the unchanged ranks."""


@kernel
def risk(load: float, variance: float, z: float) -> float:
    """Return mean + z*std of a load. A variance that is negative because of rounding is treated as zero."""
    value: float = load + z * np.sqrt(max(variance, np.float32(0.0)))
    return value


@kernel
def expert_heat(heat: Heat, z: float) -> Float32:
    """Return mean + z*std of each expert's heat, float32 ``[E]``."""
    heat_E = np.empty_like(heat.mean_E)
    for e in range(heat_E.shape[0]):
        heat_E[e] = risk(heat.mean_E[e], heat.gram_EE[e, e], z)
    return heat_E


@kernel
def max_rank_loads(scaled_EN: Float32, phy2log_RS: Int32, weight_RS: Float32) -> Float32:
    """Return the load of the hottest rank in each episode, float32 ``[N]``.

    Parameters
    ----------
    scaled_EN
        float32 ``[E, N]``, normalised heat.
    phy2log_RS
        int32 ``[R, S]``, a complete placement.
    weight_RS
        float32 ``[R, S]``, fraction of its expert's tokens that each slot receives.
    """
    load_RN = loads_in_episodes(phy2log_RS, weight_RS, scaled_EN)
    peak_N = np.zeros(load_RN.shape[1], dtype=np.float32)
    for r in range(load_RN.shape[0]):
        for n in range(peak_N.shape[0]):
            peak_N[n] = max(peak_N[n], load_RN[r, n])
    return peak_N


@kernel
def mean_peak(peak_N: Float32, share_N: Float32) -> float:
    """Return the PAR: the weighted mean of the episodes' peak loads, or 1.0 if all weights are zero."""
    total = 0.0
    weight = 0.0
    for n in range(share_N.shape[0]):
        total += np.float64(peak_N[n] * share_N[n])
        weight += share_N[n]
    return total if weight > 0 else 1.0


def mean_of_max(scaled_EN: Float32, share_N: Float32, phy2log_RS: Int32, weight_RS: Float32) -> float:
    """Return the PAR of a placement: the weighted mean of the hottest rank's load, or 1.0 if there are no tokens.

    Parameters
    ----------
    scaled_EN
        float32 ``[E, N]``, normalised heat.
    share_N
        float32 ``[N]``, weights of the episodes.
    phy2log_RS
        int32 ``[R, S]``, a complete placement.
    weight_RS
        float32 ``[R, S]``, fraction of its expert's tokens that each slot receives.

    Examples
    --------
    Expert 0 has a replica on both ranks. Over the two episodes together, both ranks receive the same load. In each
    single episode, however, one of them receives 25 % more than the mean:

    >>> scaled_EN = np.array([[1.5, 0.5], [0.5, 0.5], [0.0, 1.0]], dtype=np.float32)
    >>> phy2log_RS = np.array([[0, 1], [0, 2]], dtype=np.int32)
    >>> weight_RS = np.array([[0.5, 1.0], [0.5, 1.0]], dtype=np.float32)
    >>> loads_in_episodes(phy2log_RS, weight_RS, scaled_EN).tolist()
    [[1.25, 0.75], [0.75, 1.25]]
    >>> mean_of_max(scaled_EN, np.full(2, 0.5, dtype=np.float32), phy2log_RS, weight_RS)
    1.25
    """
    return mean_peak(max_rank_loads(scaled_EN, phy2log_RS, weight_RS), share_N)


@kernel
def loads_in_episodes(phy2log_RS: Int32, share_RS: Float32, scaled_EN: Float32) -> Float32:
    """Return the load of each rank in each episode, float32 ``[R, N]``.

    Parameters
    ----------
    phy2log_RS
        int32 ``[R, S]``, a complete placement.
    share_RS
        float32 ``[R, S]``, fraction of its expert's tokens that each slot receives.
    scaled_EN
        float32 ``[E, N]``, normalised heat.
    """
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
    """Pressures of all ranks, and the scale on which they are measured."""

    base: float
    """Risk at which the pressure is 0."""
    scale: float
    """1 / (peak - base)."""
    pressure_R: Float32
    """float32 ``[R]``, pressure of each rank: 1 for the hottest rank, 0 at or below the base."""
    z: float
    """Weight of the standard deviation in the risks."""


@kernel
def smooth_term(x: float, base: float, scale: float) -> float:
    """Return the pressure of a rank with risk ``x`` on the scale of a ``SmoothMax``."""
    relative = max((x - base) * scale, np.float32(0.0))
    squared = relative * relative
    fourth = squared * squared
    pressure: float = fourth * fourth
    return pressure


@kernel
def smooth_max_of(load_R: Float32, variance_R: Float32, z: float) -> SmoothMax:
    """Return the ranks' pressures, on the scale that their current risks define.

    Parameters
    ----------
    load_R
        float32 ``[R]``, mean load of each rank.
    variance_R
        float32 ``[R]``, variance of each rank's load.
    z
        Weight of the standard deviation.
    """
    ranks = load_R.shape[0]
    risk_R = np.empty(ranks, dtype=np.float32)
    for r in range(ranks):
        risk_R[r] = risk(load_R[r], variance_R[r], z)
    peak = risk_R[0]
    total = np.float32(0.0)
    for r in range(ranks):
        peak = max(peak, risk_R[r])
        total += risk_R[r]
    mean = total / np.float32(ranks)
    base = np.float32(mean - np.float32(_BELOW_MEAN) * (peak - mean))
    scale = np.float32(1.0) / max(peak - base, np.float32(1e-6))
    pressure_R = np.empty(ranks, dtype=np.float32)
    for r in range(ranks):
        pressure_R[r] = smooth_term(risk_R[r], base, scale)
    return SmoothMax(base, scale, pressure_R, z)


@kernel
def hottest_of(smooth_max: SmoothMax) -> int:
    """Return the rank with the highest risk."""
    hot = 0
    for r in range(smooth_max.pressure_R.shape[0]):
        if smooth_max.pressure_R[r] > smooth_max.pressure_R[hot]:
            hot = r
    return hot


@part
def smooth_peak(smooth_max: SmoothMax) -> float:
    """Return the smooth maximum of the risks: the base plus the 8-norm of the risks' excess over it."""
    total = np.float32(0.0)
    for r in range(smooth_max.pressure_R.shape[0]):
        total += smooth_max.pressure_R[r]
    peak: float = smooth_max.base + total**0.125 / smooth_max.scale
    return peak


class TopRanks(NamedTuple):
    """Rank loads per episode, with the three hottest ranks of each episode. All arrays are updated in place."""

    load_RN: Float32
    """float32 ``[R, N]``, load of each rank in each episode."""
    load_NR: Float32
    """float32 ``[N, R]``, the transpose of ``load_RN``, in which each episode is contiguous."""
    rank_KN: Int32
    """int32 ``[3, N]``, the hottest ranks of each episode, hottest first. If the layer has fewer than three ranks, the
    unused entries are ``R``."""
    peak_KN: Float32
    """float32 ``[3, N]``, loads of the ranks in ``rank_KN``. Unused entries are 0."""


@kernel
def top_ranks_of(load_RN: Float32) -> TopRanks:
    """Return the ``TopRanks`` for rank loads, float32 ``[R, N]``. The result keeps a reference to this array."""
    ranks, episodes = load_RN.shape
    load_NR = np.empty((episodes, ranks), dtype=np.float32)
    for r in range(ranks):
        for n in range(episodes):
            load_NR[n, r] = load_RN[r, n]
    rank_KN = np.empty((_TOP, episodes), dtype=np.int32)
    peak_KN = np.empty((_TOP, episodes), dtype=np.float32)
    for n in range(episodes):
        _find_top_ranks(load_NR, rank_KN, peak_KN, n)
    return TopRanks(load_RN, load_NR, rank_KN, peak_KN)


@kernel
def _find_top_ranks(load_NR: Float32, rank_KN: Int32, peak_KN: Float32, n: int) -> None:
    """Store the three hottest ranks of episode ``n``. If ranks are equally hot, the lowest rank comes first."""
    ranks = load_NR.shape[1]
    first = ranks
    second = ranks
    third = ranks
    first_load = np.float32(-1.0)
    second_load = np.float32(-1.0)
    third_load = np.float32(-1.0)
    for r in range(ranks):
        load = load_NR[n, r]
        if load <= third_load:
            continue
        if load <= second_load:
            third = r
            third_load = load
        elif load <= first_load:
            third = second
            third_load = second_load
            second = r
            second_load = load
        else:
            third = second
            third_load = second_load
            second = first
            second_load = first_load
            first = r
            first_load = load
    zero = np.float32(0.0)
    rank_KN[0, n] = first
    rank_KN[1, n] = second
    rank_KN[2, n] = third
    peak_KN[0, n] = max(first_load, zero)
    peak_KN[1, n] = max(second_load, zero)
    peak_KN[2, n] = max(third_load, zero)


@kernel
def update_loads(top: TopRanks, rank_K: Int32, count: int, changed_R1: Bool, changed_RN: Float32) -> None:
    """Replace the loads of some ranks and update the hottest ranks of each episode.

    Parameters
    ----------
    top
        Loads to update in place.
    rank_K
        int32 ``[R]``; its first ``count`` entries are the changed ranks.
    count
        Number of changed ranks.
    changed_R1
        bool ``[R + 1]``, True for the changed ranks. The last entry is False.
    changed_RN
        float32 ``[R, N]``, new loads of the changed ranks. The other rows are ignored.
    """
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
            _find_top_ranks(load_NR, rank_KN, peak_KN, n)


@kernel
def peak_of_two_changed(
    top: TopRanks, share_N: Float32, rank_a: int, rank_b: int, load_a_N: Float32, load_b_N: Float32
) -> float:
    """Return the PAR after two ranks' loads change: the weighted mean of the episodes' peak loads.

    Parameters
    ----------
    top
        Loads before the change.
    share_N
        float32 ``[N]``, weights of the episodes.
    rank_a
        First changed rank.
    rank_b
        Second changed rank.
    load_a_N
        float32 ``[N]``, new loads of ``rank_a``.
    load_b_N
        float32 ``[N]``, new loads of ``rank_b``.
    """
    rank_KN = top.rank_KN
    peak_KN = top.peak_KN
    total = np.float32(0.0)
    for n in range(share_N.shape[0]):
        unchanged_peak = peak_KN[2, n]
        if rank_KN[1, n] != rank_a and rank_KN[1, n] != rank_b:
            unchanged_peak = peak_KN[1, n]
        if rank_KN[0, n] != rank_a and rank_KN[0, n] != rank_b:
            unchanged_peak = peak_KN[0, n]
        total += share_N[n] * max(unchanged_peak, load_a_N[n], load_b_N[n])
    mean: float = total
    return mean
