"""How a window goes on: the heat to place a layer for, fitted to its older half and judged on its newer one.

By default every episode counts the same. Where heat drifts, old episodes fade. Where experts have bursts, which come
and go within a window, the mean of a window says more of which bursts it happened to see than of what comes: there
each expert counts as its trimmed mean says, the mean over the half of the episodes in which it has least, and its
episodes are scaled to that. Which of these continues a layer best the window itself says.

References
----------
P. Huber, *Robust Estimation of a Location Parameter*, 1964. FlashLB (vLLM-Ascend pull request 3042) takes the episodes
of its window as they are.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from eplb_service.solver.model import Float32, Float64, Heat, heat_of, reweighted

CLEARLY_BETTER = 0.9
"""Part of the squared error without fading that another forecast must stay below to be chosen; chosen by hand so that
static and alternating heat fades in no layer of 256 experts."""
FEWEST_TO_TRIM = 16
"""Episodes of a half below which no mean is trimmed: so few may all lie within one burst."""


class Halves(NamedTuple):
    """A window cut in the middle, every episode weighing the same."""

    older: Heat
    newer: Heat


class Forecast(NamedTuple):
    """How the window is best continued."""

    half_life: float
    """Episodes after which heat counts half; infinite for no fading."""
    wander: float
    """Squared error of the forecast half a window ahead, as a part of the squared heat; 0 without fading."""
    trimmed: bool = False
    """Whether experts count as their trimmed means say; then nothing fades."""


def halves_of(heat_NE: Float64, ranks: int) -> Halves:
    """Cut episodes ``[N, E]``, oldest first, into two halves."""
    half = heat_NE.shape[0] // 2
    return Halves(heat_of(heat_NE[:half], ranks), heat_of(heat_NE[half:], ranks))


def fading(episodes: int, half_life: float) -> Float64:
    """Weights that halve every ``half_life`` episodes back from the newest, float64 ``[N]``, summing to 1."""
    weight_N: Float64 = 0.5 ** (np.arange(episodes - 1, -1, -1) / half_life)
    weight_N /= weight_N.sum()
    return weight_N


def trimmed_mean(heat: Heat) -> Float32:
    """Each expert's mean over the half of the episodes in which it has least, float32 ``[E]``.

    They are scaled to add up to what the plain means do. Episodes without tokens are left out. The plain mean where
    every expert is silent in half of the others.
    """
    seen_EN = heat.scaled_EN[:, heat.share_N > 0]
    least = (seen_EN.shape[1] + 1) // 2
    if not least:
        return heat.demand.mean_E
    mean_E: Float32 = np.partition(seen_EN, least - 1, axis=1)[:, :least].mean(axis=1)
    total = mean_E.sum()
    return mean_E * (heat.demand.mean_E.sum() / total) if total > 0 else heat.demand.mean_E


def choose_forecast(halves: Halves, half_life_H: Float64, trim: bool = True) -> Forecast:
    """The forecast made of the older half that is closest to the newer half's mean.

    The first half-life listed stays unless another's squared error, or that of the trimmed mean, is clearly below its
    own. A newer half without tokens says nothing, so the first stays then, too.

    Parameters
    ----------
    halves
        The window's older and newer half.
    half_life_H
        float64 ``[H]``, half-lives in episodes.
    trim
        Whether trimmed means are tried, where there are enough episodes.
    """
    older, newer_E = halves.older, halves.newer.demand.mean_E
    if not newer_E.any():
        return Forecast(float(half_life_H[0]), 0.0)
    episodes = older.share_N.shape[0]
    weight_NH = np.stack([older.share_N * fading(episodes, h) for h in half_life_H], axis=1)
    weight_NH /= np.maximum(weight_NH.sum(axis=0), 1e-30)
    error_H = ((older.scaled_EN @ weight_NH - newer_E[:, None]) ** 2).sum(axis=0)
    best = int(error_H.argmin())
    bound = CLEARLY_BETTER * error_H[0]
    if trim and episodes >= FEWEST_TO_TRIM:
        error = ((trimmed_mean(older) - newer_E) ** 2).sum()
        if error < min(bound, error_H[best]):
            return Forecast(float("inf"), 0.0, trimmed=True)
    if error_H[best] >= bound:
        return Forecast(float(half_life_H[0]), 0.0)
    return Forecast(float(half_life_H[best]), float(error_H[best] / (newer_E**2).sum()))


def forecast_heat(heat: Heat, forecast: Forecast, ahead: float) -> Heat:
    """Heat as a forecast says, trimmed or leaning to its newest episodes, for ``ahead`` halves of a window later."""
    if forecast.trimmed:
        return trimmed_heat(heat)
    if not np.isfinite(forecast.half_life):
        return heat
    weight_N = heat.share_N * fading(heat.share_N.shape[0], forecast.half_life)
    total = weight_N.sum()
    if total == 0:
        return heat
    return reweighted(heat, (weight_N / total).astype(np.float32), ahead * forecast.wander)


def trimmed_heat(heat: Heat) -> Heat:
    """The same heat with each expert's episodes scaled so that its mean is its trimmed mean, and normalised again."""
    mean_E, ranks = heat.demand.mean_E, round(float(heat.demand.mean_E.sum()))
    factor_E = np.divide(trimmed_mean(heat), mean_E, out=np.zeros_like(mean_E), where=mean_E > 0)
    scaled_NE = np.where(heat.share_N > 0, heat.scaled_EN * factor_E[:, None], 0.0).T
    return heat_of(np.ascontiguousarray(scaled_NE, dtype=np.float64), ranks)
