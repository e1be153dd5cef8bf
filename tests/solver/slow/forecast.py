"""How old heat fades, what is left without bursts, which half-life forecast best, what the hold-out recommends."""

from __future__ import annotations

import math

import numpy as np


def fading(episodes, half_life):
    """Each episode counts half of one ``half_life`` episodes younger; together they count 1."""
    weight_N = [
        1.0 if math.isinf(half_life) else 0.5 ** (age / half_life) for age in reversed(range(episodes))
    ]
    return np.array(weight_N) / sum(weight_N)


def faded_mean(scaled_EN, share_N, half_life):
    """Mean heat of each expert, old episodes faded, those without tokens left out."""
    weight_N = share_N * fading(len(share_N), half_life)
    return scaled_EN @ weight_N / weight_N.sum() if weight_N.sum() > 0 else np.zeros(len(scaled_EN))


def trimmed_mean(scaled_EN, share_N):
    """Each expert's mean over the half of its episodes with least, those without tokens left out, in all as hot."""
    mean_E = scaled_EN @ share_N
    seen_EN = scaled_EN[:, share_N > 0]
    least = math.ceil(seen_EN.shape[1] / 2)
    if least == 0:
        return mean_E
    low_E = np.array([sum(sorted(row_N)[:least]) / least for row_N in seen_EN.tolist()])
    return low_E * mean_E.sum() / low_E.sum() if low_E.sum() > 0 else mean_E


def trimmed_heat(scaled_EN, share_N, ranks):
    """Each expert's episodes scaled to its trimmed mean, and each episode to a mean rank load of 1."""
    mean_E, wanted_E = scaled_EN @ share_N, trimmed_mean(scaled_EN, share_N)
    found_EN = np.zeros_like(scaled_EN)
    for n in np.flatnonzero(share_N):
        for e in np.flatnonzero(mean_E):
            found_EN[e, n] = scaled_EN[e, n] * wanted_E[e] / mean_E[e]
        if found_EN[:, n].sum() > 0:
            found_EN[:, n] *= ranks / found_EN[:, n].sum()
    return found_EN


def squared_errors(older, newer, half_lives):
    """Of each half-life's forecast for the newer half; ``older`` and ``newer`` are normalised heat and shares."""
    wanted_E = newer[0] @ newer[1]
    return [((faded_mean(*older, half_life) - wanted_E) ** 2).sum() for half_life in half_lives]


def recommended(now, costs, min_gain):
    """The first of the cheapest actions, each of which must win ``min_gain`` over the best before it; -1 for none.

    ``costs`` are in the order in which actions are tried.
    """
    best, chosen = now, -1
    for recommendation, cost in enumerate(costs):
        if cost < best - min_gain:
            best, chosen = cost, recommendation
    return chosen
