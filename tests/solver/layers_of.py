"""Hypothesis strategies for shapes and heat in solver tests, including awkward ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

KNOWN_EXAMPLE = np.array([600, 560, 120, 120, 20, 10, 10, 10], dtype=np.float64)
"""Heat of eight experts for 8 ranks x 2 slots. With even shares, the proven optimum is 196.67."""

PLAIN = ("even", "skewed")
KINDS = (*PLAIN, "zero", "one hot", "sparse", "bursty", "alternating", "huge")


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
def shapes(draw: st.DrawFn, most_ranks: int, most_slots: int) -> tuple[int, int, int]:
    """Draw ranks, slots and experts that fit together. Tight, loose, single and indivisible shapes are frequent."""
    ranks = draw(st.integers(1, most_ranks))
    slots = draw(st.integers(1, most_slots))
    kind = draw(st.sampled_from(("any", "any", "one slot", "no redundancy", "much redundancy", "one rank")))
    if kind == "one slot":
        slots = 1
    elif kind == "one rank":
        ranks = 1
    if kind == "no redundancy":
        return ranks, slots, ranks * slots
    if kind == "much redundancy":
        return ranks, slots, min(ranks * slots, slots + draw(st.integers(0, 1)))
    return ranks, slots, draw(st.integers(slots, ranks * slots))


@st.composite
def cases(draw: st.DrawFn, most_ranks: int = 8, most_slots: int = 5, kinds: tuple[str, ...] = KINDS) -> Case:
    """Draw any feasible shape, with any kind of heat in a window of one to six episodes."""
    ranks, slots, experts = draw(shapes(most_ranks, most_slots))
    episodes = draw(st.integers(1, 6))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return Case(ranks, slots, heat_of_kind(draw(st.sampled_from(kinds)), episodes, experts, generator))


def heat_of_kind(kind: str, episodes: int, experts: int, generator: np.random.Generator) -> np.ndarray:
    """Draw heat of one of ``KINDS``, float64 ``[N, E]``."""
    heat_NE = generator.integers(1, 100, (episodes, experts)).astype(np.float64)
    if kind == "skewed":
        heat_NE *= np.exp(generator.normal(0, 2, experts))
    elif kind == "zero":
        heat_NE[:] = 0
    elif kind == "one hot":
        heat_NE[:, 1:] = 0
    elif kind == "sparse":
        heat_NE *= generator.random((episodes, experts)) < 0.3
    elif kind == "bursty":
        heat_NE *= np.where(generator.random((episodes, experts)) < 0.2, 20, 1)
    elif kind == "alternating":
        heat_NE[::2, ::2] *= 9
        heat_NE[1::2, 1::2] *= 9
    elif kind == "huge":
        heat_NE *= 2.0**40
    return heat_NE


def shares_of_sources(sources: int, experts: int, kind: str, seed: int) -> np.ndarray:
    """Return each source's share of each expert's tokens, float32 ``[G, E]``. Some sources may have no tokens."""
    generator = np.random.default_rng(seed)
    if kind == "uniform":
        return np.full((sources, experts), 1 / sources, dtype=np.float32)
    share_GE = generator.dirichlet(np.full(sources, 0.7), experts).T
    if kind == "silent" and sources > 1:
        share_GE[generator.integers(0, sources, experts), np.arange(experts)] = 0
        share_GE /= share_GE.sum(axis=0)
    return np.ascontiguousarray(share_GE, dtype=np.float32)


def with_bursts_of(episodes: int, experts: int, seed: int) -> np.ndarray:
    """Return stationary heat ``[N, E]`` with bursts, in which an expert's heat quadruples for eight episodes."""
    generator = np.random.default_rng(seed)
    base_E = generator.gamma(2.0, 100.0, experts)
    start_NE = generator.random((episodes + 8, experts)) < 0.02
    on_NE = np.stack([start_NE[n : n + 8].any(axis=0) for n in range(episodes)])
    return generator.poisson(base_E * np.where(on_NE, 4.0, 1.0)).astype(float)
