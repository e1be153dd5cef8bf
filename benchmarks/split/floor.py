"""What the noise of steps leaves of even shares: an estimate for any placement, and one that knows all means."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from eplb_service.bench.scoring import peak_to_average
from eplb_service.offline import solve
from eplb_service.planner.noise_floor import balanced_par


@dataclass(frozen=True)
class EvenFloor:
    """Peak-to-average ratios, means over layers, below which even shares are not expected to come.

    Parameters
    ----------
    estimate
        ``even_floor``, for any placement.
    known
        What a placement comes to that was made on so many steps that means are all but known.
    noise
        What it would come to were its ranks' means the same: the part that no search for balance can take away.
    """

    estimate: float
    known: float
    noise: float

    @classmethod
    def of(cls, heat_TLE: np.ndarray, ranks: int, slots: int) -> EvenFloor:
        """Of steps of one popularity: placed on the first half of them, measured on the second."""
        half = len(heat_TLE) // 2
        placed_LRS = solve(heat_TLE[:half].astype(np.int64), ranks, slots, split="even").phy2log
        found = [
            (even_floor(heat_TE, ranks, slots), *ratio_and_noise(placed_RS, heat_TE))
            for placed_RS, heat_TE in zip(placed_LRS, heat_TLE[half:].transpose(1, 0, 2), strict=True)
        ]
        return cls(*map(float, np.mean(found, axis=0)))

    def __str__(self) -> str:
        known = f"with means known {self.known:.3f}, of it noise {self.noise:.3f}"
        return f"noise leaves {self.estimate:.3f} by estimate; {known}"


def ratio_and_noise(phy2log_RS: np.ndarray, heat_TE: np.ndarray) -> tuple[float, float]:
    """The ratio of a placement under even shares, and what it would be were its ranks' mean loads the same."""
    share_RS = 1.0 / np.bincount(phy2log_RS.ravel(), minlength=heat_TE.shape[1])[phy2log_RS]
    load_TR = (heat_TE[:, phy2log_RS] * share_RS).sum(axis=2)
    mean_R = load_TR.mean(axis=0)
    return float(peak_to_average(load_TR)), float(peak_to_average(load_TR - mean_R + mean_R.mean()))


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
