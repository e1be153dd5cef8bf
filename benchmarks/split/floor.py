"""What the noise of steps leaves of even shares under any placement: an estimate from the steps themselves."""

from __future__ import annotations

import heapq

import numpy as np

from eplb_service.planner.noise_floor import balanced_par


def even_floor(heat_TE: np.ndarray, ranks: int, slots: int) -> float:
    """The peak-to-average ratio of one layer that placements come to at best where replicas share evenly.

    Of an expert whose tokens vary by ``v`` from step to step, ``k`` replicas vary by ``v / k**2`` each, ``v / k``
    together. So all ranks together vary the least where replicas are where they lower that sum most. Ranks are then
    taken to be balanced in the mean, to vary alike, and each for itself but for the step's tokens, which are given: the
    largest of them is Blom's. Ranks that share an expert vary together, which lowers the ratio somewhat; skewness,
    which is left out, raises it by about as much.
    """
    variance_E = heat_TE.var(axis=0, ddof=1)
    replicas_E = least_variance(variance_E, ranks, slots)
    tokens = heat_TE.sum(axis=1).mean()
    return float(balanced_par(np.array([(variance_E / replicas_E).sum() / tokens**2]), ranks)[0])


def least_variance(variance_E: np.ndarray, ranks: int, slots: int) -> np.ndarray:
    """Replicas of each expert, at most one a rank, whose variances sum up to least: the next where it lowers most."""
    replicas_E = np.ones(variance_E.size, dtype=np.int64)
    gains = [(-v / 2, expert) for expert, v in enumerate(variance_E.tolist())] if ranks > 1 else []
    heapq.heapify(gains)
    for _ in range(ranks * slots - variance_E.size):
        if not gains:
            break
        expert = heapq.heappop(gains)[1]
        replicas_E[expert] += 1
        k = int(replicas_E[expert])
        if k < ranks:
            heapq.heappush(gains, (-float(variance_E[expert]) / (k * (k + 1)), expert))
    return replicas_E
