"""Solve recorded heat in one call, by the planner that serves online."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from numbers import Integral
from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_core.heat.window import Counts, HeatError, Window, checked_heat
from eplb_core.placement import (
    Float64,
    Int32,
    Placement,
    PlacementError,
    apply_layers,
    as_served,
    check_log2phy,
    checked_foreign,
    mean_par,
    repaired,
    with_entries,
)
from eplb_core.planner.dealing import first_tables
from eplb_core.planner.decide import plan, plan_afresh
from eplb_core.planner.plan import Plan
from eplb_core.planner.policies import (
    PolicyError,
    PolicyFunction,
    answer_of,
    external_policy,
    name_of,
    options_of,
)
from eplb_core.planner.request import with_options
from eplb_core.planner.score import par_of_steps, split_steps
from eplb_core.planner.settings import PlannerSettings, SettingsError
from eplb_core.planner.topology import Topology, TopologyError
from eplb_core.planner.verdicts import LayerVerdict
from eplb_core.solver.model import SearchOptions


@dataclass(frozen=True)
class Solution:
    """Placement and tables for all layers, with what they win.

    Parameters
    ----------
    phy2log
        int32 ``[L, R, S]``, logical expert in each slot.
    log2phy
        int32 ``[R, L, E]``, physical id that each source rank's tokens of each expert go to; ``[R, L, E, D]``, those
        that they go to in turn, where ``split`` is deal.
    par_before_L
        float64 ``[L]``, peak-to-average ratio over the heat's own steps, through the tables; NaN for a layer without
        tokens.
    par_after_L
        float64 ``[L]``, the same, as promised for steps like these: a placement does a little worse on steps that it
        was not fitted to. With few tokens per step this is measured on held-out steps.
    hottest_before_L, hottest_after_L
        float64 ``[L]``, tokens of the hottest rank in a step, mean over the steps; as promised for ``after``.
    moves_L
        int64 ``[L]``, slots that must receive an expert that they did not hold before, empty slots included.
    verdicts
        Why each layer changed or stayed, and with a cost curve the microseconds of its slowest rank.
    ms_before, ms_after
        Milliseconds of the slowest ranks of all layers in a step; ``None`` without a cost curve.
    """

    phy2log: Int32
    log2phy: Int32
    par_before_L: Float64
    par_after_L: Float64
    hottest_before_L: Float64
    hottest_after_L: Float64
    moves_L: npt.NDArray[np.int64]
    verdicts: tuple[LayerVerdict, ...]
    ms_before: float | None = None
    ms_after: float | None = None

    @property
    def par_before(self) -> float:
        """Mean over the layers that had tokens; NaN where none had."""
        return float(mean_par(self.par_before_L))

    @property
    def par_after(self) -> float:
        """Mean over the layers that had tokens; NaN where none had."""
        return float(mean_par(self.par_after_L))

    @property
    def moves(self) -> int:
        """Slots that hold another expert than before, over all layers."""
        return int(self.moves_L.sum())


def solve(
    heat: npt.ArrayLike,
    ranks: int,
    slots: int,
    *,
    placement: npt.ArrayLike | None = None,
    log2phy: npt.ArrayLike | None = None,
    prior: npt.ArrayLike | None = None,
    source_heat: npt.ArrayLike | None = None,
    policy: str | PolicyFunction = "flashlb",
    seed: int = 0,
    threads: int | None = None,
    topology: Topology | None = None,
    **options: Any,
) -> Solution:
    """Place the experts of every layer for the heat given.

    Parameters
    ----------
    heat
        ``[T, L, E]``, tokens per step, layer and logical expert.
    ranks, slots
        R and S.
    placement
        ``[L, R, S']``, what is deployed: layers change if that pays. Without it, every layer is placed from scratch and
        compared with the linear layout. Another balancer may have made it: an expert may be twice on a rank, a slot
        may be empty (-1), and S' may differ from ``slots``. Such layers are repaired, see ``placement.foreign``.
    log2phy
        ``[R, L, E]`` or ``[R, L, E, D]``, the deployed tables that go with ``placement``, as many entries as the host
        can deal to; by default those of the engines' fixed rule.
    prior
        ``[P, L, E]``, heat that resembles this, such as prefill's before a decode instance has much of its own: what is
        deployed is taken to have been placed for it. In place of ``placement``.
    source_heat
        ``[T, R, L, E]``, tokens by the rank that they come from, which add up to ``heat``; by default every rank sends
        equally many.
    policy
        A built-in policy, ``module:function``, the name of an entry point of ``eplb.policies``, or a function; see
        ``planner.policies``.
    seed, threads, options
        See ``PlannerSettings``; ``options`` may name any of its fields. With ``cost_curve``, a ``CostCurve``, the
        slowest rank's time is lowered in place of its tokens.
    topology
        Nodes and token groups; one node and no shared tokens where it is not given.

    Returns
    -------
    Solution
        Placement, tables, and what they win on this heat.

    Raises
    ------
    HeatError, PlacementError, PolicyError, SettingsError, TopologyError
        Where an argument is wrong or contradicts another; all of them are ``ValueError``.
    """
    counts: dict[str, Any] = {"ranks": ranks, "slots": slots}
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, Integral) or count < 1:
            raise PlacementError(f"{name} is {count!r}; it must be a whole number, 1 or more")
    if topology is not None and not isinstance(topology, Topology):
        raise TopologyError(
            f"topology is a {type(topology).__name__}; it must be a planner.topology.Topology"
        )
    if unknown := sorted(set(options) - {one.name for one in fields(PlannerSettings)}):
        known = ", ".join(one.name for one in fields(PlannerSettings))
        raise SettingsError(f"unknown option {unknown[0]!r}; the options are {known}")
    heat_TLE = checked_heat(heat)
    if not len(heat_TLE):
        raise HeatError("heat has no steps")
    settings = PlannerSettings(seed=seed, threads=threads, **options)
    ranks = int(ranks)
    slots = int(slots)
    window = Window(heat_TLE, _summed_source(source_heat, heat_TLE, ranks, topology))
    topology = topology or Topology.flat(ranks)
    return solve_window(window, slots, topology, settings, placement, log2phy, prior, policy)


def solve_window(
    window: Window,
    slots: int,
    topology: Topology,
    settings: PlannerSettings,
    placement: npt.ArrayLike | None = None,
    log2phy: npt.ArrayLike | None = None,
    prior: npt.ArrayLike | None = None,
    policy: str | PolicyFunction | None = None,
) -> Solution:
    """Do what ``solve`` does, for heat and settings that are checked already; arguments as there.

    Without ``policy``, that of the settings decides.
    """
    policy = settings.policy if policy is None else policy
    function = external_policy(policy)
    search = SearchOptions()
    if function is None and isinstance(policy, str):
        settings, search = with_options(settings, options_of(policy))
    linear = Placement.linear(window.layers, window.experts, topology.ranks, slots)
    linear_RLE = first_tables(linear, settings.split, settings.deal_width)
    if placement is not None and prior is not None:
        raise PlacementError("a prior was given and a placement to start from; give one of them")
    if placement is not None:
        start = _Start.of(placement, log2phy, linear, window, settings)
        if function is not None:
            return _answered(name_of(policy), function, window, start, settings, topology)
        decided = plan(window, start.deployed, start.deployed_RLE, topology, settings, search=search)
        return _solution(window, start, decided, settings, topology)
    if log2phy is not None:
        raise PlacementError("log2phy was given without the placement that it belongs to; give both")
    if prior is None:
        if function is not None:
            start = _Start(linear, linear_RLE)
            return _answered(name_of(policy), function, window, start, settings, topology)
        decided = plan_afresh(window, linear, topology, settings, search, hold_out=True)
        return _solution(window, _Start(linear, linear_RLE), decided, settings, topology)
    made = plan_afresh(_window_like(window, prior), linear, topology, settings, search)
    start = _Start(*apply_layers(linear, linear_RLE, made.changes()))
    if function is not None:
        return _answered(name_of(policy), function, window, start, settings, topology)
    decided = plan(window, start.deployed, start.deployed_RLE, topology, settings)
    return _solution(window, start, decided, settings, topology)


@dataclass(frozen=True)
class _Start:
    """Placement and tables from which a decision starts.

    Parameters
    ----------
    deployed, deployed_RLE
        A placement that can be deployed, and its tables.
    given_LRS
        int32 ``[L, R, S']``, the placement as it was given, if that is another one.
    served, served_RLE
        The given placement and its tables, for computing what serves now.
    """

    deployed: Placement
    deployed_RLE: Int32
    given_LRS: Int32 | None = None
    served: Placement | None = None
    served_RLE: Int32 | None = None

    @classmethod
    def of(
        cls,
        placement: npt.ArrayLike,
        log2phy: npt.ArrayLike | None,
        linear: Placement,
        window: Window,
        settings: PlannerSettings,
    ) -> _Start:
        """Check what was given, and repair it if another balancer made it."""
        given_LRS = checked_foreign(placement, linear.experts)
        if given_LRS.shape[:2] != (linear.layers, linear.ranks):
            raise PlacementError(
                f"the placement has {given_LRS.shape[0]} layers x {given_LRS.shape[1]} ranks, expected "
                f"{linear.layers} x {linear.ranks}"
            )
        deployed = repaired(given_LRS, linear.experts, linear.slots, window.heat_TLE.sum(axis=0))
        first_RLE = first_tables(deployed, settings.split, settings.deal_width)
        tables = None if log2phy is None else np.asarray(log2phy)
        if tables is not None and tables.dtype.kind not in "iu":
            raise PlacementError(f"log2phy holds integers, got {tables.dtype}")
        if np.array_equal(given_LRS, deployed.phy2log_LRS):
            return cls(deployed, first_RLE if tables is None else tables.astype(np.int32))
        served = as_served(given_LRS, linear.experts)
        if tables is None:
            served_RLE = first_tables(served, settings.split, settings.deal_width)
            return cls(deployed, first_RLE, given_LRS, served, served_RLE)
        given_RLE = tables.astype(np.int32)
        for layer, given_RS in enumerate(given_LRS):
            check_log2phy(
                given_RLE[:, layer], given_RS, f"log2phy of layer {layer}", deals=given_RLE.ndim == 4
            )
        # Tables of repaired layers may point to slots that hold another expert now.
        if with_entries(given_RLE, 3).shape == with_entries(first_RLE, 3).shape:
            same_L = _same_layers(given_LRS, deployed)
            first_RLE = first_RLE.copy()
            first_RLE[:, same_L] = given_RLE.reshape(first_RLE.shape)[:, same_L]
        return cls(deployed, first_RLE, given_LRS, served, given_RLE)


def _answered(
    name: str,
    function: PolicyFunction,
    window: Window,
    start: _Start,
    settings: PlannerSettings,
    topology: Topology,
) -> Solution:
    """Return what an external policy answers, as a solution."""
    placement, log2phy_RLE = answer_of(name, function, window, start.deployed)
    if log2phy_RLE is None:
        log2phy_RLE = first_tables(placement, settings.split, settings.deal_width)
    # Nothing is solved: the verdicts have the figures of what serves now.
    seen = plan(window, start.deployed, start.deployed_RLE, topology, replace(settings, policy="none"))
    if log2phy_RLE.shape != start.deployed_RLE.shape:
        raise PolicyError(
            f"policy {name} answered tables of the shape {list(log2phy_RLE.shape)}, expected "
            f"{list(start.deployed_RLE.shape)}"
        )
    solution = _solution(window, start, seen, settings, topology, (placement, log2phy_RLE))
    verdicts = []
    for layer, was in enumerate(seen.verdicts):
        moves = int(solution.moves_L[layer])
        verdicts.append(
            replace(
                was,
                par_seen=float(solution.par_before_L[layer]),
                par_planned=float(solution.par_after_L[layer]),
                moves=moves,
                bytes=moves * topology.bytes_per_expert,
                changed=moves > 0,
                reason=f"placed by {name}",
                us_seen=None,
                us_planned=None,
            )
        )
    return replace(solution, verdicts=tuple(verdicts), ms_before=None, ms_after=None)


def _same_layers(given_LRS: Int32, deployed: Placement) -> npt.NDArray[np.bool_]:
    """Layers that a repair left as they were, bool ``[L]``."""
    if given_LRS.shape != deployed.phy2log_LRS.shape:
        return np.zeros(deployed.layers, dtype=np.bool_)
    same_L: npt.NDArray[np.bool_] = (given_LRS == deployed.phy2log_LRS).all(axis=(1, 2))
    return same_L


def _solution(
    window: Window,
    start: _Start,
    decided: Plan,
    settings: PlannerSettings,
    topology: Topology,
    then_serves: tuple[Placement, Int32] | None = None,
) -> Solution:
    """Carry out the plan, or serve ``then_serves``, and score the placements before and after on the window."""
    after, after_RLE = then_serves or apply_layers(start.deployed, start.deployed_RLE, decided.changes())
    served = start.deployed
    served_RLE = start.deployed_RLE
    if start.served is not None and start.served_RLE is not None:
        served = start.served
        served_RLE = start.served_RLE
    before, then = (
        split_steps(window.heat_TLE, *way, window.source_RLE, settings.split)
        for way in ((served, served_RLE), (after, after_RLE))
    )
    par_L, par_after_L = (
        np.array([getattr(verdict, name) for verdict in decided.verdicts])
        for name in ("par_seen", "par_planned")
    )
    if start.given_LRS is not None:
        par_L = par_of_steps(before)
    if then_serves is not None:
        par_after_L = par_of_steps(then)
    # The mean load of a rank does not depend on the placement.
    worse_L = np.nan_to_num(par_after_L / par_of_steps(then), nan=1.0)
    given_LRS = start.deployed.phy2log_LRS if start.given_LRS is None else start.given_LRS
    # Slots that no longer exist receive nothing; new ones were empty.
    held_LRS = np.full(after.phy2log_LRS.shape, -1, dtype=np.int32)
    common = min(after.slots, given_LRS.shape[2])
    held_LRS[:, :, :common] = given_LRS[:, :, :common]
    moves_L = np.count_nonzero(after.phy2log_LRS != held_LRS, axis=(1, 2))
    verdicts = list(decided.verdicts)
    if start.given_LRS is not None:
        for layer in np.flatnonzero(~_same_layers(given_LRS, start.deployed)).tolist():
            was = verdicts[layer]
            moves = int(moves_L[layer])
            filled = int(np.count_nonzero(start.deployed.phy2log_LRS[layer] != held_LRS[layer]))
            verdicts[layer] = replace(
                was,
                par_seen=float(par_L[layer]),
                moves=moves,
                bytes=moves * topology.bytes_per_expert,
                changed=True,
                reason=f"{filled} empty or wasted slots filled; then {was.reason}",
            )
    return Solution(
        after.phy2log_LRS.copy(),
        after_RLE,
        par_L,
        par_after_L,
        before.peak_TK.mean(axis=0),
        then.peak_TK.mean(axis=0) * worse_L,
        moves_L,
        tuple(verdicts),
        decided.ms_seen,
        decided.ms_planned,
    )


def _window_like(window: Window, prior: npt.ArrayLike) -> Window:
    """Heat of a prior, which must be of the same model as the window's."""
    prior_TLE = checked_heat(prior)
    if prior_TLE.shape[1:] != window.heat_TLE.shape[1:]:
        raise HeatError(
            f"the prior has {prior_TLE.shape[1]} layers x {prior_TLE.shape[2]} experts, the heat {window.layers} x "
            f"{window.experts}; it must be of the same model"
        )
    return Window(prior_TLE)


def _summed_source(
    source_heat: npt.ArrayLike | None, heat_TLE: Counts, ranks: int, topology: Topology | None
) -> Float64 | None:
    """Return tokens by source rank over all steps, float64 ``[R, L, E]``, if they are the tokens of the heat."""
    if source_heat is None:
        return None
    source_TRLE = np.asarray(source_heat)
    if source_TRLE.dtype.kind not in "iuf":
        raise HeatError(f"source heat holds numbers, got {source_TRLE.dtype}")
    steps, layers, experts = heat_TLE.shape
    expected = (steps, ranks, layers, experts)
    if source_TRLE.shape != expected:
        raise HeatError(
            f"source heat has the shape [steps, ranks, layers, experts] = {list(expected)}, got "
            f"{list(source_TRLE.shape)}"
        )
    summed: Float64 = source_TRLE.sum(axis=0, dtype=np.float64)
    # Ranks that share tokens each report them.
    if topology is None or topology.token_groups()[0].size == ranks:
        heat_LE = heat_TLE.sum(axis=0, dtype=np.float64)
        wrong_LE = ~np.isclose(summed.sum(axis=0), heat_LE, rtol=1e-6, atol=1e-6)
        if wrong_LE.any():
            layer, expert = np.argwhere(wrong_LE)[0]
            raise HeatError(
                f"source heat adds up to {summed[:, layer, expert].sum():g} tokens of expert {expert} in layer "
                f"{layer}, the heat to {heat_LE[layer, expert]:g}; both must count the same tokens"
            )
    return summed
