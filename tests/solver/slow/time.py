"""Slow twins of the time under a cost curve with floor, read, launch and slope."""

from __future__ import annotations

import numpy as np


def slot_us(tokens: float, curve: np.ndarray) -> float:
    _, read, launch, slope = curve.tolist()
    return max(read, launch + slope * tokens) if tokens > 0 else 0.0


def mean_slowest(
    heat_NE: np.ndarray, phy2log_RS: np.ndarray, share_RS: np.ndarray, curve: np.ndarray
) -> float:
    """Return the slowest rank's time, averaged over steps with tokens; without tokens, only the floor."""
    slowest = [
        max(
            sum(slot_us(tokens_E[e] * share, curve) for e, share in zip(experts_S, shares_S, strict=True))
            for experts_S, shares_S in zip(phy2log_RS, share_RS, strict=True)
        )
        for tokens_E in heat_NE
        if tokens_E.sum() > 0
    ]
    return float(curve[0]) + (float(np.mean(slowest)) if slowest else 0.0)


def shares_of(phy2log_RS: np.ndarray, log2phy_GE: np.ndarray, share_GE: np.ndarray) -> np.ndarray:
    """Return each slot's share of its expert's tokens."""
    share_P = np.zeros(phy2log_RS.size)
    for table_E, sent_E in zip(log2phy_GE, share_GE, strict=True):
        for physical, share in zip(table_E, sent_E, strict=True):
            share_P[physical] += share
    return share_P.reshape(phy2log_RS.shape)


def through_tables(heat_NE, phy2log_RS, log2phy_GE, share_GE, curve) -> float:
    return mean_slowest(heat_NE, phy2log_RS, shares_of(phy2log_RS, log2phy_GE, share_GE), curve)
