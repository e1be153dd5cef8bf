"""The example that the field quotes: eight experts on 8 ranks x 2 slots, mean load 181.25."""

from __future__ import annotations

import numpy as np
import pytest

from eplb_service.heat.window import Window
from eplb_service.placement import Placement
from eplb_service.planner.decide import plan_afresh
from eplb_service.planner.search_params import search_params_of
from eplb_service.planner.settings import PlannerSettings
from eplb_service.planner.topology import Topology
from eplb_service.solver.engine import solve_many
from tests.solver.layers_of import KNOWN_EXAMPLE

MEAN = KNOWN_EXAMPLE.sum() / 8
PLACEMENT = Placement.linear(1, 8, 8, 2)


def hottest(**settings: object) -> float:
    """Tokens of the hottest rank once the example is placed from scratch."""
    window = Window(KNOWN_EXAMPLE[None, None, :])
    found = plan_afresh(window, PLACEMENT, Topology.flat(8), PlannerSettings(**settings))
    return found.par_planned * MEAN


def test_even_shares_reach_the_proven_optimum() -> None:
    assert hottest(split="even") == pytest.approx(196.667, abs=0.01)


def test_tables_of_eight_sources_reach_200() -> None:
    assert hottest() <= 200.01


def test_greedy_packing_reaches_what_it_is_known_for() -> None:
    assert hottest(policy="deepseek", split="even") == pytest.approx(232, abs=0.1)


def test_tables_of_sixteen_sources_reach_185() -> None:
    settings = PlannerSettings(move_price=0.0)
    (answer,) = solve_many(
        KNOWN_EXAMPLE[None, None, :],
        PLACEMENT.phy2log_LRS,
        np.repeat(PLACEMENT.default_log2phy(), 2, axis=0).transpose(1, 0, 2),
        np.full((1, 16, 8), 1 / 16),
        search_params_of(settings, PLACEMENT),
        np.array([np.inf]),
        0.0,
        np.ones(1, dtype=bool),
        threads=1,
    )
    assert answer.found.par * MEAN == pytest.approx(185, abs=0.01)
