"""Offline solver: compute a placement from recorded heat in one call, using the same planner as the service."""

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
from eplb_core.planner.dealing import default_tables
from eplb_core.planner.decide import plan, plan_from_scratch
from eplb_core.planner.plan import Plan
from eplb_core.planner.policies import (
    PolicyError,
    PolicyFunction,
    external_policy,
    name_of,
    options_of,
    run_external_policy,
)
from eplb_core.planner.request import with_options
from eplb_core.planner.score import par_of_steps, split_steps
from eplb_core.planner.settings import PlannerSettings, SettingsError
from eplb_core.planner.topology import Topology, TopologyError
from eplb_core.planner.verdicts import LayerVerdict
from eplb_core.solver.model import SearchOptions


@dataclass(frozen=True)
class Solution:
    """Placement and tables of all layers, with the balance before and after the change.

    Parameters
    ----------
    phy2log
        int32 ``[L, R, S]``, logical expert in each slot.
    log2phy
        int32 ``[R, L, E]``, physical id to which each source rank sends an expert's tokens. If ``split`` is ``deal``,
        int32 ``[R, L, E, D]``: the physical ids that the rank uses in turn.
    par_before_L
        float64 ``[L]``, peak-to-average ratio over the steps of the heat, with the placement and tables before the
        change; NaN for a layer without tokens.
    par_after_L
        float64 ``[L]``, peak-to-average ratio promised for similar steps. It is slightly higher than on the heat
        itself, because a placement performs worse on steps that it was not fitted to. If there are few tokens per step,
        it is measured on held-out steps.
    hottest_before_L
        float64 ``[L]``, tokens of the hottest rank per step, averaged over the steps.
    hottest_after_L
        float64 ``[L]``, tokens of the hottest rank per step after the change, as promised for similar steps.
    moves_L
        int64 ``[L]``, number of slots that must receive a different expert, including previously empty slots.
    verdicts
        Reason why each layer changed or stayed. With a cost curve, also the microseconds of its slowest rank.
    ms_before
        Milliseconds per step of each layer's slowest rank, summed over the layers; ``None`` if there is no cost
        curve.
    ms_after
        ``ms_before`` after the change.
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
        """Mean of ``par_before_L`` over the layers with tokens; NaN if no layer had tokens."""
        return float(mean_par(self.par_before_L))

    @property
    def par_after(self) -> float:
        """Mean of ``par_after_L`` over the layers with tokens; NaN if no layer had tokens."""
        return float(mean_par(self.par_after_L))

    @property
    def moves(self) -> int:
        """Total number of slots whose expert changed, over all layers."""
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
    """Place the experts of every layer according to recorded heat.

    Parameters
    ----------
    heat
        ``[T, L, E]``, tokens per step, layer and logical expert.
    ranks
        Number of ranks, R.
    slots
        Expert slots per rank and layer, S.
    placement
        ``[L, R, S']``, deployed placement. A layer changes only if the change pays off. Without ``placement``, every
        layer is placed from scratch and compared with the linear layout. The placement may come from a different
        balancer: an expert may occur twice on a rank, a slot may be empty (-1), and S' may differ from ``slots``. Such
        layers are repaired; see ``placement.foreign``.
    log2phy
        ``[R, L, E]`` or ``[R, L, E, D]``, deployed tables of ``placement``; by default the tables that follow from the
        engines' fixed rule. D is the number of entries per expert that the host uses in turn.
    prior
        ``[P, L, E]``, similar heat, such as prefill heat for a decode instance that has not yet recorded enough decode
        heat. The deployed placement is assumed to be the one solved for this heat. Cannot be combined with
        ``placement``.
    source_heat
        ``[T, R, L, E]``, tokens by source rank, which must add up to ``heat``. By default, every rank sends the same
        number of tokens.
    policy
        A built-in policy, ``module:function``, the name of an entry point of ``eplb.policies``, or a function; see
        ``planner.policies``.
    seed
        Seed of the search; see ``PlannerSettings``.
    threads
        Threads of the solver; see ``PlannerSettings``.
    topology
        Nodes and token groups; by default, one node and no shared tokens.
    options
        Any other fields of ``PlannerSettings``. With a ``CostCurve`` as ``cost_curve``, a layer changes only if the
        change shortens the time of its slowest rank.

    Returns
    -------
    Solution
        Placement and tables, with their balance on this heat.

    Raises
    ------
    HeatError, PlacementError, PolicyError, SettingsError, TopologyError
        If an argument is invalid or contradicts another argument. All of these are subclasses of ``ValueError``.

    Examples
    --------
    One layer has four experts on two ranks with three slots each, so two experts can have a second replica. In each of
    eight steps, the experts receive 2,000, 1,000, 6,000 and 1,000 tokens. The linear layout gives the second replicas
    to experts 0 and 1. Expert 2 then has only one replica, and its rank has 1.5 times the mean load.

    >>> heat = np.tile([2000, 1000, 6000, 1000], (8, 1, 1))
    >>> heat.shape
    (8, 1, 4)
    >>> Placement.linear(layers=1, experts=4, ranks=2, slots=3).phy2log_LRS[0].tolist()
    [[0, 1, 2], [3, 0, 1]]

    The solver replaces the second replica of expert 1 with one of expert 2, which is one move. Physical ids number the
    slots of all ranks: rank 0 sends its tokens of expert 2 to slot 2, its own replica, and rank 1 sends them to slot 5.

    >>> solution = solve(heat, ranks=2, slots=3)
    >>> solution.phy2log[0].tolist()
    [[0, 1, 2], [3, 0, 2]]
    >>> solution.log2phy[:, 0].tolist()
    [[0, 1, 2, 3], [4, 1, 5, 3]]
    >>> solution.moves
    1
    >>> round(solution.par_before, 2), round(solution.par_after, 2)
    (1.5, 1.01)

    The remaining 1 % is sampling noise: the tokens that each source rank sends to an expert vary from step to step.
    """
    _check_counts(ranks, slots)
    if topology is not None and not isinstance(topology, Topology):
        raise TopologyError(
            f"topology is a {type(topology).__name__}; it must be a planner.topology.Topology"
        )
    names = [field.name for field in fields(PlannerSettings)]
    if unknown := sorted(set(options) - set(names)):
        raise SettingsError(f"unknown option {unknown[0]!r}; the options are {', '.join(names)}")
    heat_TLE = checked_heat(heat)
    if not len(heat_TLE):
        raise HeatError("heat has no steps")
    settings = PlannerSettings(seed=seed, threads=threads, **options)
    ranks = int(ranks)
    slots = int(slots)
    window = Window(heat_TLE, _summed_source(source_heat, heat_TLE, ranks, topology))
    topology = topology or Topology.flat(ranks)
    return solve_window(window, slots, topology, settings, placement, log2phy, prior, policy)


def _check_counts(ranks: Any, slots: Any) -> None:
    """Raise ``PlacementError`` unless both are positive whole numbers."""
    for name, count in (("ranks", ranks), ("slots", slots)):
        if isinstance(count, bool) or not isinstance(count, Integral) or count < 1:
            raise PlacementError(f"{name} is {count!r}; it must be a whole number, 1 or more")


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
    """Solve a window of heat with validated settings; see ``solve``.

    Parameters
    ----------
    window
        Heat and source heat.
    slots
        Expert slots per rank and layer.
    topology
        Nodes and token groups of the ranks.
    settings
        Planner settings.
    placement
        As for ``solve``.
    log2phy
        As for ``solve``.
    prior
        As for ``solve``.
    policy
        As for ``solve``; by default the policy of the settings.

    Returns
    -------
    Solution
        Placement and tables, with their balance on this window.
    """
    policy = settings.policy if policy is None else policy
    function = external_policy(policy)
    search = SearchOptions()
    if function is None and isinstance(policy, str):
        settings, search = with_options(settings, options_of(policy))
    linear = Placement.linear(window.layers, window.experts, topology.ranks, slots)
    if placement is not None and prior is not None:
        raise PlacementError("prior and placement cannot be used together; give only one")
    if placement is not None:
        start = _Start.from_placement(placement, log2phy, linear, window, settings)
    elif log2phy is not None:
        raise PlacementError("log2phy was given without the placement that it belongs to; give both")
    else:
        start = _Start(linear, default_tables(linear, settings.split, settings.deal_width))
        if prior is not None:
            prior_plan = plan_from_scratch(_prior_window(window, prior), linear, topology, settings, search)
            start = _Start(*apply_layers(start.placement, start.tables_RLE, prior_plan.changes()))
    if function is not None:
        return _external_solution(name_of(policy), function, window, start, settings, topology)
    if placement is not None:
        decision = plan(window, start.placement, start.tables_RLE, topology, settings, search=search)
    elif prior is not None:
        decision = plan(window, start.placement, start.tables_RLE, topology, settings)
    else:
        decision = plan_from_scratch(window, linear, topology, settings, search, hold_out=True)
    return _solution(window, start, decision, settings, topology)


@dataclass(frozen=True)
class _Start:
    """Layout before a decision.

    Parameters
    ----------
    placement
        Placement that can be deployed.
    tables_RLE
        int32 ``[R, L, E]`` or ``[R, L, E, D]``, tables of ``placement``.
    foreign_LRS
        int32 ``[L, R, S']``, the deployed placement, if it had to be repaired; ``None`` otherwise.
    foreign
        ``foreign_LRS`` as a ``Placement``, to compute the current rank loads.
    foreign_RLE
        The deployed tables of ``foreign``.
    """

    placement: Placement
    tables_RLE: Int32
    foreign_LRS: Int32 | None = None
    foreign: Placement | None = None
    foreign_RLE: Int32 | None = None

    @classmethod
    def from_placement(
        cls,
        placement: npt.ArrayLike,
        log2phy: npt.ArrayLike | None,
        linear: Placement,
        window: Window,
        settings: PlannerSettings,
    ) -> _Start:
        """Check a deployed placement and its tables, and repair the placement if necessary."""
        input_LRS = checked_foreign(placement, linear.experts)
        if input_LRS.shape[:2] != (linear.layers, linear.ranks):
            raise PlacementError(
                f"expected a placement of {linear.layers} layers x {linear.ranks} ranks, got {input_LRS.shape[0]} x "
                f"{input_LRS.shape[1]}"
            )
        valid = repaired(input_LRS, linear.experts, linear.slots, window.heat_TLE.sum(axis=0))
        tables_RLE = default_tables(valid, settings.split, settings.deal_width)
        input_tables = None if log2phy is None else np.asarray(log2phy)
        if input_tables is not None and input_tables.dtype.kind not in "iu":
            raise PlacementError(f"log2phy must be an array of integers, got {input_tables.dtype}")
        if np.array_equal(input_LRS, valid.phy2log_LRS):
            return cls(valid, tables_RLE if input_tables is None else input_tables.astype(np.int32))
        foreign = as_served(input_LRS, linear.experts)
        if input_tables is None:
            foreign_RLE = default_tables(foreign, settings.split, settings.deal_width)
            return cls(valid, tables_RLE, input_LRS, foreign, foreign_RLE)
        foreign_RLE = input_tables.astype(np.int32)
        for layer, input_RS in enumerate(input_LRS):
            check_log2phy(
                foreign_RLE[:, layer], input_RS, f"log2phy of layer {layer}", deals=foreign_RLE.ndim == 4
            )
        # Keep the deployed tables of unchanged layers only. In a repaired layer, they may point to slots that now have
        # a different expert.
        if with_entries(foreign_RLE, 3).shape == with_entries(tables_RLE, 3).shape:
            unchanged_L = _unchanged_layers(input_LRS, valid)
            tables_RLE = tables_RLE.copy()
            tables_RLE[:, unchanged_L] = foreign_RLE.reshape(tables_RLE.shape)[:, unchanged_L]
        return cls(valid, tables_RLE, input_LRS, foreign, foreign_RLE)

    @property
    def current(self) -> tuple[Placement, Int32]:
        """Placement and tables in effect before the change, to compute rank loads."""
        if self.foreign is not None and self.foreign_RLE is not None:
            return self.foreign, self.foreign_RLE
        return self.placement, self.tables_RLE

    def held_slots(self, slots: int) -> Int32:
        """Return the expert in each of ``slots`` slots per rank before the change, int32 ``[L, R, S]``.

        A slot is -1 if it was empty or did not exist. Slots beyond ``slots`` are dropped.
        """
        deployed_LRS = self.placement.phy2log_LRS if self.foreign_LRS is None else self.foreign_LRS
        layers, ranks, deployed_slots = deployed_LRS.shape
        held_LRS = np.full((layers, ranks, slots), -1, dtype=np.int32)
        common = min(slots, deployed_slots)
        held_LRS[:, :, :common] = deployed_LRS[:, :, :common]
        return held_LRS


def _external_solution(
    name: str,
    function: PolicyFunction,
    window: Window,
    start: _Start,
    settings: PlannerSettings,
    topology: Topology,
) -> Solution:
    """Call an external policy, and return its placement as a solution."""
    placement, log2phy_RLE = run_external_policy(name, function, window, start.placement)
    if log2phy_RLE is None:
        log2phy_RLE = default_tables(placement, settings.split, settings.deal_width)
    # The ``none`` policy changes nothing, so its verdicts contain the figures of the current layout.
    unchanged = plan(window, start.placement, start.tables_RLE, topology, replace(settings, policy="none"))
    if log2phy_RLE.shape != start.tables_RLE.shape:
        raise PolicyError(
            f"policy {name} returned tables of shape {list(log2phy_RLE.shape)}; expected "
            f"{list(start.tables_RLE.shape)}"
        )
    solution = _solution(window, start, unchanged, settings, topology, (placement, log2phy_RLE))
    verdicts = []
    for layer, verdict in enumerate(unchanged.verdicts):
        moves = int(solution.moves_L[layer])
        verdicts.append(
            replace(
                verdict,
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


def _unchanged_layers(input_LRS: Int32, valid: Placement) -> npt.NDArray[np.bool_]:
    """Return a mask of the layers that a repair left unchanged, bool ``[L]``."""
    if input_LRS.shape != valid.phy2log_LRS.shape:
        return np.zeros(valid.layers, dtype=np.bool_)
    unchanged_L: npt.NDArray[np.bool_] = (input_LRS == valid.phy2log_LRS).all(axis=(1, 2))
    return unchanged_L


def _solution(
    window: Window,
    start: _Start,
    decision: Plan,
    settings: PlannerSettings,
    topology: Topology,
    new_layout: tuple[Placement, Int32] | None = None,
) -> Solution:
    """Score the layouts before and after a decision on the window.

    The layout after the decision is ``new_layout``, by default the start with the decision's changes.
    """
    after, after_RLE = new_layout or apply_layers(start.placement, start.tables_RLE, decision.changes())
    current, current_RLE = start.current
    before_steps = split_steps(window.heat_TLE, current, current_RLE, window.source_RLE, settings.split)
    after_steps = split_steps(window.heat_TLE, after, after_RLE, window.source_RLE, settings.split)
    measured_L = par_of_steps(after_steps)
    par_before_L = np.array([verdict.par_seen for verdict in decision.verdicts])
    par_after_L = np.array([verdict.par_planned for verdict in decision.verdicts])
    if start.foreign_LRS is not None:
        par_before_L = par_of_steps(before_steps)
    if new_layout is not None:
        par_after_L = measured_L
    # The mean rank load does not depend on the placement, so the promised tokens scale with the promised PAR.
    promise_factor_L = np.nan_to_num(par_after_L / measured_L, nan=1.0)
    held_LRS = start.held_slots(after.slots)
    moves_L = np.count_nonzero(after.phy2log_LRS != held_LRS, axis=(1, 2))
    return Solution(
        phy2log=after.phy2log_LRS.copy(),
        log2phy=after_RLE,
        par_before_L=par_before_L,
        par_after_L=par_after_L,
        hottest_before_L=before_steps.peak_TK.mean(axis=0),
        hottest_after_L=after_steps.peak_TK.mean(axis=0) * promise_factor_L,
        moves_L=moves_L,
        verdicts=_verdicts(start, decision, held_LRS, par_before_L, moves_L, topology),
        ms_before=decision.ms_seen,
        ms_after=decision.ms_planned,
    )


def _verdicts(
    start: _Start,
    decision: Plan,
    held_LRS: Int32,
    par_before_L: Float64,
    moves_L: npt.NDArray[np.int64],
    topology: Topology,
) -> tuple[LayerVerdict, ...]:
    """Return the verdicts of a decision, including the repair of a foreign placement."""
    verdicts = list(decision.verdicts)
    if start.foreign_LRS is None:
        return tuple(verdicts)
    for layer in np.flatnonzero(~_unchanged_layers(start.foreign_LRS, start.placement)).tolist():
        verdict = verdicts[layer]
        moves = int(moves_L[layer])
        filled = int(np.count_nonzero(start.placement.phy2log_LRS[layer] != held_LRS[layer]))
        verdicts[layer] = replace(
            verdict,
            par_seen=float(par_before_L[layer]),
            moves=moves,
            bytes=moves * topology.bytes_per_expert,
            changed=True,
            reason=f"{filled} empty or wasted slots filled; then {verdict.reason}",
        )
    return tuple(verdicts)


def _prior_window(window: Window, prior: npt.ArrayLike) -> Window:
    """Return the prior as a window. Raises ``HeatError`` if its layers or experts differ from those of the heat."""
    prior_TLE = checked_heat(prior)
    if prior_TLE.shape[1:] != window.heat_TLE.shape[1:]:
        raise HeatError(
            f"the prior has {prior_TLE.shape[1]} layers x {prior_TLE.shape[2]} experts, but the heat has "
            f"{window.layers} x {window.experts}; both must come from the same model"
        )
    return Window(prior_TLE)


def _summed_source(
    source_heat: npt.ArrayLike | None, heat_TLE: Counts, ranks: int, topology: Topology | None
) -> Float64 | None:
    """Return the tokens by source rank over all steps, float64 ``[R, L, E]``.

    Raises ``HeatError`` if their shape or their sum does not match the heat.
    """
    if source_heat is None:
        return None
    source_TRLE = np.asarray(source_heat)
    if source_TRLE.dtype.kind not in "iuf":
        raise HeatError(f"source heat must be numeric, got {source_TRLE.dtype}")
    steps, layers, experts = heat_TLE.shape
    expected = (steps, ranks, layers, experts)
    if source_TRLE.shape != expected:
        raise HeatError(
            f"expected source heat of shape [steps, ranks, layers, experts] = {list(expected)}, got "
            f"{list(source_TRLE.shape)}"
        )
    source_RLE: Float64 = source_TRLE.sum(axis=0, dtype=np.float64)
    # All ranks in a token group report the same tokens, so the sum can be checked only if there are no token groups.
    if topology is None or topology.token_groups()[0].size == ranks:
        heat_LE = heat_TLE.sum(axis=0, dtype=np.float64)
        wrong_LE = ~np.isclose(source_RLE.sum(axis=0), heat_LE, rtol=1e-6, atol=1e-6)
        if wrong_LE.any():
            layer, expert = np.argwhere(wrong_LE)[0]
            raise HeatError(
                f"source heat adds up to {source_RLE[:, layer, expert].sum():g} tokens for expert {expert} in layer "
                f"{layer}, but heat has {heat_LE[layer, expert]:g}; both must count the same tokens"
            )
    return source_RLE
