"""A window of stationary heat, and the initial layout, which is linear."""

from __future__ import annotations

from eplb_core.heat.window import Window
from eplb_core.placement import Placement
from eplb_core.planner.plan import Layout
from eplb_core.planner.settings import PlannerSettings
from eplb_core.planner.topology import Topology
from eplb_service.io.synthetic import synthetic_heat

RANKS = 4
SLOTS = 5
EXPERTS = 16
LAYERS = 2
STEPS = 48
SETTINGS = PlannerSettings(threads=1)
HEAT = synthetic_heat("static", STEPS, LAYERS, EXPERTS, tokens=512, top_k=4, seed=3)
WINDOW = Window(HEAT)
FIRST = Placement.linear(LAYERS, EXPERTS, RANKS, SLOTS)
FOUND = Layout(FIRST, FIRST.default_log2phy())
TOPOLOGY = Topology.flat(RANKS)
