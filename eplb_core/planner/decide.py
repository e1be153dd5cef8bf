"""Make a decision: select the layers to solve, solve them, and plan the changes that pay off.

A decision is a pure function of its inputs. It solves only layers with enough potential gain. This is layer-wise
cherry-picking, the third of FlashLB's ideas, with a different criterion. FlashLB selects a layer if its balancedness
falls below a fixed value, or below 0.95 times its value after the layer's last change, and applies the changes with
the largest gains. This planner keeps no such history. It selects a layer if its PAR exceeds the PAR explained by its
experts' volatility (``score.volatility_bound``) by more than ``min_gain``. Each change must then pay for its moves on
heat that it was not fitted to (``solver.layer``, ``planner.holdout``).

References
----------
vLLM-Ascend pull requests 3042 and 6477, *FlashLB algorithm*, https://github.com/vllm-project/vllm-ascend/pull/3042.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from eplb_core.cost.moving import NOTHING_MEASURED, MovingCosts
from eplb_core.heat.window import Window
from eplb_core.placement import Float64, Int32, Placement
from eplb_core.planner import layer_verdicts
from eplb_core.planner.dealing import default_tables
from eplb_core.planner.holdout import HoldOutResult
from eplb_core.planner.layer_change import layer_outcome
from eplb_core.planner.layer_figures import LayerFigures, measure_layers
from eplb_core.planner.plan import LayerPlan, Plan
from eplb_core.planner.price import move_price
from eplb_core.planner.request import SolveRequest, groups_on_nodes
from eplb_core.planner.settings import PlannerSettings
from eplb_core.planner.small_batches import hold_out_changes, unpaid_changes, with_optimism
from eplb_core.planner.solver_call import solve_layers
from eplb_core.planner.topology import Topology
from eplb_core.planner.verdicts import LayerVerdict, MovePrice
from eplb_core.solver.engine import SolverError
from eplb_core.solver.layer import LayerResult
from eplb_core.solver.model import Recommendation, SearchOptions


def plan(
    window: Window,
    placement: Placement,
    log2phy_RLE: Int32,
    topology: Topology,
    settings: PlannerSettings,
    serving_steps: float | None = None,
    moving: MovingCosts = NOTHING_MEASURED,
    search: SearchOptions | None = None,
    recommendations: Sequence[Recommendation | None] = (),
    hold_out: bool = True,
) -> Plan:
    """Decide which layers to change, given the heat in a window and the current layout.

    The result is deterministic and does not depend on the number of threads unless the settings limit the time. If the
    solver returns an invalid result for a layer, the layer is kept and its verdict contains the error. If experts are
    bound to their ranks, all layers are kept.

    Parameters
    ----------
    window
        Heat, and source heat if the host reports it.
    placement
        Current placement.
    log2phy_RLE
        int32 ``[R, L, E]``, current table of each source rank; ``[R, L, E, D]`` for dealing tables.
    topology
        Nodes and token groups of the ranks.
    settings
        Planner settings.
    serving_steps
        Number of steps that the result is expected to serve, within which moves must pay off. ``None`` to use the
        number of steps in the window.
    moving
        Measured move costs and layer time. Values that have not been measured come from the settings.
    search
        Search options, which can disable components of the method to measure their effect; ``None`` to use all of them.
    recommendations
        Recommendations from the previous decision. Pass them only if that decision's plan is in effect and the heat
        has not changed since.
    hold_out
        True to run the hold-out for small batches (``planner.holdout``). It may be skipped if the promise is not used.

    Raises
    ------
    HeatError, PlacementError, TopologyError
        If the arguments contradict each other.

    Examples
    --------
    Experts 0 and 1 have two replicas each, but expert 3 is the hottest:

    >>> heat_TLE = np.tile(np.array([[[1000, 1000, 2000, 8000]]]), (64, 1, 1))
    >>> placement = Placement.linear(layers=1, experts=4, ranks=2, slots=3)
    >>> decision = plan(
    ...     Window(heat_TLE),
    ...     placement,
    ...     placement.default_log2phy(),
    ...     Topology.flat(2),
    ...     PlannerSettings(policy="deepseek", split="even"),
    ... )
    >>> placement.phy2log_LRS[0].tolist()
    [[0, 1, 2], [3, 0, 1]]
    >>> decision.layers[0].phy2log_RS.tolist()
    [[0, 3, 2], [3, 2, 1]]
    >>> round(decision.par_seen, 2), round(decision.par_planned, 2), decision.moves
    (1.5, 1.01, 2)
    """
    request = SolveRequest(
        window, placement, log2phy_RLE, topology, settings, search or SearchOptions(), recommendations
    )
    steps = serving_steps or float(window.steps)
    price = move_price(settings, placement.slots, topology.bytes_per_expert, steps, moving)
    groups, why_ungrouped = groups_on_nodes(settings, placement, topology)
    figures = measure_layers(request, price.price, why_ungrouped)
    if settings.policy == "none" or topology.rank_bound:
        reason = "its experts are bound to their ranks" if topology.rank_bound else "the policy is none"
        kept = tuple(
            layer_verdicts.keep_verdict(figures, layer, f"kept: {reason}") for layer in range(window.layers)
        )
        return Plan((), kept, par_TL=figures.par_TL)
    layer_P = _select_layers(figures)
    solved = solve_layers(request, layer_P, figures.floor_L, groups, price.price)
    results = dict(zip(layer_P.tolist(), solved, strict=True))
    holdouts: dict[int, HoldOutResult] = {}
    if hold_out and request.search.holdout:
        holdouts = hold_out_changes(figures, results, groups)
    return _plan_changes(figures, results, holdouts, price)


def plan_from_scratch(
    window: Window,
    placement: Placement,
    topology: Topology,
    settings: PlannerSettings,
    search: SearchOptions | None = None,
    hold_out: bool = False,
) -> Plan:
    """Place every layer from scratch, regardless of the gain.

    Parameters
    ----------
    window, topology, settings, search
        As for ``plan``, except that ``par_threshold``, ``min_gain``, ``move_price`` and ``max_layers`` are ignored.
    placement
        Placement relative to which moves are counted.
    hold_out
        True to correct the promise for the optimism of placements that are scored on the window they are fitted to.
    """
    settings = replace(settings, par_threshold=1.0, min_gain=0.0, move_price=0.0, max_layers=None)
    tables_RLE = default_tables(placement, settings.split, settings.deal_width)
    search = replace(search or SearchOptions(), warm=False)
    return plan(window, placement, tables_RLE, topology, settings, search=search, hold_out=hold_out)


def _select_layers(figures: LayerFigures) -> npt.NDArray[np.int64]:
    """Return the indices of the layers to solve, worst first."""
    search = figures.request.search
    bound_L = np.ones(figures.par_L.size)
    if search.warm and search.volatility:
        bound_L = figures.bound_L
    par_L = np.where(figures.reading_L, 1.0, figures.episode_par_L)
    return _cherry_pick(par_L, bound_L, figures.request.settings)


def _cherry_pick(par_L: Float64, bound_L: Float64, settings: PlannerSettings) -> npt.NDArray[np.int64]:
    """Return the layers above the threshold whose PAR can improve by more than ``min_gain``, worst first.

    At most ``max_layers`` are returned. ``bound_L``, float64 ``[L]``, is a lower bound on each layer's achievable PAR.

    Examples
    --------
    Layer 0 is below the threshold, and the volatility of its experts explains the PAR of layer 1:

    >>> par_L = np.array([1.01, 1.30, 1.40, 1.60])
    >>> bound_L = np.array([1.00, 1.30, 1.10, 1.10])
    >>> _cherry_pick(par_L, bound_L, PlannerSettings(par_threshold=1.02, min_gain=0.01)).tolist()
    [3, 2]
    """
    worst_first = np.argsort(bound_L - par_L, kind="stable")
    qualifies_L = (par_L > settings.par_threshold) & (par_L - bound_L > settings.min_gain)
    return worst_first[qualifies_L[worst_first]][: settings.max_layers]


def _plan_changes(
    figures: LayerFigures,
    results: Mapping[int, LayerResult | SolverError],
    holdouts: Mapping[int, HoldOutResult],
    price: MovePrice,
) -> Plan:
    """Return a plan with all changes that pay off, and a verdict on every layer.

    Parameters
    ----------
    figures
        Figures for all layers under the current layout.
    results
        Solver results keyed by layer, worst layer first.
    holdouts
        Hold-out results of layers with small batches, keyed by layer.
    price
        Move price.
    """
    layers = figures.request.window.layers
    unpaid = unpaid_changes(figures, results, holdouts)
    verdict_L = [layer_verdicts.unselected_verdict(figures, layer) for layer in range(layers)]
    recommendation_L: list[Recommendation | None] = [None] * layers
    changes: list[LayerPlan] = []
    par_TL = figures.par_TL.copy()
    for layer, result in results.items():
        if layer in unpaid:
            verdict_L[layer] = layer_verdicts.keep_verdict(figures, layer, unpaid[layer])
            continue
        if isinstance(result, LayerResult) and layer in holdouts:
            result = with_optimism(result, holdouts[layer].optimism)
        outcome = layer_outcome(figures, layer, result)
        verdict_L[layer] = outcome.verdict
        par_TL[:, layer] = outcome.par_T
        if outcome.change is not None and isinstance(result, LayerResult):
            changes.append(outcome.change)
            recommendation_L[layer] = result.recommendation
    changes.sort(key=lambda change: _gain(verdict_L[change.layer]), reverse=True)
    return Plan(tuple(changes), tuple(verdict_L), price, par_TL, recommendation_L)


def _gain(verdict: LayerVerdict) -> float:
    """Return the gain from a change, in microseconds per step if there is a cost curve, or else in PAR."""
    if verdict.us_seen is not None and verdict.us_planned is not None:
        return verdict.us_seen - verdict.us_planned
    return verdict.par_seen - verdict.par_planned
