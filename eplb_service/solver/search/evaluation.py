"""What the search minimises: the hottest rank's mean + z*std over the episodes, the second of FlashLB's three ideas.

An episode's heat is scaled so that the mean rank load is 1; a layer's risk then reads as a peak-to-average ratio. All
that is needed of the episodes is each expert's mean and the experts' covariance, so the cost of a candidate does not
grow with their number. A search on the maximum alone leaves many ranks just below it, and the next window pushes one of
them over: so the local search lowers a smooth maximum, in which a rank's risk x counts ((x - base) / (peak - base))**8
where it lies above the base (its *pressure*).

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

from eplb_service.solver.jit import kernel, part
from eplb_service.solver.model import Bool, Demand, Float32, Int32

SMALLEST_GAIN = 1e-5
"""Peak-to-average ratio below which a change is rounding, not progress."""
_BELOW_MEAN = 12.0
"""The base lies this many times as far below the mean risk as the peak lies above it. The farther, the more the ranks
behind the hottest count, and the better what little is moved holds where heat drifts. It and the power 8 were chosen by
hand in closed loops of 256 experts on 32 ranks x 9 slots; in those of ``local_search.SMALLEST_RELIEF`` 4 and 30 realise
1.3 and 1.8 % more on drift than 12, with 1.7 and 1.5 times the moves."""


@kernel
def risk(load: float, variance: float, z: float) -> float:
    """Mean + z*std of one load; rounding may have left the variance a hair below zero."""
    found: float = load + z * np.sqrt(max(variance, np.float32(0.0)))
    return found


@kernel
def expert_heat(demand: Demand, z: float) -> Float32:
    """Mean + z*std of each expert, float32 ``[E]``."""
    heat_E = np.empty_like(demand.mean_E)
    for e in range(heat_E.shape[0]):
        heat_E[e] = risk(demand.mean_E[e], demand.gram_EE[e, e], z)
    return heat_E


@kernel
def peaks_of_episodes(scaled_EN: Float32, phy2log_RS: Int32, weight_RS: Float32) -> Float32:
    """Load of the hottest rank in each episode, float32 ``[N]``.

    ``weight_RS`` is the part of its expert's tokens that each slot receives.
    """
    ranks, slots = phy2log_RS.shape
    episodes = scaled_EN.shape[1]
    peak_N = np.zeros(episodes, dtype=np.float32)
    load_N = np.empty(episodes, dtype=np.float32)
    for r in range(ranks):
        load_N[:] = 0
        for s in range(slots):
            weight = weight_RS[r, s]
            expert_N = scaled_EN[phy2log_RS[r, s]]
            for n in range(episodes):
                load_N[n] += weight * expert_N[n]
        for n in range(episodes):
            peak_N[n] = max(peak_N[n], load_N[n])
    return peak_N


@kernel
def mean_of_max(scaled_EN: Float32, share_N: Float32, phy2log_RS: Int32, weight_RS: Float32) -> float:
    """Peak-to-average ratio: the hottest rank of each episode, averaged with the episodes' weights.

    ``weight_RS`` as for ``peaks_of_episodes``. 1.0 where there are no tokens.
    """
    peak_N = peaks_of_episodes(scaled_EN, phy2log_RS, weight_RS)
    total = 0.0
    weights = 0.0
    for n in range(peak_N.shape[0]):
        total += peak_N[n] * share_N[n]
        weights += share_N[n]
    return total if weights > 0 else 1.0


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


@kernel
def hottest_of_others(load_RN: Float32, slot_K: Int32, slots: int) -> Float32:
    """Load of the hottest rank but for those of physical slots ``slot_K`` in each episode, float32 ``[N]``.

    ``slots`` is how many a rank has; 0 where there is no other rank.
    """
    without_R = np.zeros(load_RN.shape[0], dtype=np.bool_)
    for slot in slot_K:
        without_R[slot // slots] = True
    peak_N = np.zeros(load_RN.shape[1], dtype=np.float32)
    for r in range(load_RN.shape[0]):
        if not without_R[r]:
            raise_to(peak_N, load_RN[r])
    return peak_N


@kernel
def raise_to(peak_N: Float32, load_N: Float32) -> None:
    """Lift each episode's peak to a load that is above it."""
    for n in range(peak_N.shape[0]):
        peak_N[n] = max(peak_N[n], load_N[n])


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
def pressure(x: float, base: float, scale: float) -> float:
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
        of_R[r] = pressure(risk_R[r], base, scale)
    return SmoothMax(base, scale, peak, of_R)


@kernel
def hottest_of(now: SmoothMax, stuck_R: Bool) -> int:
    """The rank under the highest pressure that is not stuck; -1 where all are."""
    hot = -1
    for r in range(now.of_R.shape[0]):
        if not stuck_R[r] and (hot < 0 or now.of_R[r] > now.of_R[hot]):
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
