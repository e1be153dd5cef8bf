"""Slow twins of heat, loads, risks, hottest ranks and ratios, computed episode by episode."""

from __future__ import annotations

import itertools

import numpy as np


def normalise(heat_NE, weight_N, ranks):
    scaled_EN = np.zeros(heat_NE.shape[::-1])
    share_N = np.zeros(len(heat_NE))
    for n, heat_E in enumerate(heat_NE):
        if heat_E.sum() > 0:
            scaled_EN[:, n] = heat_E / heat_E.sum() * ranks
            share_N[n] = weight_N[n]
    return scaled_EN, share_N / share_N.sum() if share_N.sum() > 0 else share_N


def demand_of(scaled_EN, share_N):
    """Return the weighted mean and covariance of the heat."""
    mean_E = np.array([sum(share_N * heat_N) for heat_N in scaled_EN])
    experts = len(mean_E)
    gram_EE = np.zeros((experts, experts))
    for a in range(experts):
        for b in range(experts):
            gram_EE[a, b] = sum(share_N * (scaled_EN[a] - mean_E[a]) * (scaled_EN[b] - mean_E[b]))
    return mean_E, gram_EE


def risk_of(series_N, share_N, z):
    """Return mean + z*std of one rank's load over the episodes."""
    mean = sum(share_N * series_N)
    return mean + z * np.sqrt(sum(share_N * (series_N - mean) ** 2))


def even_shares(phy2log_RS):
    return np.array([[1 / (phy2log_RS == expert).sum() for expert in row] for row in phy2log_RS])


def rank_series(phy2log_RS, share_RS, scaled_EN):
    """Return each rank's load in each episode."""
    return np.array(
        [
            sum((share * scaled_EN[expert] for expert, share in zip(row, shares, strict=True)), 0.0)
            for row, shares in zip(phy2log_RS, share_RS, strict=True)
        ]
    )


def rank_risks(phy2log_RS, share_RS, scaled_EN, share_N, z):
    return np.array(
        [risk_of(series_N, share_N, z) for series_N in rank_series(phy2log_RS, share_RS, scaled_EN)]
    )


def mean_of_max(scaled_EN, share_N, phy2log_RS, share_RS):
    if sum(share_N) == 0:
        return 1.0
    return float(sum(rank_series(phy2log_RS, share_RS, scaled_EN).max(axis=0) * share_N))


def sum_episodes(heat_TLE, episodes):
    """Sum steps ``n*T//N`` to ``(n+1)*T//N`` into episode ``n``."""
    steps = len(heat_TLE)
    bounds = [n * steps // episodes for n in range(episodes + 1)]
    return np.array([heat_TLE[first:after].sum(axis=0) for first, after in itertools.pairwise(bounds)], float)


def loads_of_ranks(heat_NLE, phy2log_LRS, share_LP):
    layers, ranks, slots = phy2log_LRS.shape
    loads_NLR = np.zeros((len(heat_NLE), layers, ranks))
    for n, heat_LE in enumerate(heat_NLE):
        for layer in range(layers):
            for p, expert in enumerate(phy2log_LRS[layer].ravel()):
                loads_NLR[n, layer, p // slots] += heat_LE[layer, expert] * share_LP[layer, p]
    return loads_NLR


def volatility(heat_NLE, replicas_LE):
    """Return half the mean squared jump of each expert's heat between episodes, per replica, summed over a layer."""
    variance_L = []
    for layer in range(heat_NLE.shape[1]):
        parts_NE = [heat_E / heat_E.sum() for heat_E in heat_NLE[:, layer] if heat_E.sum() > 0]
        jumps_NE = [(now_E - before_E) ** 2 / 2 for before_E, now_E in itertools.pairwise(parts_NE)]
        variance_L.append(sum(sum(jumps_NE) / len(jumps_NE) / replicas_LE[layer]) if jumps_NE else 0.0)
    return np.array(variance_L)


def hottest(load_RN):
    """Return each episode's three hottest ranks and their loads, clipped at 0. Missing ranks are ``R``, with load 0."""
    ranks, episodes = load_RN.shape
    padded_RN = np.vstack([np.maximum(load_RN, 0), np.zeros((1, episodes))])
    rank_KN = np.argsort(-load_RN, axis=0, kind="stable")[:3]
    rank_KN = np.vstack([rank_KN, np.full((3, episodes), ranks)])[:3]
    return rank_KN, np.take_along_axis(padded_RN, rank_KN, axis=0)


def ratio(load_RN, share_N):
    return float(sum(share * max(load_R) for share, load_R in zip(share_N, load_RN.T, strict=True)))
