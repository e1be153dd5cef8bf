"""The planner places experts from scratch if a layout was made without heat, and keeps a layout that fits the heat."""

from __future__ import annotations

import numpy as np
import pytest

from eplb_core.heat.window import Window
from eplb_core.placement import Placement, apply_layers
from eplb_core.planner.decide import plan, plan_from_scratch
from eplb_core.planner.request import SolveRequest
from eplb_core.planner.score import noise_floor
from eplb_core.planner.settings import PlannerSettings
from eplb_core.planner.topology import Topology
from eplb_core.planner.unfitted_layout import unfitted_layers
from eplb_core.solver.model import SearchOptions
from tests.planner.drawn import still_heat

LAYERS = 6
EXPERTS = 32
RANKS = 8
SLOTS = 5


WINDOW = Window(still_heat(48, LAYERS, EXPERTS, 8000, skew=0.8))
FLAT = Topology.flat(RANKS)


def shuffled(seed: int) -> Placement:
    """Return a placement that lists a random permutation of the experts in order."""
    generator = np.random.default_rng(seed)
    slots_P = np.arange(RANKS * SLOTS) % EXPERTS
    return Placement(
        np.stack([generator.permutation(EXPERTS)[slots_P].reshape(RANKS, SLOTS) for _ in range(LAYERS)]),
        EXPERTS,
    )


def unfitted(
    placement: Placement, log2phy_RLE: np.ndarray | None = None, window: Window = WINDOW
) -> np.ndarray:
    """Return a mask of the layers that the planner considers unfitted to the heat, bool ``[L]``."""
    tables_RLE = placement.default_log2phy() if log2phy_RLE is None else log2phy_RLE
    floor_L = noise_floor(window.heat_TLE.sum(axis=2), RANKS)
    request = SolveRequest(window, placement, tables_RLE, FLAT, PlannerSettings(), SearchOptions())
    return unfitted_layers(request, floor_L)


@pytest.mark.parametrize("seed", range(4))
def test_any_layout_made_without_heat_is_recognised_and_replaced(seed: int) -> None:
    start = shuffled(seed)
    assert unfitted(start).all()
    warm = plan(WINDOW, start, start.default_log2phy(), FLAT, PlannerSettings())
    from_scratch = plan_from_scratch(WINDOW, start, FLAT, PlannerSettings())
    assert warm.par_planned == pytest.approx(from_scratch.par_planned, abs=0.01)


def test_a_layout_fitted_to_the_heat_is_not_called_unfitted() -> None:
    start = shuffled(0)
    decision = plan_from_scratch(WINDOW, start, FLAT, PlannerSettings())
    assert not unfitted(*apply_layers(start, start.default_log2phy(), decision.changes())).any()


def test_one_layer_with_a_linear_placement_is_recognised_among_fitted_layers() -> None:
    start = Placement.linear(LAYERS, EXPERTS, RANKS, SLOTS)
    decision = plan_from_scratch(WINDOW, start, FLAT, PlannerSettings())
    changes = [change for change in decision.changes() if change[0] != 2]
    unfitted_L = unfitted(*apply_layers(start, start.default_log2phy(), changes))
    assert np.flatnonzero(unfitted_L).tolist() == [2]


def test_no_layer_is_called_unfitted_after_only_a_few_steps() -> None:
    assert not unfitted(shuffled(1), window=Window(WINDOW.heat_TLE[:8])).any()
