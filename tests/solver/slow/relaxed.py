"""Slow twin of the relaxed splits of the step search: pairs of ranks exchange tokens, one step at a time."""

from __future__ import annotations

from itertools import pairwise

import numpy as np


def loads(phy2log_RS: np.ndarray, scaled_EN: np.ndarray, sweeps: int) -> np.ndarray:
    """Return the rank loads in each step after some sweeps from the even split, ``[R, N]``."""
    return np.stack(
        [_loads_of_step(phy2log_RS, heat_E, sweeps) for heat_E in scaled_EN.T.astype(float)], axis=1
    )


def _loads_of_step(phy2log_RS: np.ndarray, heat_E: np.ndarray, sweeps: int) -> np.ndarray:
    holders = [np.flatnonzero((phy2log_RS == e).any(axis=1)).tolist() for e in range(len(heat_E))]
    tokens = {(e, r): heat_E[e] / len(ranks) for e, ranks in enumerate(holders) for r in ranks}
    load_R = np.zeros(len(phy2log_RS))
    for (_, r), flow in tokens.items():
        load_R[r] += flow
    for _ in range(sweeps):
        for e, ranks in enumerate(holders):
            ring = [*ranks, ranks[0]] if len(ranks) > 2 else ranks
            for a, b in pairwise(ring):
                hot, cool = (a, b) if load_R[a] > load_R[b] else (b, a)
                moved = min((load_R[hot] - load_R[cool]) / 2, tokens[e, hot])
                tokens[e, hot] -= moved
                tokens[e, cool] += moved
                load_R[hot] -= moved
                load_R[cool] += moved
    return load_R
