"""This project's planner as one of the policies: placing from scratch, or deciding from what serves."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from eplb_service.bench.decision import Decision, Scene
from eplb_service.heat.window import Window
from eplb_service.placement import Placement, apply_layers
from eplb_service.planner.decide import plan, plan_afresh
from eplb_service.planner.settings import PlannerSettings
from eplb_service.planner.topology import Topology


@dataclass(frozen=True)
class Ours:
    """The planner in default settings but for ``options``, on one thread unless they say otherwise.

    Parameters
    ----------
    afresh
        Place every layer from scratch, whatever serves; otherwise decide as the service does.
    options
        Fields of ``PlannerSettings``.
    """

    afresh: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def decide(self, scene: Scene) -> Decision:
        """Decide on one window; checking the heat is part of what is timed."""
        settings = PlannerSettings(**{"threads": 1, **self.options})
        placement = Placement(scene.placement_LRS, scene.heat_TLE.shape[2])
        topology = Topology.flat(placement.ranks)
        cpu, wall = time.process_time(), time.perf_counter()
        window = Window(scene.heat_TLE, scene.source_RLE)
        if self.afresh:
            made = plan_afresh(window, placement, topology, settings)
        else:
            made = plan(window, placement, scene.tables_RLE, topology, settings)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        after, tables_RLE = apply_layers(placement, scene.tables_RLE, made.changes())
        promised_L = np.array([verdict.par_planned for verdict in made.verdicts])
        return Decision(after.phy2log_LRS, tables_RLE, promised_L, len(made.layers), cpu, wall)
