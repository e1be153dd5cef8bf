"""Array types, search parameters and the solver's inputs and outputs for one layer.

The capital letters at the end of a variable name are its dimensions: L layers, N episodes, E experts, R ranks, S slots
per rank, P physical slots on all ranks, G sources (token groups), V sources that each represent one entry of a dealing
table. A digit stands for a dimension of fixed length.

Many kernels share these parameters:

- ``phy2log_RS``: int32 ``[R, S]``, a complete placement, which is the expert in each slot.
- ``assignment``: a placement with running sums (``construction.Assignment``). Kernels change it in place.
- ``heat``: normalised heat of the layer.
- ``z``: weight of the standard deviation in a rank's risk.
- ``share_GE``: float32 ``[G, E]``, fraction of each expert's tokens that comes from each source.
- ``chosen_GE``: int32 ``[G, E]``, physical id to which each source sends its tokens of each expert. Kernels that
  process the sources of one expert at a time use the transposed arrays ``share_EG`` and ``chosen_EG``, because an
  expert's sources are contiguous there.
- ``first_E1``, ``slot_P``: slots of each expert's replicas, as returned by ``tables.slots_by_expert``.
- ``home_ER``: bool ``[E, R]``, True if the rank holds the expert in the deployed placement. Such a rank is a *home* of
  the expert.
- ``price_K``: float64 ``[K]``, prices in peak-to-average ratio (PAR) per slot whose expert is not at home.
- ``expert``, ``rank``, ``slot``: an expert, and the rank and slot of its replica.
- ``share``: fraction of the expert's tokens that the replica receives.
- ``hot``: the hottest rank, whose risk the search lowers.
- ``bound``: gain that a change must exceed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from eplb_core.solver.jit import kernel, part

Bool = npt.NDArray[np.bool_]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]
EVEN, RULE, SOLVED, DEALT = 0, 1, 2, 3
"""How an expert's tokens are split over its replicas (``SearchParams.tables``).

- ``EVEN``: the host splits them evenly, without tables.
- ``RULE``: each source has a table made by the engines' fixed rule.
- ``SOLVED``: each source has a table that names one replica per expert, chosen to cool the hottest rank.
- ``DEALT``: each source has a dealing table, which names several replicas per expert that its tokens use in turn.
"""
STEPWISE = 4
"""Value of ``SearchParams.tables`` for hosts that split every step's tokens so that the hottest rank is as cool as
possible in that step; see ``stepwise``."""
CHOSEN = (SOLVED, DEALT)
"""Splits whose tables the solver chooses."""
KEEP, TABLES, LOCAL, FRESH = 0, 1, 2, 3
"""Actions for a layer: keep it, change its tables, improve its placement by local search, or place it from scratch."""
_BLOCK = 16
"""Number of experts per block when the covariance is computed."""


@dataclass(frozen=True)
class SearchOptions:
    """Switches and constants of the method, used to measure the effect of each component.

    Planning always uses the defaults; users cannot change them.
    """

    episodes: int = 64
    """Maximum number of episodes in a window; with 1, the solver uses only the window's total heat."""
    z: float | None = None
    """Weight of the standard deviation in a rank's risk; ``None`` to derive it from the number of ranks."""
    half_lives: tuple[float, ...] = (math.inf, 0.5, 0.25, 0.1, 0.05, 0.025)
    """Candidate half-lives of the heat forecast, as fractions of the window. The first one is used if the window is too
    short to choose."""
    warm: bool = True
    """Start from the deployed placement and charge for moves; if False, place all selected layers from scratch."""
    volatility: bool = True
    """Keep a layer if its PAR is no higher than volatile heat would cause on perfectly balanced ranks."""
    tree_search: bool = True
    """Search replica counts and placement jointly in small layers; if False, choose replica counts greedily."""
    annealing: bool = True
    """Anneal placements from scratch if ranks have few slots."""
    local_search: bool = True
    """Improve placements by swapping experts and exchanging replicas."""
    solve_tables: bool = True
    """Choose tables from the measured source heat; if False, use the engines' fixed rule."""
    table_swaps: bool = True
    """Swap experts once more, under the token shares that result from the solved tables."""
    trimmed_mean: bool = True
    """Use each expert's trimmed mean, which is its heat between bursts, if that gives a better forecast; see
    ``window.Forecast``."""
    holdout: bool = True
    """Make only changes that were fitted to the older half of the window and pay off on the newer half."""
    sureness: float = 1.96
    """Number of standard errors by which the gain on the newer half must exceed the cost of the moves. With 0, only the
    mean gain decides."""
    price_ladder: bool = True
    """Try prices per move above the true price on the older half, so that only moves with lasting gains are made."""


class Recommendation(NamedTuple):
    """A local search that passed a hold-out, to be repeated at the next decision."""

    price: float
    """Price per move of the search, as a multiple of the true price."""
    optimism: float
    """Optimism measured by the hold-out; see ``layer.LayerResult``."""


class SearchParams(NamedTuple):
    """Effort and weights of one layer's search. By default, replica counts and placement are chosen greedily."""

    z: float = 0.0
    """Weight of the standard deviation in a rank's risk."""
    move_price: float = 0.0
    """Gain required to move every slot of the layer, as a fraction of the layer's PAR."""
    tree_leaves: int = 0
    """Number of tree-search leaves that are searched further; 0 for greedy replica counts."""
    local_search_steps: int = 0
    """Maximum number of steps of a local search; 0 for no local search."""
    annealing_tries: int = 0
    """Number of annealing tries for a placement from scratch; 0 for no annealing."""
    tables: int = RULE
    """Split of the tokens: ``EVEN``, ``RULE``, ``SOLVED``, ``DEALT`` or ``STEPWISE``."""
    width: int = 1
    """Number of dealing-table entries per expert, D. Each entry counts as a source: entry ``k`` of source ``g`` is
    source ``g*D + k``."""
    step_tries: int = 0
    """Number of tries of the placement search for stepwise splits; 0 for no such search."""
    seed: int = 0
    """Seed for all random choices."""
    options: SearchOptions = SearchOptions()
    """Switches and constants of the method."""

    def slot_price(self, phy2log_RS: Int32, par: float = 1.0) -> float:
        """Return the minimum PAR improvement per moved slot.

        Parameters
        ----------
        phy2log_RS
            int32 ``[R, S]``, a placement of the layer. Only its size matters.
        par
            Current PAR of the layer.

        Examples
        --------
        If moving all 8 slots must reduce the PAR by 4 %, and the PAR is 1.5 now, a single move must reduce it by
        0.04 / 8 * 1.5:

        >>> placement = np.array([[0, 1], [2, 3], [4, 5], [0, 3]], dtype=np.int32)
        >>> round(SearchParams(move_price=0.04).slot_price(placement, 1.5), 6)
        0.0075
        """
        return self.move_price / phy2log_RS.size * par


class LayerLayout(NamedTuple):
    """Placement and tables of one layer, with the sources of its tokens."""

    phy2log_RS: Int32
    """int32 ``[R, S]``, placement."""
    log2phy_GE: Int32
    """int32 ``[G, E]``, each source's table."""
    share_GE: Float32
    """float32 ``[G, E]``, fraction of each expert's tokens that comes from each source."""
    home_ER: Bool
    """bool ``[E, R]``, True if the rank holds the expert."""
    node_R: Int32
    """int32 ``[R]``, node of each rank, numbered from 0."""
    node_G: Int32
    """int32 ``[G]``, node of each source; -1 if its ranks are on several nodes."""


class Episodes(NamedTuple):
    """Heat of one layer by episode, normalised to a mean rank load of 1; it suffices for judging placements."""

    scaled_EN: Float32
    """float32 ``[E, N]``, normalised heat."""
    share_N: Float32
    """float32 ``[N]``, weights of the episodes, which sum to 1."""


class Heat(NamedTuple):
    """Normalised heat of one layer with its mean and covariance, which the search also needs."""

    scaled_EN: Float32
    """float32 ``[E, N]``, normalised heat."""
    share_N: Float32
    """float32 ``[N]``, weights of the episodes, which sum to 1."""
    mean_E: Float32
    """float32 ``[E]``, weighted mean over the episodes."""
    gram_EE: Float32
    """float32 ``[E, E]``, weighted covariance over the episodes."""

    @property
    def episodes(self) -> Episodes:
        """The heat by episode, without mean and covariance."""
        return Episodes(self.scaled_EN, self.share_N)


@kernel
def _normalise(heat_NE: Float64, weight_N: Float64, ranks: int) -> tuple[Float32, Float32]:
    """Scale each episode to a mean rank load of 1, and the weights to a sum of 1.

    Returns float32 ``[E, N]`` and float32 ``[N]``. Episodes without tokens get weight 0. If the layer has no tokens at
    all, both arrays are zero.
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
def with_covariance(scaled_EN: Float32, share_N: Float32) -> Heat:
    """Return the normalised heat with its mean and covariance."""
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
    # Work in blocks, so that a block and its mirror image stay in the L1 cache.
    for begin_a in range(0, experts, _BLOCK):
        for begin_b in range(0, begin_a + 1, _BLOCK):
            for a in range(begin_a, min(begin_a + _BLOCK, experts)):
                for b in range(begin_b, min(begin_b + _BLOCK, a + 1)):
                    dot = np.float32(0.0)
                    for n in range(episodes):
                        dot += centred_EN[a, n] * centred_EN[b, n]
                    gram_EE[a, b] = dot
                    gram_EE[b, a] = dot
    return Heat(scaled_EN, share_N, mean_E, gram_EE)


def episodes_of(heat_NE: Float64, ranks: int) -> Episodes:
    """Normalise the tokens of each episode, float64 ``[N, E]``, and give all episodes equal weights.

    Examples
    --------
    Three experts on two ranks. Each episode has a mean rank load of 1, so its experts sum to 2:

    >>> heat = episodes_of(np.array([[30.0, 10.0, 0.0], [5.0, 5.0, 10.0]]), ranks=2)
    >>> heat.scaled_EN.T.tolist()
    [[1.5, 0.5, 0.0], [0.5, 0.5, 1.0]]
    >>> heat.share_N.tolist()
    [0.5, 0.5]
    """
    return Episodes(*_normalise(heat_NE, np.ones(heat_NE.shape[0]), ranks))


def heat_of(heat_NE: Float64, ranks: int) -> Heat:
    """Normalise the tokens of each episode, float64 ``[N, E]``, weight all equally, and compute mean and covariance."""
    return with_covariance(*episodes_of(heat_NE, ranks))


@part
def set_row(row: Int32 | Float32 | Float64, values: Int32 | Float32 | Float64) -> None:
    """Copy ``values`` into ``row``.

    With ``row[:] = values``, numba would spend a second compiling an error message that can never occur.
    """
    for i in range(row.shape[0]):
        row[i] = values[i]


@part
def set_placement(target_RS: Int32, phy2log_RS: Int32) -> None:
    """Copy a placement into ``target_RS``."""
    for r in range(target_RS.shape[0]):
        set_row(target_RS[r], phy2log_RS[r])


@kernel
def homes(phy2log_RS: Int32, experts: int) -> Bool:
    """Return the ranks that hold each expert, bool ``[E, R]``."""
    ranks, slots = phy2log_RS.shape
    home_ER = np.zeros((experts, ranks), dtype=np.bool_)
    for r in range(ranks):
        for s in range(slots):
            home_ER[phy2log_RS[r, s], r] = True
    return home_ER


class Layer(NamedTuple):
    """One MoE layer to solve: its heat and its current layout."""

    heat: Heat
    deployed: LayerLayout


class Candidate(NamedTuple):
    """A placement considered for a layer, with its tables."""

    phy2log_RS: Int32
    """int32 ``[R, S]``, placement."""
    log2phy_GE: Int32
    """int32 ``[G, E]``, each source's table."""
    par: float
    """PAR on the heat for which the candidate was made."""
    moves: int
    """Number of slots that must receive an expert's weights."""
