"""The example that the field quotes: eight experts on 8 ranks x 2 slots, mean load 181.25."""

from __future__ import annotations

import pytest

from eplb_service.heat.window import Window
from eplb_service.placement import Placement
from eplb_service.planner.decide import plan_afresh
from eplb_service.planner.settings import PlannerSettings
from eplb_service.planner.topology import Topology
from tests.solver.layers_of import KNOWN_EXAMPLE


@pytest.mark.parametrize(
    ("settings", "least", "most"),
    [
        ({"split": "even"}, 196.66, 196.68),
        ({}, 181.25, 200.01),
        ({"split": "deal", "deal_width": 1}, 181.25, 200.01),
        ({"split": "deal"}, 181.25, 196.0),
        ({"policy": "deepseek", "split": "even"}, 231.9, 232.1),
    ],
)
def test_the_hottest_rank_has_what_it_is_known_for(
    settings: dict[str, object], least: float, most: float
) -> None:
    """Even shares reach the proven optimum."""
    placement = Placement.linear(1, 8, 8, 2)
    window = Window(KNOWN_EXAMPLE[None, None, :])
    found = plan_afresh(window, placement, Topology.flat(8), PlannerSettings(**settings))
    assert least <= found.par_planned * KNOWN_EXAMPLE.sum() / 8 <= most
