"""What the solver is given and what it makes: array types, search parameters, one layer, a candidate for it.

Dimensions are part of the variables' names:

L layers, N episodes, E experts, R ranks, S slots per rank, P physical slots, G sources (token groups).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from eplb_service.solver.jit import kernel, part

Bool = npt.NDArray[np.bool_]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]
EVEN, RULE, SOLVED, DEALT = 0, 1, 2, 3
"""How an expert's tokens reach its replicas: evenly, because the host spreads them itself; or through each source's
table, made by the engines' fixed rule, or the split that cools the hottest rank: a replica for each source, or several
that it deals its tokens to."""
STEPWISE = 4
"""Or split in each step, as well as its own tokens can be split over the replicas (``stepwise``)."""
CHOSEN = (SOLVED, DEALT)
"""Where the solver chooses the tables."""
KEEP, TABLES, LOCAL, FRESH = 0, 1, 2, 3
"""Leave the layer as it is, give it new tables, improve its placement, or place it from scratch."""


class SearchParams(NamedTuple):
    """How a layer is searched; as it comes, greedy counts and greedy placement alone.

    Fields are named after the planner's settings that they follow from.
    """

    z: float = 0.0
    """Weight of the standard deviation in a rank's risk."""
    move_price: float = 0.0
    """Peak-to-average ratio that one moved slot must win."""
    tree_groups: int = 0
    """Expert groups of the tree search; 0 for greedy replica counts."""
    tree_spread: int = 0
    """Replicas that a group may get beside its greedy number."""
    tree_beam: int = 0
    """Nodes that go on from each level of the tree."""
    tree_leaves: int = 1
    """Leaves of the tree that are searched further."""
    local_search_steps: int = 0
    """Bound on a local search; 0 for none."""
    local_search_patience: int = 1
    """Hot ranks in a row that nothing helps before a local search ends."""
    swaps: bool = True
    """Whether a local search swaps experts between ranks."""
    exchanges: bool = True
    """Whether a local search turns spare replicas into replicas of other experts."""
    annealing_tries: int = 0
    """Tries of annealing a placement made from scratch; 0 for none."""
    tables: int = RULE
    """``EVEN``, ``RULE``, ``SOLVED``, ``DEALT`` or ``STEPWISE``."""
    width: int = 1
    """Entries of a dealing table; each is a source of its own, see ``dealing``."""
    trust: float = 1.0
    """How far dealt shares go from even ones to those fitted to the heat."""
    step_tries: int = 0
    """Tries of searching a placement for stepwise splits; 0 for none."""
    table_swaps: bool = True
    """Whether experts are swapped at the shares that solved tables give."""
    table_kicks: bool = True
    """Whether replicas are exchanged at random where few slots and coarse tables do worse than even shares."""
    trimmed_mean: bool = True
    """Whether experts may count as their trimmed means say (``forecast``)."""
    holdout: bool = True
    """Whether a change fitted to the older half of the window must pay on the newer half."""
    sureness: float = 0.0
    """Standard errors by which a change must have won on the newer half."""
    price_ladder: bool = True
    """Whether dearer moves than the true price are tried on the older half."""
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
    """int32 ``[G]``, node of each source, -1 where its ranks are on several."""


class Demand(NamedTuple):
    """One layer's heat as the search sees it; mean rank load 1."""

    mean_E: Float32
    """float32 ``[E]``, weighted mean over episodes."""
    gram_EE: Float32
    """float32 ``[E, E]``, weighted covariance over episodes."""


@kernel
def normalise(heat_NE: Float64, weight_N: Float64, ranks: int) -> tuple[Float32, Float32]:
    """Scale each episode to a mean rank load of 1 and the weights to a sum of 1.

    Returns float32 ``[E, N]`` and float32 ``[N]``; episodes without tokens get no weight. All zero where there are
    no tokens at all.
    """
    episodes, experts = heat_NE.shape
    scaled_EN = np.zeros((experts, episodes), dtype=np.float32)
    share_N = np.zeros(episodes, dtype=np.float32)
    total_weight = 0.0
    for n in range(episodes):
        tokens = heat_NE[n].sum()
        if tokens > 0:
            total_weight += weight_N[n]
            for e in range(experts):
                scaled_EN[e, n] = heat_NE[n, e] * ranks / tokens
            share_N[n] = weight_N[n]
    if total_weight > 0:
        for n in range(episodes):
            share_N[n] /= total_weight
    return scaled_EN, share_N


@kernel
def demand_of(scaled_EN: Float32, share_N: Float32) -> Demand:
    """Mean and covariance of normalised heat, as a ``Demand``."""
    experts, episodes = scaled_EN.shape
    mean_E = np.zeros(experts, dtype=np.float32)
    centred_EN = np.empty((experts, episodes), dtype=np.float32)
    root_N = np.sqrt(share_N)
    for e in range(experts):
        mean = np.float32(0.0)
        for n in range(episodes):
            mean += share_N[n] * scaled_EN[e, n]
        mean_E[e] = mean
        for n in range(episodes):
            centred_EN[e, n] = root_N[n] * (scaled_EN[e, n] - mean)
    gram_EE = np.empty((experts, experts), dtype=np.float32)
    for a in range(experts):
        for b in range(a + 1):
            dot = np.float32(0.0)
            for n in range(episodes):
                dot += centred_EN[a, n] * centred_EN[b, n]
            gram_EE[a, b] = dot
            gram_EE[b, a] = dot
    return Demand(mean_E, gram_EE)


class Heat(NamedTuple):
    """A stretch of one layer's heat, normalised."""

    scaled_EN: Float32
    """float32 ``[E, N]``, mean rank load 1 in each episode."""
    share_N: Float32
    """float32 ``[N]``, the episodes' weights, summing to 1."""
    demand: Demand
    """Its mean and covariance."""


def heat_of(heat_NE: Float64, ranks: int) -> Heat:
    """Normalise episodes ``[N, E]``, all of the same weight."""
    scaled_EN, share_N = normalise(heat_NE, np.ones(heat_NE.shape[0]), ranks)
    return Heat(scaled_EN, share_N, demand_of(scaled_EN, share_N))


def reweighted(heat: Heat, weight_N: Float32, wander: float) -> Heat:
    """The same heat with its episodes weighed afresh, and experts that wander by ``wander * mean**2`` more variance.

    The covariance stays that of all episodes: a few newest ones say where the heat is, but not how it moves.
    """
    mean_E = heat.scaled_EN @ weight_N
    gram_EE = heat.demand.gram_EE.copy()
    gram_EE[np.diag_indices_from(gram_EE)] += np.float32(wander) * mean_E * mean_E
    return Heat(heat.scaled_EN, weight_N, Demand(mean_E, gram_EE))


@part
def set_row(row: Int32 | Float32, values: Int32 | Float32) -> None:
    """``row[:] = values``, which numba takes a second to compile for the text of an error that cannot be."""
    for at in range(row.shape[0]):
        row[at] = values[at]


@kernel
def homes(phy2log_RS: Int32, experts: int) -> Bool:
    """Whether each rank holds each expert, bool ``[E, R]``."""
    ranks, slots = phy2log_RS.shape
    home_ER = np.zeros((experts, ranks), dtype=np.bool_)
    for r in range(ranks):
        for s in range(slots):
            home_ER[phy2log_RS[r, s], r] = True
    return home_ER


class Layer(NamedTuple):
    """One MoE layer to solve: its heat, and what serves it now."""

    heat: Heat
    deployed: Deployed


class Candidate(NamedTuple):
    """A placement with its tables."""

    phy2log_RS: Int32
    """int32 ``[R, S]``."""
    log2phy_GE: Int32
    """int32 ``[G, E]``."""
    par: float
    """Peak-to-average ratio on the heat that it was made for."""
    moves: int
    """Slots that must receive weights."""
