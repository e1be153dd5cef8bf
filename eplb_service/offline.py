"""Solve recorded heat in one call, by the planner that serves online."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_service.heat.window import HeatError, Window, checked_heat
from eplb_service.placement import Float64, Int32, Placement, PlacementError, apply_layers, mean_par
from eplb_service.planner.dealing import first_tables
from eplb_service.planner.decide import plan, plan_afresh
from eplb_service.planner.plan import Plan
from eplb_service.planner.score import par_of_steps, split_steps
from eplb_service.planner.settings import PlannerSettings
from eplb_service.planner.topology import Topology
from eplb_service.wire.operator import LayerVerdict


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
    par_before_L, par_after_L
        float64 ``[L]``, peak-to-average ratio over the heat's own steps, through the tables; NaN for a layer without
        tokens.
    hottest_before_L, hottest_after_L
        float64 ``[L]``, tokens of the hottest rank in a step, mean over the steps.
    moves_L
        int64 ``[L]``, slots that hold another expert than before.
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
    policy: str = "flashlb",
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
        ``[L, R, S]``, what is deployed: layers change where that pays. Without it every layer is placed from scratch
        and compared with the linear layout.
    log2phy
        ``[R, L, E]`` or ``[R, L, E, D]``, the deployed tables that go with ``placement``, as many entries as the host
        can deal to; by the engines' fixed rule where not given.
    prior
        ``[P, L, E]``, heat that resembles this, such as prefill's before a decode instance has much of its own: what is
        deployed is taken to have been placed for it. In place of ``placement``.
    source_heat
        ``[T, R, L, E]``, tokens by the rank that they come from; uniform where it is not given.
    policy, seed, threads, options
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
    HeatError, PlacementError, SettingsError, TopologyError
        Where an argument is wrong or contradicts another; all of them are ``ValueError``.
    """
    heat_TLE = checked_heat(heat)
    _, layers, experts = heat_TLE.shape
    window = Window(heat_TLE, _summed_source(source_heat, ranks))
    settings = PlannerSettings(policy=policy, seed=seed, threads=threads, **options)
    topology = topology or Topology.flat(ranks)
    deployed = Placement.linear(layers, experts, ranks, slots)
    deployed_RLE = first_tables(deployed, settings.split, settings.deal_width)
    if prior is not None:
        if placement is not None:
            raise PlacementError("a prior was given and a placement to start from; give one of them")
        similar = _window_like(window, prior)
        made = plan_afresh(similar, deployed, topology, settings)
        deployed, deployed_RLE = apply_layers(deployed, deployed_RLE, made.changes())
    elif placement is not None:
        deployed, deployed_RLE = _deployed(deployed, placement, log2phy, settings)
    elif log2phy is not None:
        raise PlacementError("log2phy was given without the placement that it belongs to; give both")
    else:
        decided = plan_afresh(window, deployed, topology, settings)
        return _solution(window, deployed, deployed_RLE, decided, settings)
    decided = plan(window, deployed, deployed_RLE, topology, settings)
    return _solution(window, deployed, deployed_RLE, decided, settings)


def _solution(
    window: Window, deployed: Placement, deployed_RLE: Int32, decided: Plan, settings: PlannerSettings
) -> Solution:
    """The plan carried out, and both placements scored on the window."""
    after, after_RLE = apply_layers(deployed, deployed_RLE, decided.changes())
    before, then = (
        split_steps(window.heat_TLE, *way, window.source_RLE, settings.split)
        for way in ((deployed, deployed_RLE), (after, after_RLE))
    )
    return Solution(
        after.phy2log_LRS.copy(),
        after_RLE,
        par_of_steps(before),
        par_of_steps(then),
        before.peak_TK.mean(axis=0),
        then.peak_TK.mean(axis=0),
        np.count_nonzero(after.phy2log_LRS != deployed.phy2log_LRS, axis=(1, 2)),
        decided.verdicts,
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


def _deployed(
    linear: Placement, placement: npt.ArrayLike, log2phy: npt.ArrayLike | None, settings: PlannerSettings
) -> tuple[Placement, Int32]:
    """Return the placement that serves, as it was given, if it has the ranks and slots of ``linear``."""
    deployed = Placement(np.asarray(placement), linear.experts)
    if (deployed.ranks, deployed.slots) != (linear.ranks, linear.slots):
        raise PlacementError(
            f"the placement has {deployed.ranks} ranks x {deployed.slots} slots, asked for {linear.ranks} x "
            f"{linear.slots}"
        )
    if log2phy is None:
        return deployed, first_tables(deployed, settings.split, settings.deal_width)
    tables = np.asarray(log2phy)
    if tables.dtype.kind not in "iu":
        raise PlacementError(f"log2phy holds integers, got {tables.dtype}")
    return deployed, tables.astype(np.int32)


def _summed_source(source_heat: npt.ArrayLike | None, ranks: int) -> Float64 | None:
    if source_heat is None:
        return None
    source_TRLE = np.asarray(source_heat)
    if source_TRLE.ndim != 4 or source_TRLE.shape[1] != ranks:
        raise HeatError(
            f"source heat has the shape [steps, {ranks}, layers, experts], got {list(source_TRLE.shape)}"
        )
    summed: Float64 = source_TRLE.sum(axis=0, dtype=np.float64)
    return summed
