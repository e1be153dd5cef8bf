"""The peak-to-average ratio (PAR): how much more the hottest rank has to do than the average one; 1.0 is perfect.

It is taken per step (or per episode: a few steps summed) and averaged over those that had tokens. A layer without any
token has no ratio: it is NaN here, and in no mean.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]
"""A float64 array; the variable's name carries its dimensions."""


def step_par(loads: npt.NDArray[np.floating] | npt.NDArray[np.integer]) -> Float64:
    """Peak-to-average ratio of rank loads ``[..., R]``, float64 ``[...]``; NaN where no rank has a token."""
    return peak_par(loads.max(axis=-1), loads.sum(axis=-1), loads.shape[-1])


def peak_par(peak: npt.NDArray[Any], tokens: npt.NDArray[Any], ranks: int) -> Float64:
    """Peak-to-average ratio where the hottest of so many ranks has ``peak`` of all ``tokens``; NaN where there is none.

    Parameters
    ----------
    peak, tokens
        Of any one shape, which is that of the result.
    """
    ratio: Float64 = np.full(np.shape(tokens), np.nan)
    np.divide(peak, tokens / ranks, out=ratio, where=tokens > 0)
    return ratio


def par(loads_NLR: npt.NDArray[np.floating] | npt.NDArray[np.integer]) -> Float64:
    """Peak-to-average ratio of each layer, float64 ``[L]``: the mean over the steps with tokens; NaN where none has.

    Parameters
    ----------
    loads_NLR
        ``[N, L, R]``, tokens that each rank receives in each step or episode.
    """
    return mean_par(step_par(loads_NLR), axis=0)


def mean_par(par: Float64, axis: int | None = None, weights: npt.ArrayLike = 1.0) -> Float64:
    """Mean along ``axis``, or of all, of the ratios that there are; NaN where there is none.

    ``weights`` broadcast against ``par``, such as the steps that each row of ratios was taken over.
    """
    weight = np.where(np.isnan(par), 0.0, weights)
    total = np.where(np.isnan(par), 0.0, par * weight).sum(axis=axis)
    counted = weight.sum(axis=axis)
    mean: Float64 = np.full(np.shape(total), np.nan)
    np.divide(total, counted, out=mean, where=counted > 0)
    return mean
