"""A layout made for no heat is placed from scratch, however it came about; one made for the heat is not."""

from __future__ import annotations

import numpy as np
import pytest

from eplb_service.heat.window import Window
from eplb_service.placement import Placement, apply_layers, par
from eplb_service.planner.decide import plan, plan_afresh
from eplb_service.planner.request import _blind_layers
from eplb_service.planner.score import noise_floor, rank_loads
from eplb_service.planner.settings import PlannerSettings
from eplb_service.planner.topology import Topology

LAYERS, EXPERTS, RANKS, SLOTS = 6, 32, 8, 5


def heat(steps: int, seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    popularity_LE = generator.dirichlet(np.full(EXPERTS, 0.8), LAYERS)
    return np.stack([generator.multinomial(8000, row_E, size=steps) for row_E in popularity_LE], axis=1)


WINDOW = Window(heat(48))
FLOOR_L = noise_floor(WINDOW.heat_TLE.sum(axis=2), RANKS)


def shuffled(seed: int) -> Placement:
    """Replicas appended in order to experts whose names another model gave."""
    generator = np.random.default_rng(seed)
    slots_P = np.arange(RANKS * SLOTS) % EXPERTS
    return Placement(
        np.stack([generator.permutation(EXPERTS)[slots_P].reshape(RANKS, SLOTS) for _ in range(LAYERS)]),
        EXPERTS,
    )


def par_of(placement: Placement, window: Window = WINDOW, log2phy_RLE=None) -> np.ndarray:
    tables = placement.default_log2phy() if log2phy_RLE is None else log2phy_RLE
    return par(rank_loads(window.heat_TLE, placement, tables))


@pytest.mark.parametrize("seed", range(4))
def test_any_layout_made_for_no_heat_is_recognised_and_left(seed: int) -> None:
    start = shuffled(seed)
    assert _blind_layers(
        WINDOW, start, par_of(start), noise_floor(WINDOW.heat_TLE.sum(axis=2), RANKS), "tables"
    ).all()
    topology, settings = Topology.flat(RANKS), PlannerSettings()
    made = plan(WINDOW, start, start.default_log2phy(), topology, settings)
    from_scratch = plan_afresh(WINDOW, start, topology, settings)
    assert made.par_planned == pytest.approx(from_scratch.par_planned, abs=0.01)


def test_a_layout_made_for_the_heat_is_kept_as_a_start() -> None:
    start = shuffled(0)
    made = plan_afresh(WINDOW, start, Topology.flat(RANKS), PlannerSettings())
    placed, tables_RLE = apply_layers(start, start.default_log2phy(), made.changes())
    assert not _blind_layers(
        WINDOW,
        placed,
        par_of(placed, WINDOW, tables_RLE),
        noise_floor(WINDOW.heat_TLE.sum(axis=2), RANKS),
        "tables",
    ).any()


def test_a_layer_still_in_order_is_recognised_among_placed_ones() -> None:
    start = Placement.linear(LAYERS, EXPERTS, RANKS, SLOTS)
    made = plan_afresh(WINDOW, start, Topology.flat(RANKS), PlannerSettings())
    changes = [change for change in made.changes() if change[0] != 2]
    placed, tables_RLE = apply_layers(start, start.default_log2phy(), changes)
    found_L = _blind_layers(
        WINDOW,
        placed,
        par_of(placed, WINDOW, tables_RLE),
        noise_floor(WINDOW.heat_TLE.sum(axis=2), RANKS),
        "tables",
    )
    assert np.flatnonzero(found_L).tolist() == [2]


def test_a_few_steps_say_nothing_of_a_deployment() -> None:
    few = Window(heat(8))
    start = shuffled(1)
    assert not _blind_layers(
        few, start, par_of(start, few), noise_floor(few.heat_TLE.sum(axis=2), RANKS), "tables"
    ).any()


def test_where_nothing_can_be_won_no_layout_is_blind() -> None:
    even = Window(np.full((48, LAYERS, EXPERTS), 250))
    start = Placement.linear(LAYERS, EXPERTS, RANKS, EXPERTS // RANKS)
    assert not _blind_layers(even, start, par_of(start, even) + 0.01, np.ones(LAYERS), "tables").any()
