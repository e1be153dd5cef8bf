"""What each kernel computes, written as plainly as possible."""

from __future__ import annotations

import numpy as np


def normalise(heat_NE, weight_N, ranks):
    scaled_EN = np.zeros(heat_NE.shape[::-1])
    share_N = np.zeros(len(heat_NE))
    for n, heat_E in enumerate(heat_NE):
        if heat_E.sum() > 0:
            scaled_EN[:, n] = heat_E / heat_E.sum() * ranks
            share_N[n] = weight_N[n]
    return scaled_EN, share_N / share_N.sum() if share_N.sum() > 0 else share_N


def rank_series(phy2log_RS, share_RS, scaled_EN):
    """Load of each rank in each episode."""
    return np.array(
        [
            sum((share * scaled_EN[expert] for expert, share in zip(row, shares, strict=True)), 0.0)
            for row, shares in zip(phy2log_RS, share_RS, strict=True)
        ]
    )


def rank_risks(phy2log_RS, share_RS, scaled_EN, share_N, z):
    load_RN = rank_series(phy2log_RS, share_RS, scaled_EN)
    mean_R = load_RN @ share_N
    variance_R = ((load_RN - mean_R[:, None]) ** 2) @ share_N
    return mean_R + z * np.sqrt(variance_R)


def mean_of_max(scaled_EN, share_N, phy2log_RS, share_RS):
    if share_N.sum() == 0:
        return 1.0
    return float(rank_series(phy2log_RS, share_RS, scaled_EN).max(axis=0) @ share_N)


def even_shares(phy2log_RS):
    copies = {expert: (phy2log_RS == expert).sum() for expert in np.unique(phy2log_RS)}
    return np.array([[1 / copies[expert] for expert in row] for row in phy2log_RS])


def pressures(risk_R):
    mean, peak = risk_R.mean(), risk_R.max()
    base = mean - 3 * (peak - mean)
    return np.maximum((risk_R - base) / max(peak - base, 1e-6), 0) ** 8, base, max(peak - base, 1e-6)


def pressure_of(risk_R, base, span):
    return (np.maximum((risk_R - base) / span, 0) ** 8).sum()


def hand_out(copies_E, heat_E, budget, ranks):
    copies_E = copies_E.copy()
    for left in range(budget, 0, -1):
        open_E = [expert for expert in range(len(copies_E)) if copies_E[expert] < ranks]
        if not open_E:
            return copies_E, left
        hottest = max(open_E, key=lambda expert: (heat_E[expert] / copies_E[expert], -expert))
        copies_E[hottest] += 1
    return copies_E, 0


def legal_swaps(phy2log_RS, hot):
    """Every swap of ``hot`` with another rank that puts no expert twice on a rank."""
    for slot, out in enumerate(phy2log_RS[hot]):
        for rank, row in enumerate(phy2log_RS):
            if rank == hot or out in row:
                continue
            for other, come in enumerate(row):
                if come not in phy2log_RS[hot]:
                    yield slot, rank, other


def legal_exchanges(phy2log_RS, hot):
    """Every spare copy elsewhere that may become a copy of one of ``hot``'s experts."""
    for slot, gainer in enumerate(phy2log_RS[hot]):
        for rank, row in enumerate(phy2log_RS):
            if gainer in row:
                continue
            for other, loser in enumerate(row):
                if (phy2log_RS == loser).sum() > 1:
                    yield slot, rank, other
