"""The imbalance that no placement can win: what token sampling leaves, and what the experts' own jumps leave.

From step to step an expert's heat jumps, by token sampling and by whatever the workload does. Where the ranks are
balanced in the mean and experts jump independently, these jumps alone make some rank the hottest. A layer no worse
than that needs no search: every placement would have the same volatility.

References
----------
G. Blom, *Statistical Estimates and Transformed Beta-Variables*, 1958.
"""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from eplb_service.placement import Float64, mean_par
from eplb_service.planner.scoring import StepLoads


def expected_hottest(ranks: int) -> float:
    """Standard deviations by which the largest of so many normal values is expected above their mean (Blom)."""
    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) if ranks > 1 else 0.0


def noise_floor(tokens_NL: npt.NDArray[np.floating] | npt.NDArray[np.integer], ranks: int) -> Float64:
    """Expected peak-to-average ratio of perfectly balanced ranks where tokens choose independently.

    A rank's tokens in a step are then nearly Poisson; the expected largest of R such counts is taken from Blom's normal
    score with the Cornish-Fisher term for skewness. Real routers leave a little less.

    Parameters
    ----------
    tokens_NL
        ``[N, L]``, tokens of each layer, all experts together, in each step or episode.
    ranks
        R.

    Returns
    -------
    Float64
        float64 ``[L]``, mean over the steps with tokens; NaN where none has.
    """
    score = expected_hottest(ranks)
    mean_NL = tokens_NL / ranks
    busy_NL = mean_NL > 0
    safe_NL = np.where(busy_NL, mean_NL, 1.0)
    peak_NL = 1.0 + score / np.sqrt(safe_NL) + (score**2 - 1.0) / (6.0 * safe_NL)
    # Where there are fewer tokens than ranks one of them still takes a whole token.
    return mean_par(np.where(busy_NL, np.clip(peak_NL, 1.0, ranks), np.nan), axis=0)


def volatility_bound(served: StepLoads) -> Float64:
    """Peak-to-average ratio that ranks balanced in the mean have because of their experts' jumps, float64 ``[L]``.

    Jumps are taken between episodes in a row, so a trend or a slow change of the workload is not mistaken for them.
    Where a token's choices make room for each other (it never chooses an expert twice), ranks jump less than their
    experts' jumps sum up to; then theirs count. 1.0 where fewer than two episodes have tokens.
    """
    return balanced_par(np.minimum(served.expert_variance_K, served.rank_variance_K), served.ranks)


def balanced_par(variance_L: Float64, ranks: int) -> Float64:
    """Peak-to-average ratio of ranks balanced in the mean whose parts of the tokens jump by ``variance_L`` in all.

    Parameters
    ----------
    variance_L
        float64 ``[L]``, as ``solver.window.Served`` has it.
    ranks
        R.
    """
    # Parts of all tokens to parts of a rank's, and the variance of all ranks to that of one.
    bound_L: Float64 = 1.0 + expected_hottest(ranks) * np.sqrt(variance_L * ranks)
    return bound_L
