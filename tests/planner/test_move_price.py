"""A move is priced by what it costs against what it can win, and every assumption is named."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from eplb_service.cost.moving import MovingCosts
from eplb_service.heat.window import Window
from eplb_service.placement import Placement
from eplb_service.planner.decide import plan
from eplb_service.planner.price import MOST, move_price
from eplb_service.planner.settings import PlannerSettings
from eplb_service.planner.topology import Topology

MODEL = PlannerSettings(link_bandwidth=25.0, layer_ms=0.4)


def test_the_price_is_time_lost_over_time_that_can_be_won() -> None:
    size = 42 << 20
    found = move_price(MODEL, 9, size, 128)
    assert found.ms_per_move == pytest.approx(size / 25e9 * 1e3 * 0.2)
    assert found.ms_per_switch == pytest.approx(9 * size / 1e12 * 1e3 + 0.5)
    assert found.ms_per_megabyte == pytest.approx(0.2 / 25)
    assert found.price == pytest.approx((9 * found.ms_per_move + found.ms_per_switch) / (0.4 * 128))
    assert "42.0 MiB per expert, 25 GB/s per rank" in found.reason
    assert "128 steps served" in found.reason
    assert move_price(MODEL, 9).ms_per_megabyte is None
    stated = move_price(PlannerSettings(move_price=0.3), 9, size)
    assert (stated.ms_per_move, stated.ms_per_switch, stated.ms_per_megabyte) == (None, None, None)


def test_moves_are_cheaper_on_fast_links_and_where_plans_serve_for_long() -> None:
    slow, fast = (move_price(PlannerSettings(link_bandwidth=rate), 5, 13 << 20, 64) for rate in (10.0, 200.0))
    assert fast.price < slow.price
    assert move_price(MODEL, 5, 13 << 20, 640).price == pytest.approx(
        move_price(MODEL, 5, 13 << 20, 64).price / 10
    )


@pytest.mark.parametrize(("settings", "kind"), [({}, "assumed"), ({"link_bandwidth": 200.0}, "stated")])
def test_what_is_assumed_is_said(settings: dict[str, float], kind: str) -> None:
    found = move_price(PlannerSettings(**settings), 9)
    assert found.kind == kind
    assert "16.0 MiB per expert (assumed)" in found.reason
    assert "256 steps served (assumed)" in found.reason


def test_a_decision_says_what_its_moves_were_priced_at() -> None:
    heat_TLE = np.random.default_rng(0).multinomial(500, np.full(8, 1 / 8), size=(12, 1))
    placement = Placement.linear(1, 8, 4, 3)
    topology = Topology(np.zeros(4), np.arange(4), bytes_per_expert=1 << 20)
    made = plan(Window(heat_TLE), placement, placement.default_log2phy(), topology, PlannerSettings())
    assert made.price == move_price(PlannerSettings(), 3, 1 << 20, 12.0)


MEASURED = MovingCosts(0.1, 12, 0.05, 0.02, 0.08, 6, 0.003, 12)


def test_what_ranks_have_measured_is_the_price() -> None:
    found = move_price(MODEL, 9, 42 << 20, 128, MEASURED)
    assert found.price == pytest.approx((9 * 100 * 0.05 + 3) / (0.4 * 128))
    assert found.kind == "measured"
    assert "42.0 MiB per expert, 0.44 GB/s per rank (measured, 12 layers)" in found.reason
    assert (
        "steps lose 5.0% of it while weights travel (measured, 95 %: 2.0% to 8.0%, 6 plans)" in found.reason
    )
    assert "3 ms per switch (measured, 12 layers)" in found.reason
    assert "assumed: layer_ms" in found.reason


def test_each_part_is_measured_by_itself() -> None:
    only_travel = MovingCosts(expert_seconds=0.1, transfers=4)
    found = move_price(MODEL, 9, 42 << 20, 128, only_travel)
    assert found.kind == "partly measured"
    assert found.price == pytest.approx((9 * 100 * 0.2 + 9 * (42 << 20) / 1e12 * 1e3 + 0.5) / (0.4 * 128))
    assert "while weights travel (assumed)" in found.reason


def test_a_price_that_is_stated_overrides_what_is_measured() -> None:
    assert move_price(PlannerSettings(move_price=0.3), 9, 42 << 20, 128, MEASURED).price == 0.3


def test_a_layers_measured_time_takes_the_place_of_the_setting() -> None:
    timed = replace(MEASURED, layer_ms=0.8, layer_source="fitted: by the cost curve")
    found = move_price(MODEL, 9, 42 << 20, 128, timed)
    assert found.price == pytest.approx(move_price(MODEL, 9, 42 << 20, 128, MEASURED).price / 2)
    assert "0.8 ms per layer and step (fitted: by the cost curve)" in found.reason


def test_absurd_costs_are_bounded_and_said() -> None:
    wild = MovingCosts(60.0, 12, 0.9, 0.85, 0.95, 6, 10.0, 12, bounded=True)
    found = move_price(MODEL, 512, 0, 1, wild)
    assert found.price == MOST
    assert "bounded" in found.reason
    assert "6e+04 ms per expert (measured, 12 layers)" in found.reason
