"""How sure a mean is of values that follow each other and resemble their neighbours."""

from __future__ import annotations

import numpy as np

from eplb_service.solver.model import Float64

MOST_LAGS = 16
"""Steps or episodes over which neighbours are taken to resemble each other at most."""


def inflation(values_NK: Float64) -> Float64:
    """How much larger the variance of a mean is than that of independent values with the same spread, float64 ``[K]``.

    The lag window is Bartlett's, over a quarter of the values and at most ``MOST_LAGS`` of them. Never below 1: what
    seems to alternate is not trusted. 1 where fewer than two values are given or all are alike.

    References
    ----------
    W. Newey, K. West, *A Simple, Positive Semi-Definite, Heteroskedasticity and Autocorrelation Consistent Covariance
    Matrix*, 1987.

    Parameters
    ----------
    values_NK
        float64 ``[N, K]``, K series of N values in order.
    """
    count = values_NK.shape[0]
    centred_NK = values_NK - values_NK.mean(axis=0) if count else values_NK
    spread_K = (centred_NK**2).sum(axis=0)
    total_K = spread_K.copy()
    lags = min(MOST_LAGS, count // 4)
    for lag in range(1, lags + 1):
        weight = 2.0 * (1.0 - lag / (lags + 1))
        total_K += weight * (centred_NK[lag:] * centred_NK[:-lag]).sum(axis=0)
    ratio_K: Float64 = np.ones_like(spread_K)
    np.divide(total_K, spread_K, out=ratio_K, where=spread_K > 0)
    return np.maximum(ratio_K, 1.0)


def inflation_error(count: int) -> float:
    """Standard deviation of ``inflation`` of so many independent values: that of Bartlett's window, 4/3 of lags/values.

    References
    ----------
    T. Anderson, *The Statistical Analysis of Time Series*, 1971, section 9.4.
    """
    lags = min(MOST_LAGS, count // 4)
    return float(np.sqrt(4.0 * lags / (3.0 * count))) if count else 0.0


def standard_error(values_N: Float64) -> float:
    """Standard error of the mean of values in order, float64 ``[N]``; infinite for fewer than two."""
    if values_N.size < 2:
        return np.inf
    return float(np.sqrt(values_N.var(ddof=1) * inflation(values_N[:, None])[0] / values_N.size))
