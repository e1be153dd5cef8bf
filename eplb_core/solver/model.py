"""Array types, search parameters, one layer and a candidate for it: the solver's input and output.

Dimensions are part of the variables' names: L layers, N episodes, E experts, R ranks, S slots per rank, P physical
slots, G sources (token groups), V sources of which each is an entry of a dealing table.

Arguments that many functions share:

- ``phy2log_RS``, a complete placement; ``assignment``, one with running sums, changed in place where something moves;
- ``heat``, the layer's; ``z``, the weight of the standard deviation in a rank's risk;
- ``share_GE``, each source's part of each expert's tokens; ``chosen_GE``, the physical id that it sends them to; both
  are ``_EG`` for kernels that go through the sources of one expert at a time, which lie side by side then;
- ``first_E1``, ``slot_P``, where each expert's replicas are (``tables.slots_by_expert``);
- ``home_ER``, ranks that hold each expert in the deployed placement; ``price_K``, ratio per slot away from home;
- ``expert``, ``rank``, ``slot``, ``share``: whose replica, where, and with which part of the expert's tokens; ``hot``,
  the rank that is to be cooled; ``bound``, what a change must win at least;
- ``tokens_EN``, ``weight_N``, tokens of each expert in single steps and the steps' weights; ``curve_4``, a cost curve.
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
"""How an expert's tokens reach its replicas: evenly, because the host spreads them itself; or through each source's
table, made by the engines' fixed rule, or the split that cools the hottest rank: a replica for each source; or several
that it deals its tokens to in turn."""
STEPWISE = 4
"""Or split in each step, as well as its own tokens can be split over the replicas (``stepwise``)."""
CHOSEN = (SOLVED, DEALT)
"""Where the solver chooses the tables."""
KEEP, TABLES, LOCAL, FRESH = 0, 1, 2, 3
"""Leave the layer as it is, give it new tables, improve its placement, or place it from scratch."""
_BLOCK = 16
"""Experts of a block of the covariances."""


@dataclass(frozen=True)
class SearchOptions:
    """Parts of the method, each of which can be left out or set by itself to measure what it is worth.

    Planning uses the defaults; users have no settings for them.
    """

    episodes: int = 64
    """Most episodes that a window's steps are summed into; 1 plans on the sum of the window."""
    z: float | None = None
    """Standard deviations above the mean at which a rank's load is taken; ``None``: where the hottest is expected."""
    half_lives: tuple[float, ...] = (math.inf, 0.5, 0.25, 0.1, 0.05, 0.025)
    """Half-lives of heat to choose from, as fractions of the window; the first where the window is too short."""
    warm: bool = True
    """Start from the deployed placement and weigh every change against it; else place picked layers from scratch."""
    volatility: bool = True
    """Leave a layer alone whose ratio is no more than the jumps of its experts' heat make of balanced ranks."""
    tree_search: bool = True
    """Search replica counts together with the placement in small layers; else replica counts are greedy."""
    annealing: bool = True
    """Anneal placements made from scratch where ranks have few slots."""
    local_search: bool = True
    """Improve placements by swapping experts and exchanging replicas."""
    solve_tables: bool = True
    """Choose dealing tables from the measured source heat; else by the engines' fixed rule."""
    table_swaps: bool = True
    """Swap experts once more at the shares of tokens that solved tables really give."""
    trimmed_mean: bool = True
    """Place for what experts have between bursts, where that forecasts better (``forecast``)."""
    holdout: bool = True
    """Make only changes that, fitted to the older half of the window, pay for themselves on the newer half."""
    sureness: float = 1.96
    """Standard errors by which a change must have won on the newer half; 0 takes the mean as it is."""
    price_ladder: bool = True
    """Try dearer moves than the true price on the older half, so that only lasting gains are bought."""


class Recommendation(NamedTuple):
    """A local search that was held against heat it was not fitted to, and is to be followed at the next decision.

    ``price`` is what it asks for a move, as a multiple of the true one; ``optimism`` is as in ``layer.LayerResult``.
    """

    price: float
    optimism: float


class SearchParams(NamedTuple):
    """Effort and weights for one layer's search; by default greedy counts and greedy placement alone."""

    z: float = 0.0
    """Weight of the standard deviation in a rank's risk."""
    move_price: float = 0.0
    """Fraction of its peak-to-average ratio that the layer must win to have every slot moved."""
    tree_leaves: int = 0
    """Leaves of the tree search that are searched further; 0 for greedy replica counts."""
    local_search_steps: int = 0
    """Bound on a local search; 0 for none."""
    annealing_tries: int = 0
    """Tries of annealing a placement made from scratch; 0 for none."""
    tables: int = RULE
    """``EVEN``, ``RULE``, ``SOLVED``, ``DEALT`` or ``STEPWISE``."""
    width: int = 1
    """D, entries of a dealing table: each is a source of its own, and entry ``k`` of source ``g`` is ``g*D + k``."""
    step_tries: int = 0
    """Tries of searching a placement for stepwise splits; 0 for none."""
    seed: int = 0
    """Seed of all random choices."""
    options: SearchOptions = SearchOptions()
    """Parts of the method that are left out."""

    def slot_price(self, phy2log_RS: Int32, par: float = 1.0) -> float:
        """Peak-to-average ratio that one moved slot must win in a layer of this shape whose ratio now is ``par``."""
        return self.move_price / phy2log_RS.size * par


class LayerLayout(NamedTuple):
    """Placement and tables that serve now, and from where tokens come."""

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


class Episodes(NamedTuple):
    """A stretch of one layer's heat, normalised to a mean rank load of 1 in each episode: all that judging needs."""

    scaled_EN: Float32
    """float32 ``[E, N]``."""
    share_N: Float32
    """float32 ``[N]``, the episodes' weights, summing to 1."""


class Heat(NamedTuple):
    """The same with what searching needs besides."""

    scaled_EN: Float32
    """float32 ``[E, N]``."""
    share_N: Float32
    """float32 ``[N]``, the episodes' weights, summing to 1."""
    mean_E: Float32
    """float32 ``[E]``, weighted mean over episodes."""
    gram_EE: Float32
    """float32 ``[E, E]``, weighted covariance over episodes."""

    @property
    def episodes(self) -> Episodes:
        """The episodes alone."""
        return Episodes(self.scaled_EN, self.share_N)


@kernel
def _normalise(heat_NE: Float64, weight_N: Float64, ranks: int) -> tuple[Float32, Float32]:
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
def with_covariance(scaled_EN: Float32, share_N: Float32) -> Heat:
    """Normalised heat with its mean and covariance."""
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
    # By blocks, whose mirrored halves stay in the nearest cache.
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
    """Normalise episodes ``[N, E]``, all of the same weight."""
    return Episodes(*_normalise(heat_NE, np.ones(heat_NE.shape[0]), ranks))


def heat_of(heat_NE: Float64, ranks: int) -> Heat:
    """Normalise episodes ``[N, E]``, all of the same weight, with their covariance."""
    return with_covariance(*episodes_of(heat_NE, ranks))


@part
def set_row(row: Int32 | Float32, values: Int32 | Float32) -> None:
    """``row[:] = values``, which numba takes a second to compile for the text of an error that cannot be."""
    for at in range(row.shape[0]):
        row[at] = values[at]


@part
def set_placement(kept_RS: Int32, phy2log_RS: Int32) -> None:
    """Copy a placement into another."""
    for r in range(kept_RS.shape[0]):
        set_row(kept_RS[r], phy2log_RS[r])


@kernel
def homes(phy2log_RS: Int32, experts: int) -> Bool:
    """Ranks that hold each expert, bool ``[E, R]``."""
    ranks, slots = phy2log_RS.shape
    home_ER = np.zeros((experts, ranks), dtype=np.bool_)
    for r in range(ranks):
        for s in range(slots):
            home_ER[phy2log_RS[r, s], r] = True
    return home_ER


class Layer(NamedTuple):
    """One MoE layer to solve: its heat, and what serves it now."""

    heat: Heat
    deployed: LayerLayout


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
