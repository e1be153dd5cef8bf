"""Heat that tests of the planner draw."""

from __future__ import annotations

import numpy as np


def still_heat(
    steps: int, layers: int, experts: int, tokens: int, seed: int = 0, skew: float = 1.0
) -> np.ndarray:
    """One popularity per layer, drawn again each step, int64 ``[T, L, E]``; the smaller ``skew``, the less even."""
    generator = np.random.default_rng(seed)
    popularity_LE = generator.dirichlet(np.full(experts, skew), layers)
    return np.stack([generator.multinomial(tokens, row_E, size=steps) for row_E in popularity_LE], axis=1)
