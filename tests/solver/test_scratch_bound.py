"""The planner rarely searches from scratch after the first decision, which keeps decisions within their CPU budget."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest

from benchmarks.solver.heats import generate
from eplb_core.heat.window import Window
from eplb_core.placement import Placement
from eplb_core.planner.decide import plan
from eplb_core.planner.plan import Layout
from eplb_core.planner.settings import PlannerSettings
from eplb_core.planner.topology import Topology
from eplb_core.solver import layer as layer_module


@pytest.mark.parametrize("kind", ["drift", "bursty"])
def test_at_most_one_layer_in_ten_is_searched_from_scratch_after_the_first_decision(kind: str) -> None:
    layers = 4
    look_back = 128
    interval = 24
    decisions = 6
    heat_TLE = generate(kind, layers, 256, look_back + decisions * interval, 1)
    placement = Placement.linear(layers, 256, 32, 9)
    serving = Layout(placement, placement.default_log2phy())
    with mock.patch.object(layer_module, "from_scratch", wraps=layer_module.from_scratch) as searched:
        for begin in range(0, (decisions + 1) * interval, interval):
            window = Window(np.ascontiguousarray(heat_TLE[begin : begin + look_back]))
            deployed = serving.placement, serving.log2phy_RLE
            decision = plan(window, *deployed, Topology.flat(32), PlannerSettings(threads=1), float(interval))
            serving = serving.changed_by(decision)
    assert layers <= searched.call_count <= layers + layers * decisions // 10
