"""A move is priced by what it costs against what it can win, and every assumption is named."""

from __future__ import annotations

import numpy as np
import pytest

from eplb_service.heat.window import Window
from eplb_service.placement import Placement
from eplb_service.planner.decide import plan
from eplb_service.planner.move_price import move_price
from eplb_service.planner.settings import PlannerSettings
from eplb_service.planner.topology import Topology

MODEL = PlannerSettings(link_bandwidth=25.0, layer_ms=0.4)


def test_a_price_that_is_stated_is_the_price() -> None:
    assert move_price(PlannerSettings(move_price=0.3), 9, 42 << 20, 10).value == 0.3


def test_the_price_is_time_lost_over_time_that_can_be_won() -> None:
    size = 42 << 20
    found = move_price(MODEL, 9, size, 128)
    lost_ms = 9 * (size / 25e9 * 1e3 * 0.2 + size / 1e12 * 1e3) + 0.5
    assert found.value == pytest.approx(lost_ms / (0.4 * 128))
    assert "42.0 MiB per expert, 25 GB/s per rank" in found.reason
    assert "128 steps served" in found.reason


def test_moves_are_cheaper_on_fast_links_and_where_plans_serve_for_long() -> None:
    slow, fast = (move_price(PlannerSettings(link_bandwidth=rate), 5, 13 << 20, 64) for rate in (10.0, 200.0))
    assert fast.value < slow.value
    assert move_price(MODEL, 5, 13 << 20, 640).value == pytest.approx(
        move_price(MODEL, 5, 13 << 20, 64).value / 10
    )


def test_what_is_assumed_is_said() -> None:
    reason = move_price(MODEL, 9).reason
    assert "16.0 MiB per expert (assumed)" in reason
    assert "256 steps served (assumed)" in reason


def test_a_decision_says_what_its_moves_were_priced_at() -> None:
    heat_TLE = np.random.default_rng(0).multinomial(500, np.full(8, 1 / 8), size=(12, 1))
    placement = Placement.linear(1, 8, 4, 3)
    topology = Topology(np.zeros(4), np.arange(4), bytes_per_expert=1 << 20)
    made = plan(Window(heat_TLE), placement, placement.default_log2phy(), topology, PlannerSettings())
    assert made.price == move_price(PlannerSettings(), 3, 1 << 20, 12.0)
