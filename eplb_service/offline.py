"""Solve recorded heat in one call, by the planner that serves online."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_service.heat.window import HeatError, Window, checked_heat
from eplb_service.placement import Int32, Placement, PlacementError, apply_layers
from eplb_service.planner.decide import plan, plan_afresh
from eplb_service.planner.plan import LayerVerdict
from eplb_service.planner.scoring import Float64, par, split_loads
from eplb_service.planner.settings import PlannerSettings
from eplb_service.planner.topology import Topology


@dataclass(frozen=True)
class Solution:
    """Placement and tables for all layers, with what they win.

    Parameters
    ----------
    phy2log
        int32 ``[L, R, S]``, logical expert in each slot.
    log2phy
        int32 ``[R, L, E]``, physical id that each source rank's tokens of each expert go to.
    par_before_L, par_after_L
        float64 ``[L]``, peak-to-average ratio over the heat's own steps, through the tables.
    hottest_before_L, hottest_after_L
        float64 ``[L]``, tokens of the hottest rank in a step, mean over the steps.
    moves_L
        int64 ``[L]``, slots that hold another expert than before.
    verdicts
        Why each layer changed or stayed.
    """

    phy2log: Int32
    log2phy: Int32
    par_before_L: Float64
    par_after_L: Float64
    hottest_before_L: Float64
    hottest_after_L: Float64
    moves_L: npt.NDArray[np.int64]
    verdicts: tuple[LayerVerdict, ...]

    @property
    def par_before(self) -> float:
        """Mean over layers."""
        return float(self.par_before_L.mean())

    @property
    def par_after(self) -> float:
        """Mean over layers."""
        return float(self.par_after_L.mean())

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
        ``[L, R, S]``, what is deployed (with the engines' fixed tables): layers change where that pays. Without it
        every layer is placed anew and compared with the linear layout.
    source_heat
        ``[T, R, L, E]``, tokens by the rank that they come from; uniform where it is not given.
    policy, seed, threads, options
        See ``PlannerSettings``; ``options`` may name any of its fields.
    topology
        Nodes and token groups; one node and no shared tokens where it is not given.

    Returns
    -------
    Solution
        Placement, tables, and what they win.

    Raises
    ------
    ValueError
        As ``HeatError``, ``PlacementError``, ``SettingsError`` or ``TopologyError``, where an argument does not fit.
    """
    heat_TLE = checked_heat(heat)
    _, layers, experts = heat_TLE.shape
    window = Window(heat_TLE, _summed_source(source_heat, ranks))
    settings = PlannerSettings(policy=policy, seed=seed, threads=threads, **options)
    topology = topology or Topology.flat(ranks)
    if placement is None:
        deployed = Placement.linear(layers, experts, ranks, slots)
        decided = plan_afresh(window, deployed, topology, settings)
    else:
        deployed = Placement(np.asarray(placement), experts)
        if (deployed.ranks, deployed.slots) != (ranks, slots):
            raise PlacementError(
                f"the placement has {deployed.ranks} ranks x {deployed.slots} slots, asked for {ranks} x {slots}"
            )
        decided = plan(window, deployed, deployed.default_log2phy(), topology, settings)
    before_RLE = deployed.default_log2phy()
    after, log2phy = apply_layers(deployed, before_RLE, decided.changes())
    loads_before = split_loads(window.heat_TLE, deployed, before_RLE, window.source_RLE, settings.split)
    loads_after = split_loads(window.heat_TLE, after, log2phy, window.source_RLE, settings.split)
    return Solution(
        after.phy2log_LRS.copy(),
        log2phy,
        par(loads_before),
        par(loads_after),
        loads_before.max(axis=2).mean(axis=0),
        loads_after.max(axis=2).mean(axis=0),
        np.count_nonzero(after.phy2log_LRS != deployed.phy2log_LRS, axis=(1, 2)),
        decided.verdicts,
    )


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
