"""Shapes and heat that solver tests draw from, the awkward ones included."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

KNOWN_EXAMPLE = np.array([600, 560, 120, 120, 20, 10, 10, 10], dtype=np.float64)
"""Eight experts for 8 ranks x 2 slots; 196.67 is the proven optimum with even shares."""


@dataclass(frozen=True)
class Case:
    """One layer to solve."""

    ranks: int
    slots: int
    heat_NE: np.ndarray

    @property
    def experts(self) -> int:
        return int(self.heat_NE.shape[1])


@st.composite
def cases(draw: st.DrawFn, most_ranks: int = 8, most_slots: int = 5) -> Case:
    """Any shape that can be placed, and heat of any kind."""
    ranks = draw(st.integers(1, most_ranks))
    slots = draw(st.integers(1, most_slots))
    experts = draw(st.integers(slots, ranks * slots))
    episodes = draw(st.integers(1, 6))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind = draw(st.sampled_from(("even", "skewed", "zero", "one hot", "sparse")))
    heat_NE = generator.integers(1, 100, (episodes, experts)).astype(np.float64)
    if kind == "skewed":
        heat_NE *= np.exp(generator.normal(0, 2, experts))
    elif kind == "zero":
        heat_NE[:] = 0
    elif kind == "one hot":
        heat_NE[:, 1:] = 0
    elif kind == "sparse":
        heat_NE *= generator.random((episodes, experts)) < 0.3
    return Case(ranks, slots, heat_NE)
