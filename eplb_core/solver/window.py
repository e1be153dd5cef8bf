"""Statistics of a window's heat: episodes, rank loads, variability, forecasts and standard errors."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from eplb_core.solver.jit import kernel, part
from eplb_core.solver.model import (
    Episodes,
    Float32,
    Float64,
    Heat,
    Int32,
    Int64,
    episodes_of,
    with_covariance,
)

_MIN_BURST_SKEWNESS = 0.95
"""Minimum mean skewness of the experts' tokens per episode at which heat counts as bursty.

In ``make bench-decide``, bursty heat has a skewness of 1.5 to 2.5, and the other kinds of synthetic heat have at most
0.62. Heat recorded during decoding reaches 1.7.
"""
CLEARLY_BETTER = 0.9
"""Fraction of the default forecast's squared error below which a different forecast replaces the default.

Chosen by hand so that every layer of 256 experts with static or alternating heat keeps the default.
"""
MIN_STEPS_TO_TRIM = 16
"""Minimum number of episodes per half at which trimmed means are considered. Fewer episodes could all fall within one
burst."""
MAX_LAGS = 16
"""Maximum distance, in steps or episodes, at which values are assumed to be correlated."""


@kernel
def sum_episodes(heat_TLE: Float64 | Int64 | Int32, layer_K: Int64, episodes: int) -> Float64:
    """Sum consecutive steps into episodes of nearly equal length.

    Parameters
    ----------
    heat_TLE
        ``[T, L, E]``, tokens of each expert.
    layer_K
        int64 ``[K]``, layers to sum.
    episodes
        Number of episodes, N; at most one per step.

    Returns
    -------
    Float64
        float64 ``[K, N, E]``.

    Examples
    --------
    Four steps of one layer with two experts become two episodes:

    >>> heat_TLE = np.array([[[1, 2]], [[3, 4]], [[5, 6]], [[7, 8]]], dtype=np.int64)
    >>> sum_episodes(heat_TLE, np.array([0]), 2)
    array([[[ 4.,  6.],
            [12., 14.]]])
    """
    steps, _, experts = heat_TLE.shape
    heat_KNE = np.zeros((layer_K.shape[0], episodes, experts))
    for k in range(layer_K.shape[0]):
        for n in range(episodes):
            for t in range(n * steps // episodes, (n + 1) * steps // episodes):
                for e in range(experts):
                    heat_KNE[k, n, e] += heat_TLE[t, layer_K[k], e]
    return heat_KNE


@part
def _sum_ranks(heat_E: Float64 | Int64 | Int32, phy2log_RS: Int32, share_P: Float64, load_R: Float64) -> None:
    """Write the load of each rank in one step into ``load_R``."""
    ranks, slots = phy2log_RS.shape
    for r in range(ranks):
        load = 0.0
        for s in range(slots):
            load += heat_E[np.uint32(phy2log_RS[r, s])] * share_P[r * slots + s]
        load_R[r] = load


@kernel
def loads_of_ranks(heat_NLE: Float64 | Int64 | Int32, phy2log_LRS: Int32, share_LP: Float64) -> Float64:
    """Return the expected tokens of each rank, float64 ``[N, L, R]``.

    Parameters
    ----------
    heat_NLE
        ``[N, L, E]``, tokens of each expert.
    phy2log_LRS
        int32 ``[L, R, S]``, placement.
    share_LP
        float64 ``[L, R*S]``, fraction of its expert's tokens that each slot receives.

    Examples
    --------
    The 10 tokens of expert 0 are split evenly over two ranks:

    >>> phy2log_LRS = np.array([[[0, 1], [0, 2]]], dtype=np.int32)
    >>> loads_of_ranks(np.array([[[10.0, 1, 2]]]), phy2log_LRS, np.array([[0.5, 1, 0.5, 1]]))
    array([[[6., 7.]]])
    """
    layers, ranks, _ = phy2log_LRS.shape
    loads_NLR = np.empty((heat_NLE.shape[0], layers, ranks))
    for layer in range(layers):
        for n in range(heat_NLE.shape[0]):
            _sum_ranks(heat_NLE[n, layer], phy2log_LRS[layer], share_LP[layer], loads_NLR[n, layer])
    return loads_NLR


class EpisodeLoads(NamedTuple):
    """Expected rank loads of a window's episodes, and the variance of their jumps.

    A jump is the change in a rank's (or expert's) fraction of all tokens between two consecutive episodes. The variance
    is half the mean squared jump. It measures fluctuations from episode to episode and ignores slow trends. Episodes
    without tokens are skipped. The variance is 0 if fewer than two episodes have tokens.

    References
    ----------
    J. von Neumann, *Distribution of the Ratio of the Mean Square Successive Difference to the Variance*, 1941.
    """

    loads_NKR: Float64
    """float64 ``[N, K, R]``, load of each rank in each episode."""
    rank_variance_K: Float64
    """float64 ``[K]``, variance of the ranks' jumps, summed over the ranks."""
    expert_variance_K: Float64
    """float64 ``[K]``, variance of each expert's jumps divided by its replica count, summed over the experts."""


@kernel
def shares_of_slots(
    phy2log_RS: Int32, log2phy_RLE: Int32, layer: int, tokens_RLE: Float64, tokens_layer: int
) -> Float64:
    """Return the fraction of its expert's tokens that each slot of a layer receives through tables.

    Parameters
    ----------
    phy2log_RS
        int32 ``[R, S]``, placement of the layer.
    log2phy_RLE
        int32 ``[R, L, E]``, tables of all layers.
    layer
        Index of the layer in ``log2phy_RLE``.
    tokens_RLE
        float64 ``[R, L', E]``, source heat. If an expert has no tokens, all sources count equally.
    tokens_layer
        Index of the layer in ``tokens_RLE``.

    Returns
    -------
    Float64
        float64 ``[R*S]``.
    """
    sources, _, experts = log2phy_RLE.shape
    total_E = np.zeros(experts)
    expert_P = phy2log_RS.ravel()
    for r in range(sources):
        for e in range(experts):
            total_E[e] += tokens_RLE[r, tokens_layer, e]
    share_P = np.zeros(expert_P.shape[0])
    for r in range(sources):
        for e in range(experts):
            tokens = tokens_RLE[r, tokens_layer, e] if total_E[e] > 0 else 1.0
            share_P[log2phy_RLE[r, layer, e]] += tokens
    for p in range(expert_P.shape[0]):
        total = total_E[expert_P[p]]
        share_P[p] /= total if total > 0 else sources
    return share_P


@kernel
def shares_of_groups(source_RLE: Float64, layer: int, group_R: Int32, groups: int) -> Float64:
    """Return each group's share of each expert's tokens in one layer, float64 ``[G, E]``.

    Parameters
    ----------
    source_RLE
        float64 ``[R, L, E]``, source heat. If an expert has no tokens, all ranks count equally.
    layer
        Index of the layer.
    group_R
        int32 ``[R]``, group of each source rank.
    groups
        Number of groups, G.
    """
    ranks, _, experts = source_RLE.shape
    total_E = np.zeros(experts)
    share_GE = np.zeros((groups, experts))
    for r in range(ranks):
        for e in range(experts):
            total_E[e] += source_RLE[r, layer, e]
    for r in range(ranks):
        for e in range(experts):
            even = 1.0 / ranks
            share_GE[group_R[r], e] += source_RLE[r, layer, e] / total_E[e] if total_E[e] > 0 else even
    return share_GE


@kernel
def episode_loads(
    heat_TLE: Float64 | Int64 | Int32, layer_K: Int64, phy2log_KRS: Int32, share_KP: Float64, episodes: int
) -> EpisodeLoads:
    """Sum a window's steps into episodes, and the heat of each episode into rank loads.

    Parameters
    ----------
    heat_TLE
        ``[T, L, E]``, tokens of each expert.
    layer_K
        int64 ``[K]``, layers to sum.
    phy2log_KRS
        int32 ``[K, R, S]``, placement of these layers.
    share_KP
        float64 ``[K, R*S]``, fraction of its expert's tokens that each slot receives.
    episodes
        Number of episodes, N, as for ``sum_episodes``; 0 to return no episodes.
    """
    layers, ranks, _ = phy2log_KRS.shape
    steps, _, experts = heat_TLE.shape
    loads_NKR = np.zeros((episodes, layers, ranks))
    variance_2K = np.zeros((2, layers))
    heat_E = np.empty(experts)
    before_R = np.empty(ranks)
    jump_R = np.empty(ranks)
    before_E = np.empty(experts)
    jump_E = np.empty(experts)
    for k in range(layers):
        busy = _start_jumps(before_R, jump_R)
        busy_experts = _start_jumps(before_E, jump_E)
        for n in range(episodes):
            for e in range(experts):
                heat_E[e] = 0.0
            for t in range(n * steps // episodes, (n + 1) * steps // episodes):
                for e in range(experts):
                    heat_E[e] += heat_TLE[t, layer_K[k], e]
            _sum_ranks(heat_E, phy2log_KRS[k], share_KP[k], loads_NKR[n, k])
            busy += _add_jumps(loads_NKR[n, k], loads_NKR[n, k].sum(), before_R, jump_R)
            busy_experts += _add_jumps(heat_E, heat_E.sum(), before_E, jump_E)
        variance_2K[0, k] = jump_R.sum() / (2.0 * max(busy - 1, 1))
        variance_2K[1, k] = _over_replicas(jump_E, phy2log_KRS[k]) / (2.0 * max(busy_experts - 1, 1))
    return EpisodeLoads(loads_NKR, variance_2K[0], variance_2K[1])


@part
def _start_jumps(before_E: Float64, jump_E: Float64) -> int:
    """Reset the arrays for ``_add_jumps`` and return 0, the number of busy episodes so far."""
    before_E[0] = -1.0
    for e in range(jump_E.shape[0]):
        jump_E[e] = 0.0
    return 0


@part
def _add_jumps(heat_E: Float64, tokens: float, before_E: Float64, jump_E: Float64) -> int:
    """Add the squared jumps since the previous busy episode.

    Parameters
    ----------
    heat_E
        float64 ``[E]``, tokens in this episode, per expert or rank.
    tokens
        Sum of ``heat_E``.
    before_E
        float64 ``[E]``, fractions of the previous episode's tokens, replaced by this episode's. The first element is
        negative before the first episode.
    jump_E
        float64 ``[E]``, sums of the squared jumps, changed in place.

    Returns
    -------
    int
        1 if the episode has tokens, else 0.
    """
    if tokens <= 0:
        return 0
    scale = 1.0 / tokens
    first = before_E[0] < 0
    for e in range(heat_E.shape[0]):
        share = heat_E[e] * scale
        jump = 0.0 if first else share - before_E[e]
        jump_E[e] += jump * jump
        before_E[e] = share
    return 1


@part
def _over_replicas(jump_E: Float64, phy2log_RS: Int32) -> float:
    """Sum the experts' squared jumps, each divided by the expert's number of replicas."""
    replicas_E = np.zeros(jump_E.shape[0])
    for r in range(phy2log_RS.shape[0]):
        for s in range(phy2log_RS.shape[1]):
            replicas_E[phy2log_RS[r, s]] += 1.0
    variance = 0.0
    for e in range(jump_E.shape[0]):
        variance += jump_E[e] / replicas_E[e]
    return variance


class Forecast(NamedTuple):
    """Method for predicting the next window's heat from the current window."""

    half_life: float
    """Age, in episodes, at which an episode's weight is halved; infinite for equal weights."""
    wander: float
    """Squared error of the forecast half a window ahead, relative to the squared heat; 0 with equal weights."""
    trimmed: bool = False
    """True to use each expert's trimmed mean. All episodes then have equal weights."""


def halves_of(heat: Episodes) -> tuple[Episodes, Episodes]:
    """Split episodes, oldest first, into an older and a newer half."""
    half = heat.share_N.shape[0] // 2

    def cut(selected: slice) -> Episodes:
        share_N = heat.share_N[selected]
        share_N = share_N / max(share_N.sum(), np.float32(1e-30))
        return Episodes(np.ascontiguousarray(heat.scaled_EN[:, selected]), share_N)

    return cut(slice(half)), cut(slice(half, None))


def _fading(episodes: int, half_life_H: Float64) -> Float64:
    """Return exponential weights, float64 ``[N, H]``: 1 for the newest episode, halved for every half-life of age."""
    weight_NH: Float64 = 0.5 ** (np.arange(episodes - 1, -1, -1)[:, None] / half_life_H)
    return weight_NH


def _trimmed_mean(scaled_EN: Float32, share_N: Float32) -> Float32:
    """Return each expert's mean over the half of the episodes in which it has the fewest tokens, float32 ``[E]``.

    The means are scaled to the same sum as the untrimmed means. Episodes without weight are ignored. If every expert
    has no tokens in half of the episodes, the untrimmed means are returned.
    """
    busy_EN = scaled_EN[:, share_N > 0]
    kept = (busy_EN.shape[1] + 1) // 2
    if not kept:
        return np.zeros(len(scaled_EN), dtype=np.float32)
    trimmed_E: Float32 = np.partition(busy_EN, kept - 1, axis=1)[:, :kept].mean(axis=1)
    mean_E: Float32 = busy_EN.mean(axis=1)
    total = trimmed_E.sum()
    return trimmed_E * (mean_E.sum() / total) if total > 0 else mean_E


@kernel
def _skewness(scaled_EN: Float32, share_N: Float32) -> float:
    """Return the mean skewness over the experts that vary; 0 if no expert varies.

    Episodes without weight are ignored.
    """
    experts, episodes = scaled_EN.shape
    busy = 0
    for n in range(episodes):
        busy += share_N[n] > 0
    total = 0.0
    varying = 0
    for e in range(experts):
        mean = 0.0
        for n in range(episodes):
            if share_N[n] > 0:
                mean += scaled_EN[e, n]
        mean /= max(busy, 1)
        squares = 0.0
        cubes = 0.0
        for n in range(episodes):
            if share_N[n] > 0:
                deviation = scaled_EN[e, n] - mean
                squares += deviation * deviation
                cubes += deviation * deviation * deviation
        spread = np.sqrt(squares / max(busy, 1))
        # A spread below this limit is a rounding error, so the expert does not vary.
        if spread > 1e-4 * mean:
            total += cubes / max(busy, 1) / spread**3
            varying += 1
    return total / max(varying, 1)


def choose_forecast(heat: Episodes, half_life_H: Float64, trim: bool = True) -> Forecast:
    """Choose the forecast whose prediction from the older half of the episodes is closest to the newer half's mean.

    The first half-life is the default. A different half-life, or the trimmed mean, replaces it if its squared error is
    clearly smaller (``CLEARLY_BETTER``). The trimmed mean is considered only for bursty heat, which is skewed: if
    two kinds of heat alternate, it would predict only one of them. The default is also used if the newer half has no
    tokens.

    Parameters
    ----------
    heat
        Episodes, oldest first.
    half_life_H
        float64 ``[H]``, candidate half-lives in episodes.
    trim
        False to exclude the trimmed mean.
    """
    half = heat.share_N.shape[0] // 2
    older_EN = heat.scaled_EN[:, :half]
    older_N = heat.share_N[:half]
    newer_N = heat.share_N[half:]
    newer_E = heat.scaled_EN[:, half:] @ newer_N / max(newer_N.sum(), np.float32(1e-30))
    if not newer_E.any():
        return Forecast(float(half_life_H[0]), 0.0)
    weight_NH = older_N[:, None] * _fading(half, half_life_H)
    weight_NH /= np.maximum(weight_NH.sum(axis=0), 1e-30)
    error_H = ((older_EN @ weight_NH - newer_E[:, None]) ** 2).sum(axis=0)
    best = int(error_H.argmin())
    bound = CLEARLY_BETTER * error_H[0]
    if trim and half >= MIN_STEPS_TO_TRIM and _skewness(heat.scaled_EN, heat.share_N) >= _MIN_BURST_SKEWNESS:
        error = ((_trimmed_mean(older_EN, older_N) - newer_E) ** 2).sum()
        if error < min(bound, error_H[best]):
            return Forecast(float("inf"), 0.0, trimmed=True)
    if error_H[best] >= bound:
        return Forecast(float(half_life_H[0]), 0.0)
    return Forecast(float(half_life_H[best]), float(error_H[best] / (newer_E**2).sum()))


def forecast_heat(seen: Episodes, forecast: Forecast, ahead: float) -> Heat:
    """Apply a forecast to a window: weight recent episodes more, or trim the means.

    Parameters
    ----------
    seen
        Episodes of the window, oldest first.
    forecast
        Method, as returned by ``choose_forecast``.
    ahead
        Distance to the forecast time, in half windows. The forecast's squared error grows in proportion to it and is
        added to the variances.
    """
    heat = with_covariance(*(_trimmed(seen) if forecast.trimmed else seen))
    if forecast.trimmed or not np.isfinite(forecast.half_life):
        return heat
    # The covariance uses all episodes with equal weights: a few recent ones are enough for a mean, but not for a
    # covariance.
    weight_N = heat.share_N * _fading(heat.share_N.shape[0], np.array([forecast.half_life]))[:, 0]
    total = weight_N.sum()
    if total == 0:
        return heat
    share_N = (weight_N / total).astype(np.float32)
    mean_E = heat.scaled_EN @ share_N
    gram_EE = heat.gram_EE
    gram_EE[np.diag_indices_from(gram_EE)] += np.float32(ahead * forecast.wander) * mean_E * mean_E
    return Heat(heat.scaled_EN, share_N, mean_E, gram_EE)


def _trimmed(seen: Episodes) -> Episodes:
    """Scale each expert's episodes so that their mean equals the expert's trimmed mean, and renormalise them."""
    mean_E = seen.scaled_EN @ seen.share_N
    trimmed_E = _trimmed_mean(*seen)
    factor_E = np.divide(trimmed_E, mean_E, out=np.zeros_like(mean_E), where=mean_E > 0)
    scaled_NE = np.where(seen.share_N > 0, seen.scaled_EN * factor_E[:, None], 0.0).T
    return episodes_of(np.ascontiguousarray(scaled_NE, dtype=np.float64), round(float(mean_E.sum())))


def inflation(values_NK: Float64) -> Float64:
    """Return the factor by which autocorrelation inflates the variance of a mean, float64 ``[K]``.

    Uses Bartlett's lag window over a quarter of the values, at most ``MAX_LAGS``. The factor is at least 1, because
    apparent negative correlation is not trusted. It is 1 for fewer than two values or for constant values.

    Parameters
    ----------
    values_NK
        float64 ``[N, K]``, K series of values in time order.

    References
    ----------
    W. Newey, K. West, *A Simple, Positive Semi-Definite, Heteroskedasticity and Autocorrelation Consistent Covariance
    Matrix*, 1987.

    Examples
    --------
    A series that changes its value only once has a far more uncertain mean than a series that alternates:

    >>> inflation(np.array([[0.0, 0], [0, 1], [0, 0], [0, 1], [1, 0], [1, 1], [1, 0], [1, 1]]))
    array([2., 1.])
    """
    count = values_NK.shape[0]
    centred_NK = values_NK - values_NK.mean(axis=0) if count else values_NK
    spread_K = (centred_NK**2).sum(axis=0)
    total_K = spread_K.copy()
    lags = min(MAX_LAGS, count // 4)
    for lag in range(1, lags + 1):
        weight = 2.0 * (1.0 - lag / (lags + 1))
        total_K += weight * (centred_NK[lag:] * centred_NK[: count - lag]).sum(axis=0)
    ratio_K: Float64 = np.ones_like(spread_K)
    np.divide(total_K, spread_K, out=ratio_K, where=spread_K > 0)
    return np.maximum(ratio_K, 1.0)


def inflation_error(count: int) -> float:
    """Return the standard deviation of ``inflation`` for ``count`` independent values.

    With Bartlett's window, the variance of an estimate is 4/3 times the ratio of lags to values.

    References
    ----------
    T. Anderson, *The Statistical Analysis of Time Series*, 1971, section 9.4.
    """
    lags = min(MAX_LAGS, count // 4)
    return float(np.sqrt(4.0 * lags / (3.0 * count))) if count else 0.0


def standard_error(values_N: Float64) -> float:
    """Return the standard error of the mean of a time series, float64 ``[N]``; infinite for fewer than two values.

    Autocorrelation is taken into account (``inflation``).
    """
    if values_N.size < 2:
        return np.inf
    return float(np.sqrt(values_N.var(ddof=1) * inflation(values_N[:, None])[0] / values_N.size))
