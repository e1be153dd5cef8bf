"""What policies are measured against: nothing done, token sampling alone, and the best that hindsight finds."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from eplb_service.heat.window import Window
from eplb_service.io.trace import Trace
from eplb_service.placement import Float64, Placement, apply_layers, mean_par, par
from eplb_service.planner.dealing import first_tables
from eplb_service.planner.decide import plan_afresh
from eplb_service.planner.noise_floor import noise_floor
from eplb_service.planner.settings import PlannerSettings
from eplb_service.planner.topology import Topology
from eplb_service.replay.costs import Costs
from eplb_service.replay.schedule import Schedule
from eplb_service.replay.served import served_loads, served_us
from eplb_service.replay.sliding_heat import SlidingHeat


class BaselineRow(NamedTuple):
    """What was measured for one decision, float64 ``[L]`` each; ``None`` where not asked for."""

    left_alone_L: Float64
    floor_L: Float64
    hindsight_L: Float64 | None
    left_alone_us_L: Float64 | None = None


class Baseline:
    """Measures the same stretches of a trace that policies serve.

    ``heat`` is the trace's, which others may read along with this. ``settings`` are those of flashlb, which hindsight
    places with; ``None`` to leave hindsight out. ``split`` is how the host splits tokens over replicas, ``deal_width``
    how many entries its tables have where it deals, and ``costs`` what tokens and a stepwise split cost.
    """

    def __init__(
        self,
        trace: Trace,
        heat: SlidingHeat,
        placement: Placement,
        topology: Topology,
        schedule: Schedule,
        settings: PlannerSettings | None,
        split: str,
        deal_width: int,
        costs: Costs,
    ) -> None:
        self.loads_LR: Float64 = np.zeros((placement.layers, placement.ranks))
        self._trace = trace
        self._heat = heat
        self._placement = placement
        self._tables_RLE = first_tables(placement, split, deal_width)
        self._topology = topology
        self._schedule = schedule
        self._settings = settings
        self._split = split
        self._costs = costs

    def measure(self, step: int) -> BaselineRow:
        """The steps from ``step`` to the next decision."""
        end = min(step + self._schedule.interval, self._trace.steps)
        same_ranks = self._trace.facts.ranks == self._topology.ranks
        window = Window(self._heat.heat(step, end), self._trace.source(step, end) if same_ranks else None)
        loads_TLR = served_loads(
            self._trace, window.heat_TLE, step, self._placement, self._tables_RLE, self._split
        )
        self.loads_LR = loads_TLR.sum(axis=0)
        floor_L = noise_floor(window.heat_TLE.sum(axis=2), self._placement.ranks)
        us_L = None
        if self._costs.curve is not None:
            us_TL = served_us(
                self._trace,
                window.heat_TLE,
                step,
                self._placement,
                self._tables_RLE,
                self._split,
                self._costs.curve,
                self._costs.split_overhead_us,
            )
            us_L = mean_par(us_TL, axis=0)
        return BaselineRow(par(loads_TLR), floor_L, self._hindsight(window, step), us_L)

    def _hindsight(self, window: Window, step: int) -> Float64 | None:
        if self._settings is None:
            return None
        fitted = plan_afresh(window, self._placement, self._topology, self._settings)
        placement, tables_RLE = apply_layers(self._placement, self._tables_RLE, fitted.changes())
        return par(served_loads(self._trace, window.heat_TLE, step, placement, tables_RLE, self._split))
