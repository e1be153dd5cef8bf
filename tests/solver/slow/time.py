"""Slow, plain twins of what placements and tables take under a cost curve."""

from __future__ import annotations

import numpy as np

from eplb_service.solver.time.evaluation import Curve


def slot_us(tokens: float, curve: Curve) -> float:
    return max(curve.read, curve.launch + curve.slope * tokens) if tokens > 0 else 0.0


def rank_us(tokens_E: np.ndarray, experts_S: list[int], shares_S: list[float], curve: Curve) -> float:
    """One rank in one step, the floor left out."""
    return sum(slot_us(tokens_E[e] * share, curve) for e, share in zip(experts_S, shares_S, strict=True))


def mean_slowest(heat_NE: np.ndarray, phy2log_RS: np.ndarray, share_RS: np.ndarray, curve: Curve) -> float:
    """Mean over the steps with tokens of the slowest rank's time; the floor alone where there are none."""
    busy = [tokens_E for tokens_E in heat_NE if tokens_E.sum() > 0]
    slowest = [
        max(
            rank_us(tokens_E, list(experts_S), list(shares_S), curve)
            for experts_S, shares_S in zip(phy2log_RS, share_RS, strict=True)
        )
        for tokens_E in busy
    ]
    return curve.floor + (float(np.mean(slowest)) if busy else 0.0)


def shares_of(phy2log_RS: np.ndarray, log2phy_GE: np.ndarray, share_GE: np.ndarray) -> np.ndarray:
    """What each slot receives of its expert's tokens."""
    share_P = np.zeros(phy2log_RS.size)
    for table_E, sent_E in zip(log2phy_GE, share_GE, strict=True):
        for physical, share in zip(table_E, sent_E, strict=True):
            share_P[physical] += share
    return share_P.reshape(phy2log_RS.shape)


def through_tables(heat_NE, phy2log_RS, log2phy_GE, share_GE, curve) -> float:
    return mean_slowest(heat_NE, phy2log_RS, shares_of(phy2log_RS, log2phy_GE, share_GE), curve)
