"""Least squares with coefficients of zero or more, for many problems of few features at a time."""

from __future__ import annotations

from itertools import combinations

import numpy as np

from eplb_service.placement import Float64

_RIDGE = 1e-10
"""Part of a feature's own square that is added to it, so that features that are one and the same can be solved for."""


def nonnegative_many(gram_BFF: Float64, moment_BF: Float64) -> tuple[Float64, Float64]:
    """Coefficients, none negative, that minimise each problem's squares: each set of positive ones is tried.

    Parameters
    ----------
    gram_BFF
        float64 ``[B, F, F]``, sums over the rows of features times features.
    moment_BF
        float64 ``[B, F]``, the same of features times the target.

    Returns
    -------
    tuple[Float64, Float64]
        The coefficients, float64 ``[B, F]``, and by how much each lowers the sum of squares, float64 ``[B]``.
    """
    problems, features = moment_BF.shape
    scale_BF = np.sqrt(np.einsum("bff->bf", gram_BFF))
    scale_BF[scale_BF == 0] = 1.0
    gram = gram_BFF / (scale_BF[:, :, None] * scale_BF[:, None, :])
    gram[:, np.arange(features), np.arange(features)] += _RIDGE
    moment = moment_BF / scale_BF
    best_BF, lowered_B = np.zeros((problems, features)), np.zeros(problems)
    for count in range(1, features + 1):
        for chosen in map(list, combinations(range(features), count)):
            found = np.linalg.solve(gram[:, chosen][:, :, chosen], moment[:, chosen][..., None])[..., 0]
            lowered = (found * moment[:, chosen]).sum(axis=1)
            better_B = (found >= 0).all(axis=1) & (lowered > lowered_B)
            best_BF[better_B] = 0.0
            best_BF[np.ix_(better_B, chosen)] = found[better_B]
            lowered_B = np.where(better_B, lowered, lowered_B)
    return best_BF / scale_BF, lowered_B
