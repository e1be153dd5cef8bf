"""Order in which a window's steps are summed into episodes.

Workloads such as prefill chunks and decoding, or micro-batches, may alternate every step or two. An episode of
consecutive steps then averages them, and a placement that is balanced for the average may be unbalanced in every step.
If the steps within episodes differ by far more than token sampling explains, similar steps are summed instead. Steps
are sorted by their first principal component within blocks of a few episodes, which roughly preserves their
chronological order.

The number of tokens in a step does not matter, because steps are compared by their Pearson residuals, which have the
same variance in small and large batches.

References
----------
V. Marchenko, L. Pastur, *Distribution of Eigenvalues for Some Sets of Random Matrices*, 1967.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eplb_core.heat.window import Counts
from eplb_core.placement import Float64

_BLOCK_EPISODES = 4
"""Number of episodes per block. Steps are sorted within each block."""
_MAX_LAYERS = 2
"""Maximum number of layers, evenly spaced, used to compare steps."""
_POWER_ROUNDS = 8
"""Number of power iterations. The direction only has to separate the workloads, so it need not be exact."""
_MIN_EDGE_RATIO = 3.0
"""Minimum variance within episodes that indicates alternating workloads, as a multiple of the largest variance that
sampling explains."""
_MIN_WITHIN = 0.4
"""Minimum fraction of the variance that must occur within episodes. Workloads that alternate more slowly end up in
separate episodes anyway."""
_MIN_BETWEEN_CLUSTERS = 0.75
"""Minimum fraction of the variance that a division of the steps into two clusters must explain. Such a division
explains 0.64 of the variance of a normal distribution and 0.75 of that of a uniform one."""


def similar_steps_together(heat_TLE: Counts, episodes: int) -> npt.NDArray[np.int64] | None:
    """Return an order of the steps such that each episode sums similar steps, int64 ``[T]``.

    Parameters
    ----------
    heat_TLE
        ``[T, L, E]``, tokens of each expert in each step.
    episodes
        N, number of episodes that the steps are summed into.

    Returns
    -------
    npt.NDArray[np.int64] or None
        Indices of the steps in their new order. ``None`` to keep the chronological order, either because the steps do
        not show alternating workloads or because there are too few steps or episodes.

    Examples
    --------
    Two workloads alternate, so an episode of two consecutive steps would average them. Instead, each block of four
    episodes first sums the decode steps and then the prefill steps:

    >>> prefill_LE = [[900, 100]]
    >>> decode_LE = [[100, 900]]
    >>> heat_TLE = np.array([prefill_LE, decode_LE] * 8)
    >>> similar_steps_together(heat_TLE, episodes=8)
    array([ 1,  3,  5,  7,  0,  2,  4,  6,  9, 11, 13, 15,  8, 10, 12, 14])
    """
    steps = len(heat_TLE)
    if steps <= episodes or episodes < 2 * _BLOCK_EPISODES:
        return None
    residual_TX = _residuals(heat_TLE)
    episode_T = np.arange(steps) * episodes // steps
    within_TX = residual_TX - _means(residual_TX, episode_T)[episode_T]
    direction_X, variance = _first_component(within_TX)
    # Largest covariance eigenvalue of independent residuals with variance 1 (Marchenko and Pastur).
    edge = (1.0 + np.sqrt(residual_TX.shape[1] / steps)) ** 2
    if variance <= _MIN_EDGE_RATIO * edge:
        return None
    score_T = residual_TX @ direction_X
    if variance < _MIN_WITHIN * score_T.var() or _explained_by_two(score_T) < _MIN_BETWEEN_CLUSTERS:
        return None
    return np.lexsort((score_T, episode_T // _BLOCK_EPISODES))


def _residuals(heat_TLE: Counts) -> Float64:
    """Return the Pearson residuals of a few layers, float64 ``[T, X]``; 0 if a step or an expert has no tokens."""
    layers = heat_TLE.shape[1]
    layer_K = np.unique(np.linspace(0, layers - 1, min(_MAX_LAYERS, layers)).astype(np.int64))
    heat_TKE = heat_TLE[:, layer_K].astype(np.float64)
    tokens_TK1 = heat_TKE.sum(axis=2, keepdims=True)
    share_KE = heat_TKE.sum(axis=0)
    share_KE /= np.maximum(share_KE.sum(axis=1, keepdims=True), 1.0)
    expected_TKE = tokens_TK1 * share_KE
    residual_TKE = (heat_TKE - expected_TKE) / np.sqrt(np.maximum(expected_TKE, 1e-9))
    residual_TKE[expected_TKE <= 0] = 0.0
    residual_TX: Float64 = residual_TKE.reshape(len(heat_TLE), -1)
    return residual_TX


def _means(values_TX: Float64, group_T: npt.NDArray[np.int64]) -> Float64:
    """Return the mean of each group of consecutive rows, float64 ``[N, X]``."""
    first_N = np.flatnonzero(np.diff(group_T, prepend=-1))
    count_N = np.diff(first_N, append=group_T.size)
    means_NX: Float64 = np.add.reduceat(values_TX, first_N, axis=0) / count_N[:, None]
    return means_NX


def _explained_by_two(score_T: Float64) -> float:
    """Return the fraction of the variance explained by the best division into a lower and an upper cluster.

    References
    ----------
    N. Otsu, *A Threshold Selection Method from Gray-Level Histograms*, 1979.
    """
    centred_T = np.sort(score_T) - score_T.mean()
    below_T = np.arange(1, score_T.size) / score_T.size
    lower_T = centred_T.cumsum()[:-1] / score_T.size
    between_T = lower_T**2 / (below_T * (1.0 - below_T))
    return float(between_T.max() / max(float(score_T.var()), 1e-300))


def _first_component(values_TX: Float64) -> tuple[Float64, float]:
    """Return the direction of largest variance, float64 ``[X]``, and the variance along it."""
    # Start from the row with the largest norm, which is unlikely to be orthogonal to that direction.
    direction_X = values_TX[(values_TX**2).sum(axis=1).argmax()].copy()
    for _ in range(_POWER_ROUNDS):
        length = float(np.linalg.norm(direction_X))
        if length == 0:
            return direction_X, 0.0
        direction_X = values_TX.T @ (values_TX @ (direction_X / length))
    direction_X /= max(float(np.linalg.norm(direction_X)), 1e-300)
    return direction_X, float(((values_TX @ direction_X) ** 2).mean())
