"""The optimal split of a step, computed as a linear program and as the maximum over all sets of ranks."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from scipy.optimize import linprog


def optimum(phy2log_RS: np.ndarray, heat_E: np.ndarray) -> float:
    """Return the lowest possible load of the hottest rank, as computed by HiGHS."""
    ranks, slots = phy2log_RS.shape
    expert_P = phy2log_RS.ravel()
    of_expert_EP = (expert_P[None] == np.arange(len(heat_E))[:, None]).astype(float)
    on_rank_RP = np.repeat(np.eye(ranks), slots, axis=1)
    answer = linprog(
        np.append(np.zeros(expert_P.size), 1.0),
        A_ub=np.hstack([on_rank_RP, -np.ones((ranks, 1))]),
        b_ub=np.zeros(ranks),
        A_eq=np.hstack([of_expert_EP, np.zeros((len(heat_E), 1))]),
        b_eq=heat_E,
        method="highs",
    )
    assert answer.success
    return float(answer.fun)


def bound_of(phy2log_RS: np.ndarray, heat_E: np.ndarray, inside_R: np.ndarray) -> float:
    """Return a lower bound on the peak load: the mean load of a set of ranks from experts with no replica elsewhere."""
    outside = set(phy2log_RS[~inside_R].ravel().tolist())
    held = [heat_E[e] for e in range(len(heat_E)) if e not in outside]
    return float(sum(held)) / int(inside_R.sum())


def by_sets(phy2log_RS: np.ndarray, heat_E: np.ndarray) -> float:
    """Compute the optimum a second way: the maximum of ``bound_of`` over all sets of ranks."""
    ranks = len(phy2log_RS)
    masks = []
    for size in range(1, ranks + 1):
        for chosen in combinations(range(ranks), size):
            inside_R = np.zeros(ranks, dtype=bool)
            inside_R[list(chosen)] = True
            masks.append(inside_R)
    return max(bound_of(phy2log_RS, heat_E, inside_R) for inside_R in masks)
