"""How fast old heat should fade, chosen by what would have forecast the newer half of the window best."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from eplb_service.solver.arrays import Float64
from eplb_service.solver.problem import Heat, heat_of, leant

FEWEST_EPISODES = 4
"""Below it there is no older half worth fitting."""

CLEARLY_BETTER = 0.9
"""Part of the squared error without fading that a half-life must stay below to be chosen."""


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


def halves_of(heat_NE: Float64, ranks: int) -> Halves:
    """Cut episodes ``[N, E]``, oldest first, into two halves."""
    half = heat_NE.shape[0] // 2
    return Halves(heat_of(heat_NE[:half], ranks), heat_of(heat_NE[half:], ranks))


def fading(episodes: int, half_life: float) -> Float64:
    """Weights that halve every ``half_life`` episodes back from the newest, float64 ``[N]``, summing to 1."""
    weight_N: Float64 = 0.5 ** (np.arange(episodes - 1, -1, -1) / half_life)
    weight_N /= weight_N.sum()
    return weight_N


def choose_forecast(halves: Halves, half_life_H: Float64) -> Forecast:
    """The half-life, of ``half_life_H`` in episodes, whose faded mean of the older half is closest to the newer's.

    The first one listed stays unless another's squared error is clearly below its own. A newer half without tokens
    says nothing, so the first stays then, too.
    """
    older, newer_E = halves.older, halves.newer.demand.mean_E
    if not newer_E.any():
        return Forecast(float(half_life_H[0]), 0.0)
    weight_NH = np.stack([older.share_N * fading(older.share_N.shape[0], h) for h in half_life_H], axis=1)
    weight_NH /= np.maximum(weight_NH.sum(axis=0), 1e-30)
    error_H = ((older.scaled_EN @ weight_NH - newer_E[:, None]) ** 2).sum(axis=0)
    best = int(error_H.argmin())
    if error_H[best] >= CLEARLY_BETTER * error_H[0]:
        return Forecast(float(half_life_H[0]), 0.0)
    return Forecast(float(half_life_H[best]), float(error_H[best] / (newer_E**2).sum()))


def leaning(heat: Heat, forecast: Forecast, ahead: float) -> Heat:
    """Heat that leans to its newest episodes as a forecast says, for use ``ahead`` halves of a window later."""
    if not np.isfinite(forecast.half_life):
        return heat
    weight_N = heat.share_N * fading(heat.share_N.shape[0], forecast.half_life)
    total = weight_N.sum()
    if total == 0:
        return heat
    return leant(heat, (weight_N / total).astype(np.float32), ahead * forecast.wander)
