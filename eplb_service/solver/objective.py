"""What the search minimises: the hottest rank's mean + z*std over the episodes, with full covariance.

An episode's heat is scaled so that the mean rank load is 1; a layer's risk then reads as a peak-to-average ratio.
All that is needed of the episodes is each expert's mean and the experts' covariance, so the cost of a candidate
does not grow with their number. Dimensions in names: N episodes, E experts, R ranks, S slots.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from eplb_service.solver.arrays import Float32, Float64, Int32
from eplb_service.solver.jit import kernel

SMALLEST_GAIN = 1e-5
"""Peak-to-average ratio below which a change is rounding, not progress."""


class Demand(NamedTuple):
    """One layer's heat as the search sees it; mean rank load 1."""

    mean_E: Float32
    """float32 ``[E]``, weighted mean over episodes."""
    gram_EE: Float32
    """float32 ``[E, E]``, weighted covariance over episodes."""


@kernel
def normalise(heat_NE: Float64, weight_N: Float64, ranks: int) -> tuple[Float32, Float32]:
    """Scale each episode to a mean rank load of 1 and the weights to a sum of 1.

    Returns float32 ``[E, N]`` and float32 ``[N]``; episodes without tokens get no weight. All zero where there are
    no tokens at all.
    """
    episodes, experts = heat_NE.shape
    scaled_EN = np.zeros((experts, episodes), dtype=np.float32)
    share_N = np.zeros(episodes, dtype=np.float32)
    total_weight = 0.0
    for n in range(episodes):
        tokens = heat_NE[n].sum()
        if tokens > 0:
            total_weight += weight_N[n]
            for e in range(experts):
                scaled_EN[e, n] = heat_NE[n, e] * ranks / tokens
            share_N[n] = weight_N[n]
    if total_weight > 0:
        for n in range(episodes):
            share_N[n] /= total_weight
    return scaled_EN, share_N


@kernel
def demand_of(scaled_EN: Float32, share_N: Float32) -> Demand:
    """Mean and covariance of normalised heat, as a ``Demand``."""
    experts, episodes = scaled_EN.shape
    mean_E = np.zeros(experts, dtype=np.float32)
    centred_EN = np.empty((experts, episodes), dtype=np.float32)
    root_N = np.sqrt(share_N)
    for e in range(experts):
        mean = np.float32(0.0)
        for n in range(episodes):
            mean += share_N[n] * scaled_EN[e, n]
        mean_E[e] = mean
        for n in range(episodes):
            centred_EN[e, n] = root_N[n] * (scaled_EN[e, n] - mean)
    gram_EE = np.empty((experts, experts), dtype=np.float32)
    for a in range(experts):
        for b in range(a + 1):
            dot = np.float32(0.0)
            for n in range(episodes):
                dot += centred_EN[a, n] * centred_EN[b, n]
            gram_EE[a, b] = dot
            gram_EE[b, a] = dot
    return Demand(mean_E, gram_EE)


@kernel
def risk(load: float, variance: float, z: float) -> float:
    """Mean + z*std of one load; rounding may have left the variance a hair below zero."""
    found: float = load + z * np.sqrt(max(variance, np.float32(0.0)))
    return found


@kernel
def expert_heat(demand: Demand, z: float) -> Float32:
    """Mean + z*std of each expert, float32 ``[E]``."""
    heat_E = np.empty_like(demand.mean_E)
    for e in range(heat_E.shape[0]):
        heat_E[e] = risk(demand.mean_E[e], demand.gram_EE[e, e], z)
    return heat_E


@kernel
def mean_of_max(scaled_EN: Float32, share_N: Float32, phy2log_RS: Int32, weight_RS: Float32) -> float:
    """Peak-to-average ratio: the hottest rank of each episode, averaged with the episodes' weights.

    ``weight_RS`` is the part of its expert's tokens that each slot receives. 1.0 where there are no tokens.
    """
    ranks, slots = phy2log_RS.shape
    episodes = scaled_EN.shape[1]
    peak_N = np.zeros(episodes, dtype=np.float32)
    load_N = np.empty(episodes, dtype=np.float32)
    for r in range(ranks):
        load_N[:] = 0
        for s in range(slots):
            weight = weight_RS[r, s]
            expert_N = scaled_EN[phy2log_RS[r, s]]
            for n in range(episodes):
                load_N[n] += weight * expert_N[n]
        for n in range(episodes):
            peak_N[n] = max(peak_N[n], load_N[n])
    total = 0.0
    weights = 0.0
    for n in range(episodes):
        total += peak_N[n] * share_N[n]
        weights += share_N[n]
    return total if weights > 0 else 1.0
