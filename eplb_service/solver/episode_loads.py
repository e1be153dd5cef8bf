"""What every rank carries in every episode, for searches that judge a change by the ratio itself."""

from __future__ import annotations

import numpy as np

from eplb_service.solver.arrays import Float32, Int32
from eplb_service.solver.jit import kernel


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
def hottest_of_others(load_RN: Float32, rank_K: Int32) -> Float32:
    """Load of the hottest rank but for ``rank_K`` in each episode, float32 ``[N]``; 0 where there is no other."""
    without_R = np.zeros(load_RN.shape[0], dtype=np.bool_)
    without_R[rank_K] = True
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
