"""Local search on the realised ratio itself: the hottest rank of each episode, averaged (mean of max).

Slower than the search on mean + z*std and a little better on the window seen: its second stage. The hottest ranks of
each episode are kept at hand, so a swap costs one pass over the episodes of its two ranks.
"""

from __future__ import annotations

import numpy as np

from eplb_service.solver.arrays import Bool, Float32, Int32
from eplb_service.solver.episode_loads import loads_in_episodes
from eplb_service.solver.jit import kernel
from eplb_service.solver.objective import SMALLEST_GAIN
from eplb_service.solver.peaks import Peaks, mean_peak, peaks_of, take


@kernel
def peak_search(
    phy2log_RS: Int32, share_RS: Float32, scaled_EN: Float32, share_N: Float32, patience: int, most_steps: int
) -> float:
    """Swap experts, shares and all, while that lowers the mean of the episodes' peaks; changes both arrays in place.

    Parameters
    ----------
    phy2log_RS, share_RS
        int32 and float32 ``[R, S]``: a complete placement, and the part of its expert's tokens that each slot gets.
    scaled_EN, share_N
        Normalised heat and the episodes' weights.
    patience
        Hot ranks in a row that no swap helps before the search ends.
    most_steps
        Bound on the swaps.

    Returns the peak-to-average ratio reached.
    """
    ranks = phy2log_RS.shape[0]
    if share_N.sum() <= 0:
        return 1.0
    peaks = peaks_of(loads_in_episodes(phy2log_RS, share_RS, scaled_EN))
    peak = mean_peak(peaks.peak_KN, share_N)
    stuck_R = np.zeros(ranks, dtype=np.bool_)
    stuck = 0
    changed_R1 = np.zeros(ranks + 1, dtype=np.bool_)
    changed_RN = np.empty_like(peaks.load_RN)
    for _ in range(most_steps):
        hot = _most_often_hottest(peaks.rank_KN[0], share_N, stuck_R)
        slot, rank, other, found = _best_peak_swap(
            phy2log_RS, share_RS, scaled_EN, share_N, peaks, hot, peak - SMALLEST_GAIN
        )
        if slot < 0:
            stuck_R[hot] = True
            stuck += 1
            if stuck == min(patience, ranks):
                break
            continue
        rank_K = np.array([hot, rank], dtype=np.int32)
        changed_R1[rank_K] = True
        _swap_slots(phy2log_RS, share_RS, scaled_EN, peaks.load_RN, changed_RN, hot, slot, rank, other)
        take(peaks, rank_K, 2, changed_R1, changed_RN)
        changed_R1[rank_K] = False
        stuck_R[:] = False
        stuck = 0
        peak = found
    return peak


@kernel
def _most_often_hottest(hottest_N: Int32, share_N: Float32, stuck_R: Bool) -> int:
    """Of the ranks that are not stuck the one that is hottest in the weightiest episodes."""
    weight_R = np.zeros(stuck_R.shape[0], dtype=np.float32)
    for n in range(share_N.shape[0]):
        weight_R[hottest_N[n]] += share_N[n]
    hot = -1
    for r in range(stuck_R.shape[0]):
        if not stuck_R[r] and (hot < 0 or weight_R[r] > weight_R[hot]):
            hot = r
    return hot


@kernel
def _best_peak_swap(
    phy2log_RS: Int32,
    share_RS: Float32,
    scaled_EN: Float32,
    share_N: Float32,
    peaks: Peaks,
    hot: int,
    bound: float,
) -> tuple[int, int, int, float]:
    """Slot of ``hot``, other rank, its slot and the mean peak of the swap that lowers it most, below ``bound``."""
    ranks, slots = phy2log_RS.shape
    episodes = share_N.shape[0]
    load_RN, _, rank_KN, peak_KN = peaks
    rest_N = np.empty(episodes, dtype=np.float32)
    lowest = np.float32(bound)
    found = (-1, -1, -1)
    here_N = load_RN[hot]
    for r in range(ranks):
        if r == hot:
            continue
        there_N = load_RN[r]
        least = np.float32(0.0)
        for n in range(episodes):
            k = 0
            while rank_KN[k, n] == hot or rank_KN[k, n] == r:
                k += 1
            rest_N[n] = peak_KN[k, n]
            # Whatever the two share, one of them carries at least half of what both have.
            half = np.float32(0.5) * (here_N[n] + there_N[n])
            least += share_N[n] * max(rest_N[n], half)
        if least >= lowest:
            continue
        for s in range(slots):
            if _stands_on(phy2log_RS[r], phy2log_RS[hot, s]):
                continue
            for t in range(slots):
                if _stands_on(phy2log_RS[hot], phy2log_RS[r, t]):
                    continue
                out_share, come_share = share_RS[hot, s], share_RS[r, t]
                out_N, come_N = scaled_EN[phy2log_RS[hot, s]], scaled_EN[phy2log_RS[r, t]]
                peak = np.float32(0.0)
                for n in range(episodes):
                    more = come_share * come_N[n] - out_share * out_N[n]
                    peak += share_N[n] * max(rest_N[n], here_N[n] + more, there_N[n] - more)
                if peak < lowest:
                    lowest = peak
                    found = (s, r, t)
    return found[0], found[1], found[2], lowest


@kernel
def _stands_on(phy2log_S: Int32, expert: int) -> bool:
    for held in phy2log_S:  # noqa: SIM110 (numba compiles no generator expression)
        if held == expert:
            return True
    return False


@kernel
def _swap_slots(
    phy2log_RS: Int32,
    share_RS: Float32,
    scaled_EN: Float32,
    load_RN: Float32,
    changed_RN: Float32,
    hot: int,
    slot: int,
    rank: int,
    other: int,
) -> None:
    """Swap two slots' experts with their shares, and note both ranks' loads after it."""
    out, come = phy2log_RS[hot, slot], phy2log_RS[rank, other]
    out_share, come_share = share_RS[hot, slot], share_RS[rank, other]
    for n in range(scaled_EN.shape[1]):
        more = come_share * scaled_EN[come, n] - out_share * scaled_EN[out, n]
        changed_RN[hot, n] = load_RN[hot, n] + more
        changed_RN[rank, n] = load_RN[rank, n] - more
    phy2log_RS[hot, slot], phy2log_RS[rank, other] = come, out
    share_RS[hot, slot], share_RS[rank, other] = come_share, out_share
