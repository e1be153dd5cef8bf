"""What the solver is given for one layer: how to search, what serves now, and its heat."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from eplb_service.solver.arrays import Bool, Float32, Float64, Int32
from eplb_service.solver.jit import kernel
from eplb_service.solver.objective import Demand, demand_of, normalise

EVEN, RULE, SOLVED = 0, 1, 2
"""How an expert's tokens reach its replicas: evenly, because the host spreads them itself; or through each source's
table, made by the engines' fixed rule, or the split that cools the hottest rank."""


class Search(NamedTuple):
    """How hard and for what a layer is solved; as it comes, greedy counts and packing alone."""

    z: float = 0.0
    """Weight of the standard deviation."""
    price: float = 0.0
    """Peak-to-average ratio that one moved slot must win."""
    groups: int = 0
    """Expert groups of the tree search; 0 for greedy replica counts."""
    spread: int = 0
    """Copies that a group may get beside its greedy number."""
    beam: int = 0
    """Nodes that go on from each level of the tree."""
    leaves: int = 1
    """Leaves of the tree that are searched further."""
    patience: int = 1
    """Hot ranks in a row that nothing helps before a local search ends."""
    steps: int = 0
    """Bound on a local search; 0 for none."""
    tables: int = RULE
    """``EVEN``, ``RULE`` or ``SOLVED``."""
    tries: int = 0
    """Of annealing a placement made anew; 0 for none."""
    seed: int = 0
    """Of all that is random."""


class Deployed(NamedTuple):
    """What serves now, and from where tokens come."""

    phy2log_RS: Int32
    """int32 ``[R, S]``."""
    log2phy_GE: Int32
    """int32 ``[G, E]``, each source's table."""
    share_GE: Float32
    """float32 ``[G, E]``, each source's part of each expert's tokens."""
    home_ER: Bool
    """bool ``[E, R]``, ranks that hold each expert."""
    node_R: Int32
    """int32 ``[R]``, node of each rank, numbered from 0."""
    node_G: Int32
    """int32 ``[G]``, node of each source, -1 where its ranks stand on several."""


class Heat(NamedTuple):
    """A stretch of one layer's heat, normalised."""

    scaled_EN: Float32
    """float32 ``[E, N]``, mean rank load 1 in each episode."""
    share_N: Float32
    """float32 ``[N]``, the episodes' weights, summing to 1."""
    demand: Demand
    """Its mean and covariance."""


@kernel
def heat_of(heat_NE: Float64, ranks: int) -> Heat:
    """Normalise episodes ``[N, E]``, all of the same weight."""
    scaled_EN, share_N = normalise(heat_NE, np.ones(heat_NE.shape[0]), ranks)
    return Heat(scaled_EN, share_N, demand_of(scaled_EN, share_N))


@kernel
def leant(heat: Heat, weight_N: Float32, wander: float) -> Heat:
    """The same heat with its episodes weighed anew, and experts that wander by ``wander * mean**2`` more variance.

    The covariance stays that of all episodes: a few newest ones say where the heat is, but not how it moves.
    """
    experts = heat.demand.mean_E.shape[0]
    mean_E = np.zeros(experts, dtype=np.float32)
    gram_EE = heat.demand.gram_EE.copy()
    for e in range(experts):
        for n in range(weight_N.shape[0]):
            mean_E[e] += weight_N[n] * heat.scaled_EN[e, n]
        gram_EE[e, e] += np.float32(wander) * mean_E[e] * mean_E[e]
    return Heat(heat.scaled_EN, weight_N, Demand(mean_E, gram_EE))


@kernel
def homes(phy2log_RS: Int32, experts: int) -> Bool:
    """Whether each rank holds each expert, bool ``[E, R]``."""
    ranks, slots = phy2log_RS.shape
    home_ER = np.zeros((experts, ranks), dtype=np.bool_)
    for r in range(ranks):
        for s in range(slots):
            home_ER[phy2log_RS[r, s], r] = True
    return home_ER
