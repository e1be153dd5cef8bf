"""The imbalance that token sampling alone leaves if tokens choose independently; real routers leave a little less."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eplb_service.planner.effort import expected_hottest
from eplb_service.planner.scoring import Float64


def noise_floor(heat_NLE: npt.NDArray[np.floating], ranks: int) -> Float64:
    """Expected peak-to-average ratio of perfectly balanced ranks at each layer's token counts, float64 ``[L]``.

    A rank's tokens in an episode are then nearly Poisson; the expected largest of R such counts is taken from
    Blom's normal score with the Cornish-Fisher term for skewness. Averaged over the episodes that have tokens; 1.0
    where none has.

    References
    ----------
    G. Blom, *Statistical Estimates and Transformed Beta-Variables*, 1958.
    """
    if ranks == 1:
        return np.ones(heat_NLE.shape[1])
    score = expected_hottest(ranks)
    mean_NL = heat_NLE.sum(axis=2) / ranks
    busy_NL = mean_NL > 0
    safe_NL = np.where(busy_NL, mean_NL, 1.0)
    peak_NL = 1.0 + score / np.sqrt(safe_NL) + (score**2 - 1.0) / (6.0 * safe_NL)
    # Where there are fewer tokens than ranks one of them still takes a whole token.
    peak_NL = np.where(busy_NL, np.minimum(peak_NL, ranks), 0.0)
    episodes_L = busy_NL.sum(axis=0)
    return np.where(episodes_L > 0, peak_NL.sum(axis=0) / np.maximum(episodes_L, 1), 1.0)
