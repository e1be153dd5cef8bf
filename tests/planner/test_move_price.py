"""The move price is a move's cost relative to its possible gain, and the source of every term is given."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from eplb_core.cost.moving import MovingCosts
from eplb_core.heat.window import Window
from eplb_core.placement import Placement
from eplb_core.planner.decide import plan
from eplb_core.planner.price import MAX_PRICE, move_price
from eplb_core.planner.settings import PlannerSettings
from eplb_core.planner.topology import Topology

MODEL = PlannerSettings(link_bandwidth=25.0, layer_ms=0.4)
SIZE = 42 << 20
MEASURED = MovingCosts(0.1, 0.05, 0.003)


def test_the_price_is_the_time_lost_over_the_largest_gain() -> None:
    price = move_price(MODEL, 9, SIZE, 128)
    assert price.ms_per_move == pytest.approx(SIZE / 25e9 * 1e3 * 0.2)
    assert price.ms_per_switch == pytest.approx(9 * SIZE / 1e12 * 1e3 + 0.5)
    assert price.ms_per_megabyte == pytest.approx(0.2 / 25)
    assert price.price == pytest.approx((9 * price.ms_per_move + price.ms_per_switch) / (0.4 * 128))
    assert move_price(MODEL, 9, SIZE, 1280).price == pytest.approx(price.price / 10)
    assert "(42.0 MiB at 25 GB/s), of which 20.0% delays steps (assumed)" in price.reason
    assert "0.4 ms per layer per step (layer_ms), 128 steps served" in price.reason


@pytest.mark.parametrize(
    ("settings", "kind"),
    [({}, "assumed"), ({"link_bandwidth": 200.0}, "stated"), ({"move_price": 0.3}, "stated")],
)
def test_unmeasured_costs_are_assumed_or_stated(settings: dict[str, float], kind: str) -> None:
    price = move_price(PlannerSettings(**settings), 9)
    assert price.kind == kind
    assert price.ms_per_megabyte is None
    assert (
        ("16.0 MiB at" in price.reason) == (price.ms_per_move is not None) == ("move_price" not in settings)
    )


def test_a_decision_reports_its_move_price() -> None:
    heat_TLE = np.random.default_rng(0).multinomial(500, np.full(8, 1 / 8), size=(12, 1))
    placement = Placement.linear(1, 8, 4, 3)
    topology = Topology(np.zeros(4), np.arange(4), bytes_per_expert=1 << 20)
    decision = plan(Window(heat_TLE), placement, placement.default_log2phy(), topology, PlannerSettings())
    assert decision.price == move_price(PlannerSettings(), 3, 1 << 20, 12.0)


def test_measured_costs_set_the_price_unless_one_is_stated() -> None:
    price = move_price(MODEL, 9, SIZE, 128, MEASURED)
    assert price.price == pytest.approx((9 * 100 * 0.05 + 3) / (0.4 * 128))
    assert price.kind == "measured"
    assert (
        "100 ms per expert (measured), of which 5.0% delays steps (measured), 3 ms per switch (measured)"
        in price.reason
    )
    assert move_price(PlannerSettings(move_price=0.3), 9, SIZE, 128, MEASURED).price == 0.3


def test_each_cost_is_measured_independently() -> None:
    price = move_price(MODEL, 9, SIZE, 128, MovingCosts(expert_seconds=0.1))
    assert price.kind == "partly measured"
    assert price.price == pytest.approx((9 * 100 * 0.2 + 9 * SIZE / 1e12 * 1e3 + 0.5) / (0.4 * 128))


def test_a_measured_layer_time_replaces_the_setting() -> None:
    timed = replace(MEASURED, layer_ms=0.8, layer_source="fitted")
    price = move_price(MODEL, 9, SIZE, 128, timed)
    assert price.price == pytest.approx(move_price(MODEL, 9, SIZE, 128, MEASURED).price / 2)
    assert "0.8 ms per layer per step (fitted)" in price.reason


def test_extreme_costs_are_bounded() -> None:
    assert move_price(MODEL, 512, 0, 1, MovingCosts(60.0, 0.9, 10.0)).price == MAX_PRICE
