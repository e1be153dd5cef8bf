"""Kernels over all layers of a window: steps summed into episodes, rank loads, and how much heat jumps."""

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


@kernel
def sum_episodes(heat_TLE: Float64 | Int64 | Int32, layer_K: Int64, episodes: int) -> Float64:
    """Sum consecutive steps into ``episodes`` (at most one each step) of nearly equal length.

    ``layer_K`` int64 ``[K]`` are the layers asked for; float64 ``[K, N, E]``.
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
    """Fill in the ranks' loads in one step."""
    ranks, slots = phy2log_RS.shape
    for r in range(ranks):
        load = 0.0
        for s in range(slots):
            load += heat_E[np.uint32(phy2log_RS[r, s])] * share_P[r * slots + s]
        load_R[r] = load


@kernel
def loads_of_ranks(heat_NLE: Float64 | Int64 | Int32, phy2log_LRS: Int32, share_LP: Float64) -> Float64:
    """Tokens that each rank receives, float64 ``[N, L, R]``.

    ``share_LP`` float64 ``[L, R*S]`` is the part of its expert's tokens that each slot receives.
    """
    layers, ranks, _ = phy2log_LRS.shape
    loads_NLR = np.empty((heat_NLE.shape[0], layers, ranks))
    for layer in range(layers):
        for n in range(heat_NLE.shape[0]):
            _sum_ranks(heat_NLE[n, layer], phy2log_LRS[layer], share_LP[layer], loads_NLR[n, layer])
    return loads_NLR


class EpisodeLoads(NamedTuple):
    """Expected rank loads in a window's episodes, and the variance of their jumps.

    Variances are those of jumps: half the mean square of the differences between the parts of the tokens in two
    episodes in a row, which is the variance of what changes without memory. Episodes without tokens are skipped, and
    the variance is 0 if fewer than two have any.

    References
    ----------
    J. von Neumann, *Distribution of the Ratio of the Mean Square Successive Difference to the Variance*, 1941.
    """

    loads_NKR: Float64
    """float64 ``[N, K, R]``, the ranks' loads in each episode."""
    rank_variance_K: Float64
    """float64 ``[K]``, of the ranks' jumps from episode to episode, summed over the ranks."""
    expert_variance_K: Float64
    """float64 ``[K]``, of the experts' jumps from episode to episode, each split over its replicas, and summed."""


@kernel
def shares_of_slots(
    phy2log_RS: Int32, log2phy_RLE: Int32, layer: int, tokens_RLE: Float64, of_layer: int
) -> Float64:
    """Part of its expert's tokens that each slot of a layer receives, float64 ``[R*S]``.

    Parameters
    ----------
    phy2log_RS, log2phy_RLE, layer
        int32 ``[R, S]`` its placement, int32 ``[R, L, E]`` the tables of all layers, and which of them it is.
    tokens_RLE, of_layer
        float64 ``[R, L, E]``, tokens by source, and which row is the layer's; alike of all where an expert has none.
    """
    sources, _, experts = log2phy_RLE.shape
    total_E, expert_P = np.zeros(experts), phy2log_RS.ravel()
    for r in range(sources):
        for e in range(experts):
            total_E[e] += tokens_RLE[r, of_layer, e]
    share_P = np.zeros(expert_P.shape[0])
    for r in range(sources):
        for e in range(experts):
            tokens = tokens_RLE[r, of_layer, e] if total_E[e] > 0 else 1.0
            share_P[log2phy_RLE[r, layer, e]] += tokens
    for p in range(expert_P.shape[0]):
        total = total_E[expert_P[p]]
        share_P[p] /= total if total > 0 else sources
    return share_P


@kernel
def shares_of_groups(source_RLE: Float64, layer: int, group_R: Int32, groups: int) -> Float64:
    """Part of each expert's tokens in a layer that each group of source ranks has, float64 ``[G, E]``.

    ``source_RLE`` float64 ``[R, L, E]`` are tokens by source; ranks share an expert evenly that has none. ``group_R``
    int32 ``[R]``, which of so many groups each rank is in.
    """
    ranks, _, experts = source_RLE.shape
    total_E, share_GE = np.zeros(experts), np.zeros((groups, experts))
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
    """Sum a window's steps into episodes, and the episodes' heat into rank loads.

    Parameters
    ----------
    heat_TLE
        ``[T, L, E]``, tokens of each expert.
    layer_K
        int64 ``[K]``, the layers asked for.
    phy2log_KRS, share_KP
        Of these layers: int32 ``[K, R, S]`` their placements, float64 ``[K, R*S]`` as ``loads_of_ranks`` takes it.
    episodes
        N, as for ``sum_episodes``; 0 if episodes are not asked for.
    """
    layers, ranks, _ = phy2log_KRS.shape
    steps, _, experts = heat_TLE.shape
    loads_NKR = np.zeros((episodes, layers, ranks))
    variance_2K = np.zeros((2, layers))
    heat_E = np.empty(experts)
    before_R, jump_R = np.empty(ranks), np.empty(ranks)
    before_E, jump_E = np.empty(experts), np.empty(experts)
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
    """Make ready for ``_add_jumps``; 0, the times so far that there were tokens."""
    before_E[0] = -1.0
    for e in range(jump_E.shape[0]):
        jump_E[e] = 0.0
    return 0


@part
def _add_jumps(heat_E: Float64, tokens: float, before_E: Float64, jump_E: Float64) -> int:
    """Add to ``jump_E`` the squared jumps since ``before_E``, parts of the tokens which become those of ``heat_E``.

    ``tokens`` is the sum of ``heat_E``. Returns how many times it was that there were tokens: 1, or 0.
    """
    if tokens <= 0:
        return 0
    scale, first = 1.0 / tokens, before_E[0] < 0
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


_SKEWED = 0.95
"""Skewness of an expert's episodes, in the mean over the experts, from which on they have bursts: 1.5 to 2.5 on the
bursts of ``make bench-decide``, at most 0.62 on its other heat, but for recorded decoding (up to 1.7)."""
CLEARLY_BETTER = 0.9
"""Part of the squared error without fading that another forecast must stay below to be chosen; chosen by hand so that
static and alternating heat fades in no layer of 256 experts."""
MIN_STEPS_TO_TRIM = 16
"""Episodes of a half below which no mean is trimmed: so few may all lie within one burst."""


class Forecast(NamedTuple):
    """Continuation of a window."""

    half_life: float
    """Episodes after which heat counts half; infinite for no fading."""
    wander: float
    """Squared error of the forecast half a window ahead, as a part of the squared heat; 0 without fading."""
    trimmed: bool = False
    """Experts count as their trimmed means say; then nothing fades."""


def halves_of(heat: Episodes) -> tuple[Episodes, Episodes]:
    """Cut episodes, oldest first, into an older and a newer half."""
    half = heat.share_N.shape[0] // 2

    def part(of_N: slice) -> Episodes:
        share_N = heat.share_N[of_N]
        share_N = share_N / max(share_N.sum(), np.float32(1e-30))
        return Episodes(np.ascontiguousarray(heat.scaled_EN[:, of_N]), share_N)

    return part(slice(half)), part(slice(half, None))


def _fading(episodes: int, half_life_H: Float64) -> Float64:
    """Weights that halve every so many episodes back from the newest, float64 ``[N, H]``."""
    weight_NH: Float64 = 0.5 ** (np.arange(episodes - 1, -1, -1)[:, None] / half_life_H)
    return weight_NH


def _trimmed_mean(scaled_EN: Float32, share_N: Float32) -> Float32:
    """Each expert's mean over the half of the episodes in which it has least, float32 ``[E]``.

    They are scaled to add up to what the plain means do. Episodes without weight are left out. The plain mean where
    every expert is silent in half of the others.
    """
    seen_EN = scaled_EN[:, share_N > 0]
    least = (seen_EN.shape[1] + 1) // 2
    if not least:
        return np.zeros(len(scaled_EN), dtype=np.float32)
    mean_E: Float32 = np.partition(seen_EN, least - 1, axis=1)[:, :least].mean(axis=1)
    plain_E: Float32 = seen_EN.mean(axis=1)
    total = mean_E.sum()
    return mean_E * (plain_E.sum() / total) if total > 0 else plain_E


@kernel
def _skewness(scaled_EN: Float32, share_N: Float32) -> float:
    """Skewness of an expert's episodes with tokens, the mean over the experts that vary; 0 where none does."""
    experts, episodes = scaled_EN.shape
    seen = 0
    for n in range(episodes):
        seen += share_N[n] > 0
    total, varying = 0.0, 0
    for e in range(experts):
        mean = 0.0
        for n in range(episodes):
            if share_N[n] > 0:
                mean += scaled_EN[e, n]
        mean /= max(seen, 1)
        squares, cubes = 0.0, 0.0
        for n in range(episodes):
            if share_N[n] > 0:
                off = scaled_EN[e, n] - mean
                squares += off * off
                cubes += off * off * off
        spread = np.sqrt(squares / max(seen, 1))
        # Beyond what rounding makes of experts that do not vary.
        if spread > 1e-4 * mean:
            total += cubes / max(seen, 1) / spread**3
            varying += 1
    return total / max(varying, 1)


def choose_forecast(heat: Episodes, half_life_H: Float64, trim: bool = True) -> Forecast:
    """Choose the forecast made of the older half of the episodes that is closest to the newer half's mean.

    The first half-life listed stays unless another's squared error, or that of the trimmed mean, is clearly below its
    own; the trimmed mean is for skewed episodes, those of bursts, alone: where two kinds of heat take turns it would
    forecast only one of them. A newer half without tokens says nothing, so the first stays then, too.
    """
    half = heat.share_N.shape[0] // 2
    older_EN, older_N, newer_N = heat.scaled_EN[:, :half], heat.share_N[:half], heat.share_N[half:]
    newer_E = heat.scaled_EN[:, half:] @ newer_N / max(newer_N.sum(), np.float32(1e-30))
    if not newer_E.any():
        return Forecast(float(half_life_H[0]), 0.0)
    weight_NH = older_N[:, None] * _fading(half, half_life_H)
    weight_NH /= np.maximum(weight_NH.sum(axis=0), 1e-30)
    error_H = ((older_EN @ weight_NH - newer_E[:, None]) ** 2).sum(axis=0)
    best = int(error_H.argmin())
    bound = CLEARLY_BETTER * error_H[0]
    if trim and half >= MIN_STEPS_TO_TRIM and _skewness(heat.scaled_EN, heat.share_N) >= _SKEWED:
        error = ((_trimmed_mean(older_EN, older_N) - newer_E) ** 2).sum()
        if error < min(bound, error_H[best]):
            return Forecast(float("inf"), 0.0, trimmed=True)
    if error_H[best] >= bound:
        return Forecast(float(half_life_H[0]), 0.0)
    return Forecast(float(half_life_H[best]), float(error_H[best] / (newer_E**2).sum()))


def forecast_heat(seen: Episodes, forecast: Forecast, ahead: float) -> Heat:
    """Heat as a forecast says, trimmed or leaning to its newest episodes, for ``ahead`` halves of a window later."""
    heat = with_covariance(*(_trimmed(seen) if forecast.trimmed else seen))
    if forecast.trimmed or not np.isfinite(forecast.half_life):
        return heat
    # The covariance stays that of all episodes: a few newest ones say where the heat is, but not how it moves.
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
    """The same heat with each expert's episodes scaled so that its mean is its trimmed mean, and normalised again."""
    mean_E = seen.scaled_EN @ seen.share_N
    trimmed_E = _trimmed_mean(*seen)
    factor_E = np.divide(trimmed_E, mean_E, out=np.zeros_like(mean_E), where=mean_E > 0)
    scaled_NE = np.where(seen.share_N > 0, seen.scaled_EN * factor_E[:, None], 0.0).T
    return episodes_of(np.ascontiguousarray(scaled_NE, dtype=np.float64), round(float(mean_E.sum())))


MAX_LAGS = 16
"""Steps or episodes over which neighbours are taken to resemble each other at most."""


def inflation(values_NK: Float64) -> Float64:
    """Variance of a mean over that of the mean of independent values with the same spread, float64 ``[K]``.

    The lag window is Bartlett's, over a quarter of the values and at most ``MAX_LAGS`` of them. Never below 1: what
    seems to alternate is not trusted. 1 where fewer than two values are given or all are alike.

    References
    ----------
    W. Newey, K. West, *A Simple, Positive Semi-Definite, Heteroskedasticity and Autocorrelation Consistent Covariance
    Matrix*, 1987.
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
    """Standard deviation of ``inflation`` of so many independent values: that of Bartlett's window, 4/3 of lags/values.

    References
    ----------
    T. Anderson, *The Statistical Analysis of Time Series*, 1971, section 9.4.
    """
    lags = min(MAX_LAGS, count // 4)
    return float(np.sqrt(4.0 * lags / (3.0 * count))) if count else 0.0


def standard_error(values_N: Float64) -> float:
    """Standard error of the mean of values in order, float64 ``[N]``; infinite for fewer than two."""
    if values_N.size < 2:
        return np.inf
    return float(np.sqrt(values_N.var(ddof=1) * inflation(values_N[:, None])[0] / values_N.size))
