"""Peak-to-average ratio (PAR): the load of the hottest rank divided by the mean load. It is 1.0 for perfect balance.

PAR is computed for each step, or for each episode (several steps summed), and averaged over the steps with tokens. The
PAR of a step or layer without tokens is NaN and is ignored in means.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]
"""A float64 array. The suffix of a variable's name gives its dimensions."""


def step_par(loads: npt.NDArray[np.floating] | npt.NDArray[np.integer]) -> Float64:
    """Return the PAR of rank loads ``[..., R]``, float64 ``[...]``; NaN if no rank has tokens.

    Examples
    --------
    Two steps on two ranks. In the first, the hottest rank has 30 tokens and the mean is 20:

    >>> step_par(np.array([[30, 10], [20, 20]]))
    array([1.5, 1. ])
    """
    return peak_par(loads.max(axis=-1), loads.sum(axis=-1), loads.shape[-1])


def peak_par(peak: npt.NDArray[Any], tokens: npt.NDArray[Any], ranks: int) -> Float64:
    """Compute the PAR from the maximum and the sum of the rank loads; NaN if there are no tokens.

    Parameters
    ----------
    peak
        Tokens of the hottest rank, of any shape.
    tokens
        Tokens of all ranks, of the same shape as ``peak`` and the result.
    ranks
        R, number of ranks.
    """
    ratio: Float64 = np.full(np.shape(tokens), np.nan)
    np.divide(peak, tokens / ranks, out=ratio, where=tokens > 0)
    return ratio


def par(loads_NLR: npt.NDArray[np.floating] | npt.NDArray[np.integer]) -> Float64:
    """Return the mean PAR of each layer over its steps with tokens, float64 ``[L]``; NaN if there are none.

    Parameters
    ----------
    loads_NLR
        ``[N, L, R]``, tokens that each rank receives in each step or episode.
    """
    return mean_par(step_par(loads_NLR), axis=0)


def mean_par(par: Float64, axis: int | None = None, weights: npt.ArrayLike = 1.0) -> Float64:
    """Return the mean of the PARs that are not NaN, or NaN if all of them are NaN.

    Parameters
    ----------
    par
        PARs of any shape.
    axis
        Axis to average over; all axes by default.
    weights
        Weights that broadcast against ``par``, such as the number of steps in each row.

    Examples
    --------
    >>> mean_par(np.array([[1.2, np.nan], [1.4, 2.0]]), axis=0)
    array([1.3, 2. ])
    """
    weight = np.where(np.isnan(par), 0.0, weights)
    total = np.where(np.isnan(par), 0.0, par * weight).sum(axis=axis)
    total_weight = weight.sum(axis=axis)
    mean: Float64 = np.full(np.shape(total), np.nan)
    np.divide(total, total_weight, out=mean, where=total_weight > 0)
    return mean
