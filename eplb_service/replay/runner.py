"""Run the planner along a trace as the service would: decide on a window, serve the next steps under it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from eplb_service.heat.window import Window
from eplb_service.placement import Int32, Placement
from eplb_service.planner.decide import plan
from eplb_service.planner.plan import Plan
from eplb_service.planner.scoring import par, rank_loads
from eplb_service.planner.settings import PlannerSettings
from eplb_service.planner.topology import Topology
from eplb_service.replay.result import Decision, PolicyReplay, Replay
from eplb_service.replay.schedule import Schedule

Heat = npt.NDArray[np.int64] | npt.NDArray[np.float64]
"""int64 or float64 heat; its dimensions stand in the variable's name."""


def replay(
    heat_TLE: Heat,
    placement: Placement,
    policies: Sequence[str],
    schedule: Schedule,
    *,
    settings: PlannerSettings | None = None,
    topology: Topology | None = None,
    on_decision: Callable[[str, Decision], None] | None = None,
) -> Replay:
    """Score each of ``policies`` over the same steps of a trace, all from the same starting placement.

    A trace does not tell where tokens come from: an expert's tokens are split evenly over the source ranks.

    Parameters
    ----------
    heat_TLE
        Tokens of each logical expert in each step, ``[T, L, E]``, as ``checked_heat`` returns it.
    placement
        Where the weights stand at the start, under the engines' fixed tables.
    policies
        Names out of ``planner.settings.POLICIES``.
    schedule
        Window and interval.
    settings
        The planner's other settings, equal for all policies.
    topology
        Flat where not given.
    on_decision
        Called with policy and decision after each one.

    Raises ``ReplayError`` where the trace is too short, ``SettingsError`` on an unknown policy.
    """
    decisions = schedule.decisions(heat_TLE.shape[0])
    each_settings = [replace(settings or PlannerSettings(), policy=policy) for policy in policies]
    results = []
    for policy_settings in each_settings:
        walk = _Walk(heat_TLE, placement, topology or Topology.flat(placement.ranks), policy_settings)
        made = []
        for step in decisions:
            decision = walk.decide(step, schedule)
            made.append(decision)
            if on_decision is not None:
                on_decision(policy_settings.policy, decision)
        results.append(PolicyReplay(policy_settings.policy, tuple(made)))
    return Replay(
        window=schedule.window,
        interval=schedule.interval,
        steps=heat_TLE.shape[0] - schedule.window,
        policies=tuple(results),
    )


class _Walk:
    """One policy on its way along the trace: what it serves now, and how it decides."""

    def __init__(
        self, heat_TLE: Heat, placement: Placement, topology: Topology, settings: PlannerSettings
    ) -> None:
        self._heat_TLE = heat_TLE
        self._placement = placement
        self._log2phy_RLE = placement.default_log2phy()
        self._topology = topology
        self._settings = settings

    def decide(self, step: int, schedule: Schedule) -> Decision:
        """Decide on the window that ends before ``step``, switch, and score the steps until the next one."""
        window = Window(self._heat_TLE[step - schedule.window : step])
        began = time.perf_counter()
        decided = plan(window, self._placement, self._log2phy_RLE, self._topology, self._settings)
        seconds = time.perf_counter() - began
        self._placement, self._log2phy_RLE = switched(self._placement, self._log2phy_RLE, decided)
        served_NLE = self._heat_TLE[step : step + schedule.interval]
        return Decision(
            step=step,
            steps=served_NLE.shape[0],
            layers_changed=len(decided.layers),
            moves=decided.moves,
            par_seen=decided.par_seen,
            par_planned=decided.par_planned,
            par_realised_L=par(rank_loads(served_NLE, self._placement, self._log2phy_RLE)),
            seconds=seconds,
        )


def switched(placement: Placement, log2phy_RLE: Int32, decided: Plan) -> tuple[Placement, Int32]:
    """Placement and tables ``[R, L, E]`` after all layers of a plan have switched."""
    phy2log_LRS, tables_RLE = placement.phy2log_LRS.copy(), log2phy_RLE.copy()
    for layer in decided.layers:
        phy2log_LRS[layer.layer] = layer.phy2log_RS
        tables_RLE[:, layer.layer] = layer.log2phy_RE
    return Placement(phy2log_LRS, placement.experts), tables_RLE
