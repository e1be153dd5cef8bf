"""Slow twins of forecasts: exponential weights, trimmed means, forecast errors, and the hold-out's recommendation."""

from __future__ import annotations

import math

import numpy as np


def fading(episodes, half_life):
    """Return weights that sum to 1 and halve with every ``half_life`` episodes of age."""
    weight_N = [
        1.0 if math.isinf(half_life) else 0.5 ** (age / half_life) for age in reversed(range(episodes))
    ]
    return np.array(weight_N) / sum(weight_N)


def faded_mean(scaled_EN, share_N, half_life):
    """Return the weighted mean heat of each expert, ignoring episodes without tokens."""
    weight_N = share_N * fading(len(share_N), half_life)
    return scaled_EN @ weight_N / weight_N.sum() if weight_N.sum() > 0 else np.zeros(len(scaled_EN))


def trimmed_mean(scaled_EN, share_N):
    """Return each expert's mean over the half of its episodes with the fewest tokens.

    The means are scaled so that their total equals the total of the untrimmed means.
    """
    mean_E = scaled_EN @ share_N
    busy_EN = scaled_EN[:, share_N > 0]
    kept = math.ceil(busy_EN.shape[1] / 2)
    if kept == 0:
        return mean_E
    low_E = np.array([sum(sorted(row_N)[:kept]) / kept for row_N in busy_EN.tolist()])
    return low_E * mean_E.sum() / low_E.sum() if low_E.sum() > 0 else mean_E


def trimmed_heat(scaled_EN, share_N, ranks):
    """Scale each expert's episodes to the expert's trimmed mean, and each episode to a mean rank load of 1."""
    mean_E = scaled_EN @ share_N
    trimmed_E = trimmed_mean(scaled_EN, share_N)
    trimmed_EN = np.zeros_like(scaled_EN)
    for n in np.flatnonzero(share_N):
        for e in np.flatnonzero(mean_E):
            trimmed_EN[e, n] = scaled_EN[e, n] * trimmed_E[e] / mean_E[e]
        if trimmed_EN[:, n].sum() > 0:
            trimmed_EN[:, n] *= ranks / trimmed_EN[:, n].sum()
    return trimmed_EN


def squared_errors(older, newer, half_lives):
    """Return each half-life's squared forecast error. ``older`` and ``newer`` are each half's heat and weights."""
    newer_E = newer[0] @ newer[1]
    return [((faded_mean(*older, half_life) - newer_E) ** 2).sum() for half_life in half_lives]


def recommended(now, costs, min_gain):
    """Return the last action that is cheaper by ``min_gain`` than the best action before it, or -1 if there is none.

    ``costs`` are in action order.
    """
    best = now
    chosen = -1
    for recommendation, cost in enumerate(costs):
        if cost < best - min_gain:
            best = cost
            chosen = recommendation
    return chosen
