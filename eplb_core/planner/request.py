"""Request to the solver: the layers to place, their heat, what serves them, and the search parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_core.heat.window import HeatError, Window, widened
from eplb_core.placement import Float64, Int32, Placement, mean_par
from eplb_core.planner.dealing import shares_of_entries, sources_of_tables, width_in_use
from eplb_core.planner.episodes import similar_steps_together
from eplb_core.planner.score import expected_hottest, numbers_of, par_of_steps, split_steps
from eplb_core.planner.settings import EVEN, STEP, PlannerSettings
from eplb_core.planner.topology import Topology, TopologyError
from eplb_core.solver import model
from eplb_core.solver.engine import (
    LayerBatch,
    Limits,
    Nodes,
    SearchRules,
    SolverError,
    TimeObjective,
    solve_many,
)
from eplb_core.solver.layer import LayerResult
from eplb_core.solver.model import Recommendation, SearchOptions, SearchParams
from eplb_core.solver.window import shares_of_groups, sum_episodes

_DEEPSEEK = SearchParams()
_FEW_CELLS = 20_000
"""Slots x (experts + ranks) up to which a tree search costs next to nothing; larger layers win nothing by it."""
_FEW_SLOTS = 3
"""Slots per rank up to which swaps and single exchanges soon find no way on."""
_LEAVES = 8
"""Leaves of the tree search that are searched further."""
_Z_OF_FEW_SLOTS = 1.5
"""With so few experts per rank its load is far from normal, and a rank far out on the tail is no guide; 1.0
and 2.5 are within 0.2 % on the heat that annealing was tried on."""
_TRIES = 400
"""Of annealing, for each slot of a layer with few slots per rank and as many spare replicas as experts; fewer spare
ones leave less to decide. Half as many are 0.3 % worse on that heat, twice as many 0.15 % better."""

_STEP_TRIES, _STEP_TRIES_PER_SLOT = 2000, 4
"""Of the search for stepwise splits; chosen by hand on recorded and drawn steps of 8 ranks x 5 and 32 ranks x 9 slots,
where ten times as many won less than half a percent on the next window."""


@dataclass(frozen=True)
class SolveRequest:
    """All that one decision is asked, as ``decide.plan`` takes it.

    Raises ``HeatError``, ``PlacementError`` or ``TopologyError`` where the parts contradict each other.
    """

    window: Window
    placement: Placement
    log2phy_RLE: Int32
    topology: Topology
    settings: PlannerSettings
    search: SearchOptions
    recommendations: Sequence[Recommendation | None] = ()

    def __post_init__(self) -> None:
        window, placement = self.window, self.placement
        if (window.layers, window.experts) != (placement.layers, placement.experts):
            raise HeatError(
                f"heat of {window.layers} layers x {window.experts} experts does not fit a placement of "
                f"{placement.layers} x {placement.experts}"
            )
        placement.check_log2phy(self.log2phy_RLE)
        if window.source_RLE is not None and window.source_RLE.shape[0] != placement.ranks:
            raise HeatError(
                f"source heat of {window.source_RLE.shape[0]} ranks does not fit {placement.ranks} ranks"
            )
        if self.topology.ranks != placement.ranks:
            raise TopologyError(
                f"a topology of {self.topology.ranks} ranks does not fit {placement.ranks} ranks"
            )
        if window.steps == 0:
            raise HeatError("the window holds no steps")

    @property
    def episodes(self) -> int:
        """Episodes that the decision looks at: at most one per step."""
        return min(self.search.episodes, self.window.steps)

    @cached_property
    def order(self) -> npt.NDArray[np.int64] | None:
        """Order in which steps are summed into episodes, int64 ``[T]``; ``None`` for the order in which they came."""
        if self.settings.split == STEP:
            return None
        return similar_steps_together(self.window.heat_TLE, self.episodes)

    def episode_heat(self, layer_P: npt.NDArray[np.int64]) -> Float64:
        """Heat of some layers by episode, float64 ``[P, N, E]``.

        Steps are summed, similar ones together (``episodes``); a host that splits each step for itself has single ones,
        evenly from the first.
        """
        heat_TLE, steps, episodes = self.window.heat_TLE, self.window.steps, self.episodes
        if self.settings.split != STEP:
            if self.order is None:
                return sum_episodes(heat_TLE, layer_P, episodes)
            ordered_TPE = widened(heat_TLE[:, layer_P][self.order])
            return sum_episodes(ordered_TPE, np.arange(layer_P.size), episodes)
        steps_N = np.arange(episodes) * steps // episodes
        return np.ascontiguousarray(heat_TLE[steps_N][:, layer_P].transpose(1, 0, 2), dtype=np.float64)


def search_params_of(
    settings: PlannerSettings,
    placement: Placement,
    width: int = 1,
    move_price: float = 0.0,
    options: SearchOptions | None = None,
) -> SearchParams:
    """Search parameters in a layer of this shape; ``tree_*``, ``*_steps`` and ``*_tries`` say how hard to search.

    Parameters
    ----------
    settings, options
        Settings of the decision, and the parts of the method that are left out; by default none.
    placement
        Placement whose shape the layer has.
    width
        Entries of its dealing tables.
    move_price
        Part of its ratio that the layer must win to have every slot moved.
    """
    if settings.policy == "deepseek":
        return _DEEPSEEK._replace(tables=_tables(settings.split, False, width), width=width)
    options = options or SearchOptions()
    slots = placement.ranks * placement.slots
    tree = options.tree_search and slots * (placement.experts + placement.ranks) <= _FEW_CELLS
    few = placement.slots <= _FEW_SLOTS and options.local_search
    spare = placement.redundant / placement.experts
    z = expected_hottest(placement.ranks)
    return SearchParams(
        z=(min(z, _Z_OF_FEW_SLOTS) if few else z) if options.z is None else options.z,
        move_price=move_price,
        tree_leaves=_LEAVES if tree else 0,
        local_search_steps=16 * slots if options.local_search else 0,
        tables=_tables(settings.split, options.solve_tables, width),
        width=width,
        step_tries=_STEP_TRIES + _STEP_TRIES_PER_SLOT * slots if options.local_search else 0,
        annealing_tries=int(_TRIES * slots * min(spare, 1.0)) if few and options.annealing else 0,
        seed=settings.seed,
        options=options,
    )


def with_options(
    settings: PlannerSettings, options: Mapping[str, Any]
) -> tuple[PlannerSettings, SearchOptions]:
    """Settings with ``options`` by name, and those that switch a part of the solver's method."""
    of_search = {one.name for one in fields(SearchOptions)}
    switched = {name: value for name, value in options.items() if name in of_search}
    stated = {name: value for name, value in options.items() if name not in of_search}
    return replace(settings, **stated), SearchOptions(**switched)


def _tables(split: str, solved: bool, width: int) -> int:
    by_source = (model.SOLVED if width == 1 else model.DEALT) if solved else model.RULE
    return {EVEN: model.EVEN, STEP: model.STEPWISE}.get(split, by_source)


_AS_BAD = 0.7
"""Part of the avoidable ratio of layouts made for no heat from which on a deployment is taken to be in one.

Of the four kinds of heat of ``make bench-solver`` (256 experts on 32 ranks x 9 and 64 x 5 slots, seeds 0 and 1), such
layouts come to 0.73 to 1.35 of their mean, and those of ``flashlb`` and ``deepseek`` one to five windows of 256 steps
after they were made to 0.01 to 0.46. With 32 experts on 8 ranks x 5 slots it is 0.56 to 1.49, and 0.05 to 0.59 but on
drift, where they come to 0.86: to place these from scratch loses nothing but moves.
"""
_MIN_AVOIDABLE = 0.05
"""Avoidable ratio of such layouts below which they are as good as any."""
_MIN_STEPS = 16
"""Steps below which that is not asked: soon after a change of the workload any layout may do so badly for a while."""
_SHUFFLES = 4
"""Layouts made for no heat that a deployment is compared with."""
_STEPS_COMPARED = 32
"""Newest steps that it is compared on, at most."""
_LAYERS_COMPARED = 8
"""Layers that it is compared on, at most, evenly from first to last."""


def _blind_layers(asked: SolveRequest, floor_L: Float64) -> npt.NDArray[np.bool_]:
    """Layers that do just as experts in order do, or all where the deployment does hardly better; bool ``[L]``.

    A layout that keeps groups of experts on their nodes was made for that, at least: of such only experts in order are
    recognised.
    """
    window, placement, split = asked.window, asked.placement, asked.settings.split
    newest_TLE, names_E = window.heat_TLE[-_STEPS_COMPARED:], np.arange(placement.experts)
    one_in_order = Placement.linear(1, placement.experts, placement.ranks, placement.slots)
    rule_R1E = one_in_order.default_log2phy()

    def pars(some_K: npt.NDArray[np.int64], names_E: npt.NDArray[np.int64] | None = None) -> Float64:
        """Ratios of the newest steps in some layers as they serve, or under experts in order by these names."""
        heat_TKE = newest_TLE[:, some_K]
        source_RKE = None if window.source_RLE is None else window.source_RLE[:, some_K]
        if names_E is None:
            serving, tables_RKE = placement.phy2log_LRS[some_K], asked.log2phy_RLE[:, some_K]
        else:
            serving, tables_RKE = (
                one_in_order.phy2log_LRS.repeat(some_K.size, axis=0),
                rule_R1E.repeat(some_K.size, axis=1),
            )
            heat_TKE = heat_TKE[..., names_E]
            source_RKE = None if source_RKE is None else source_RKE[..., names_E]
        served = Placement(serving, placement.experts)
        return par_of_steps(split_steps(heat_TKE, served, tables_RKE, source_RKE, split))

    # In which order a rank's slots are is of no account.
    in_order_1RS = np.sort(one_in_order.phy2log_LRS, axis=2)
    same_L: npt.NDArray[np.bool_] = (np.sort(placement.phy2log_LRS, axis=2) == in_order_1RS).all(axis=(1, 2))
    alike_L = np.zeros_like(same_L)
    if asked.log2phy_RLE.ndim == rule_R1E.ndim:
        # Nothing has changed since these layers were loaded.
        alike_L = (placement.phy2log_LRS == one_in_order.phy2log_LRS).all(axis=(1, 2))
        alike_L &= (asked.log2phy_RLE == rule_R1E).all(axis=(0, 2))
    in_order_K = np.flatnonzero(same_L & ~alike_L)
    if in_order_K.size:
        same_L[in_order_K] = np.isclose(pars(in_order_K), pars(in_order_K, names_E), rtol=1e-9, atol=0.0)
    if asked.settings.expert_groups is None and window.steps >= _MIN_STEPS and not same_L.all():
        some_K = np.unique(np.linspace(0, window.layers - 1, _LAYERS_COMPARED).astype(np.int64))
        floor = float(mean_par(floor_L[some_K]))
        avoidable_now = float(mean_par(pars(some_K))) - floor
        if avoidable_now >= _AS_BAD * _MIN_AVOIDABLE:
            shuffled = (np.random.default_rng(seed).permutation(names_E) for seed in range(_SHUFFLES))
            blind_K = np.mean([pars(some_K, names_E) for names_E in shuffled], axis=0)
            avoidable = float(mean_par(blind_K)) - floor
            if avoidable > _MIN_AVOIDABLE and avoidable_now >= _AS_BAD * avoidable:
                same_L[:] = True
    return same_L


@dataclass(frozen=True)
class _Made:
    """Arrays by layer that are made when they are asked for."""

    of: Callable[[int], Any]

    def __getitem__(self, layer: int) -> Any:
        return self.of(layer)


_MAX_STEPS = 128
"""Steps of a window that time is lowered on: as many more won less than 0.2 % in the window after."""


def solve_picked(
    asked: SolveRequest,
    picked: npt.NDArray[np.int64],
    floor_L: Float64,
    expert_groups: int,
    move_price: float,
) -> list[LayerResult | SolverError]:
    """Solve the picked layers; one source for each token group, or for each entry of its dealing tables.

    Parameters
    ----------
    asked
        The decision's question.
    picked
        int64 ``[P]``, indices of layers.
    floor_L
        float64 ``[L]``, what token sampling alone leaves of the ratio per step of each layer.
    expert_groups
        Groups of experts to keep together on nodes, 0 for none.
    move_price
        Part of its ratio that a layer must win to have every slot moved.

    Returns
    -------
    list[Answer | SolverError]
        One per picked layer, in their order.
    """
    if not picked.size:
        return []
    window, placement, settings, search = asked.window, asked.placement, asked.settings, asked.search
    curve = time_curve(settings)
    width = width_in_use(settings, asked.log2phy_RLE)
    node_R, node_G = asked.topology.nodes()
    params = search_params_of(settings, placement, width, move_price, search)
    if curve is not None and params.tables == model.DEALT:
        # Time is lowered source by source, and each entry of a dealing table is one.
        params = params._replace(tables=model.SOLVED)
    timing = None
    if curve is not None and settings.cost_curve is not None:
        # What the batch takes is the same under all placements, as the floor is.
        curve[0] += settings.cost_curve.batch_us * float(window.heat_TLE.sum(axis=2).mean())
        sampled_TPE = window.heat_TLE[_sampled_steps(window.steps, _MAX_STEPS)][:, picked]
        timing = TimeObjective(curve, sampled_TPE.astype(np.float64).transpose(1, 0, 2))
    # Those in a layout that was made for no heat are placed from scratch, whatever it moves.
    unplaced_L = np.ones(window.layers, dtype=np.bool_)
    if settings.policy != "deepseek" and search.warm:
        unplaced_L = _blind_layers(asked, floor_L)
    heat_PNE = asked.episode_heat(picked)
    tokens_PE = heat_PNE.sum(axis=1) / window.steps
    if settings.policy == "deepseek":
        heat_PNE = heat_PNE.sum(axis=1, keepdims=True)
    _, first_G, group_R = asked.topology.token_groups()

    def tables_of(place: int) -> Any:
        return sources_of_tables(asked.log2phy_RLE[first_G, picked[place]][:, None], width)[0]

    def shares_of(place: int) -> Any:
        share_GE = np.repeat((np.bincount(group_R) / placement.ranks)[:, None], placement.experts, axis=1)
        if window.source_RLE is not None:
            share_GE = shares_of_groups(window.source_RLE, picked[place], group_R, first_G.size)
        return shares_of_entries(share_GE[:, None], tokens_PE[place, None], width)[0]

    batch = LayerBatch(
        heat_PNE,
        placement.phy2log_LRS[picked],
        _Made(tables_of),
        _Made(shares_of),
        unplaced_L[picked],
        [asked.recommendations[layer] for layer in picked.tolist()] if asked.recommendations else (),
    )
    rules = SearchRules(params, np.array(search.half_lives) * heat_PNE.shape[1], settings.min_gain)
    nodes = Nodes(node_R, np.repeat(node_G, width), expert_groups)
    return solve_many(batch, rules, nodes, timing, Limits(settings.threads, settings.budget_ms))


def time_curve(settings: PlannerSettings) -> Float64 | None:
    """Cost curve that the solver lowers time by; ``None`` where it balances tokens: no curve is given, or a linear one.

    A host that splits by step balances tokens whatever they cost: placements are made for that, and judged by time.
    """
    curve = settings.cost_curve
    if curve is None or curve.linear or settings.policy != "flashlb" or settings.split == STEP:
        return None
    return numbers_of(curve)


def _sampled_steps(steps: int, most: int) -> npt.NDArray[np.int64]:
    """At most so many single steps, evenly from first to last."""
    count = min(most, steps)
    return (np.arange(count) * steps + steps // 2) // count


def groups_on_nodes(settings: PlannerSettings, placement: Placement, topology: Topology) -> tuple[int, str]:
    """Groups of experts to keep together on nodes, 0 for none; and why none, where the settings ask for some.

    On one node every placement keeps them together.
    """
    groups, ranks_K, experts = settings.expert_groups, np.bincount(topology.nodes()[0]), placement.experts
    if groups is None or ranks_K.size == 1:
        return 0, ""
    divides = experts % groups == 0 and groups % ranks_K.size == 0 and bool((ranks_K == ranks_K[0]).all())
    if divides and placement.slots * ranks_K.size <= experts:
        return groups, ""
    each = f"{ranks_K.min()} to {ranks_K.max()} ranks of {placement.slots} slots"
    return 0, f"{experts} experts in {groups} groups do not spread evenly over {ranks_K.size} nodes of {each}"
