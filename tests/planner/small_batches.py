"""Heat such as a router produces from small batches."""

from __future__ import annotations

import numpy as np

EXPERTS = 32
RANKS = 8
SLOTS = 5
LAYERS = 4
CHOICES = 4


def routed(steps: int, tokens: int, skew: float = 0.8, seed: int = 0) -> np.ndarray:
    """Draw steps in which a router chooses distinct experts for each token, int64 ``[T, L, E]``."""
    generator = np.random.default_rng([seed, tokens])
    heat_TLE = np.zeros((steps, LAYERS, EXPERTS), dtype=np.int64)
    for layer in range(LAYERS):
        log_E = -skew * np.log(generator.permutation(EXPERTS) + 1.0)
        score_TNE = log_E + generator.gumbel(size=(steps, tokens, EXPERTS))
        chosen_TNK = np.argpartition(-score_TNE, CHOICES, axis=2)[:, :, :CHOICES]
        for step, chosen_NK in enumerate(chosen_TNK):
            heat_TLE[step, layer] = np.bincount(chosen_NK.ravel(), minlength=EXPERTS)
    return heat_TLE
