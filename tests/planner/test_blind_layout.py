"""A layout made for no heat is placed from scratch, however it came about; one made for the heat is not."""

from __future__ import annotations

import numpy as np
import pytest

from eplb_core.heat.window import Window
from eplb_core.placement import Placement, apply_layers
from eplb_core.planner.decide import plan, plan_afresh
from eplb_core.planner.request import SolveRequest
from eplb_core.planner.score import noise_floor
from eplb_core.planner.settings import PlannerSettings
from eplb_core.planner.topology import Topology
from eplb_core.planner.unfitted_layout import unfitted_layers
from eplb_core.solver.model import SearchOptions
from tests.planner.drawn import still_heat

LAYERS, EXPERTS, RANKS, SLOTS = 6, 32, 8, 5


WINDOW = Window(still_heat(48, LAYERS, EXPERTS, 8000, skew=0.8))
FLAT = Topology.flat(RANKS)


def shuffled(seed: int) -> Placement:
    """Replicas appended in order to experts whose names another model gave."""
    generator = np.random.default_rng(seed)
    slots_P = np.arange(RANKS * SLOTS) % EXPERTS
    return Placement(
        np.stack([generator.permutation(EXPERTS)[slots_P].reshape(RANKS, SLOTS) for _ in range(LAYERS)]),
        EXPERTS,
    )


def blind(placement: Placement, log2phy_RLE: np.ndarray | None = None, window: Window = WINDOW) -> np.ndarray:
    """Layers taken for a layout made for no heat, bool ``[L]``."""
    tables_RLE = placement.default_log2phy() if log2phy_RLE is None else log2phy_RLE
    floor_L = noise_floor(window.heat_TLE.sum(axis=2), RANKS)
    request = SolveRequest(window, placement, tables_RLE, FLAT, PlannerSettings(), SearchOptions())
    return unfitted_layers(request, floor_L)


@pytest.mark.parametrize("seed", range(4))
def test_any_layout_made_for_no_heat_is_recognised_and_left(seed: int) -> None:
    start = shuffled(seed)
    assert blind(start).all()
    made = plan(WINDOW, start, start.default_log2phy(), FLAT, PlannerSettings())
    from_scratch = plan_afresh(WINDOW, start, FLAT, PlannerSettings())
    assert made.par_planned == pytest.approx(from_scratch.par_planned, abs=0.01)


def test_a_layout_made_for_the_heat_is_kept_as_a_start() -> None:
    start = shuffled(0)
    made = plan_afresh(WINDOW, start, FLAT, PlannerSettings())
    assert not blind(*apply_layers(start, start.default_log2phy(), made.changes())).any()


def test_a_layer_still_in_order_is_recognised_among_placed_ones() -> None:
    start = Placement.linear(LAYERS, EXPERTS, RANKS, SLOTS)
    made = plan_afresh(WINDOW, start, FLAT, PlannerSettings())
    changes = [change for change in made.changes() if change[0] != 2]
    found_L = blind(*apply_layers(start, start.default_log2phy(), changes))
    assert np.flatnonzero(found_L).tolist() == [2]


def test_a_few_steps_say_nothing_of_a_deployment() -> None:
    assert not blind(shuffled(1), window=Window(WINDOW.heat_TLE[:8])).any()
