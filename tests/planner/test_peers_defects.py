"""What other balancers were found to do wrong is not done here."""

from __future__ import annotations

import numpy as np
import pytest

from eplb_core.heat.window import Window
from eplb_core.placement import Placement, check_layer
from eplb_core.planner.decide import plan_afresh
from eplb_core.planner.plan import Plan
from eplb_core.planner.request import with_options
from eplb_core.planner.score import expected_loads
from eplb_core.planner.settings import PlannerSettings
from eplb_core.planner.topology import Topology
from tests.planner.drawn import decided, still_heat
from tests.solver.layers_of import KNOWN_EXAMPLE


def afresh(heat_TLE: np.ndarray, ranks: int, slots: int, **settings: object) -> Plan:
    placement = Placement.linear(heat_TLE.shape[1], heat_TLE.shape[2], ranks, slots)
    switched, search = with_options(PlannerSettings(), settings)
    return plan_afresh(Window(heat_TLE), placement, Topology.flat(ranks), switched, search)


def assert_changes_are_legal(found: Plan, experts: int) -> None:
    assert not any("failed" in verdict.reason for verdict in found.verdicts)
    for changed in found.layers:
        check_layer(changed.phy2log_RS, experts)


@pytest.mark.parametrize(("experts", "ranks", "slots"), [(8, 4, 7), (5, 3, 5), (4, 9, 4), (256, 32, 24)])
def test_redundancy_above_the_ranks_is_placed(experts: int, ranks: int, slots: int) -> None:
    assert ranks * slots - experts > ranks
    heat_TLE = np.random.default_rng(experts).gamma(0.5, 100, (3, 1, experts))
    heat_TLE[:, :, 2] = 1e9
    for policy in ("deepseek", "flashlb"):
        found = afresh(heat_TLE, ranks, slots, policy=policy)
        assert_changes_are_legal(found, experts)
        assert found.par_planned <= found.par_seen + 1e-6


def test_a_window_that_grows_is_planned_on_at_every_length_as_it_is() -> None:
    heat_TLE = still_heat(80, 2, 16, 4000, seed=5, skew=0.6)
    mean_L = heat_TLE.sum(axis=2).mean(axis=0)
    for steps in (1, 2, 3, 5, 63, 64, 65, 80):
        found = decided(heat_TLE[:steps], 5)
        assert_changes_are_legal(found, 16)
        # Were the missing steps read as zeros, the layers would seem to have fewer tokens and a higher floor.
        score = 1.0294 / np.sqrt(mean_L * max(1, steps // 64) / 4)
        for layer, verdict in enumerate(found.verdicts):
            assert verdict.noise_floor <= 1 + score[layer] * 1.05
            assert verdict.par_planned < verdict.par_seen


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
def test_the_hottest_rank_of_the_known_example_has_what_it_is_known_for(
    settings: dict[str, object], least: float, most: float
) -> None:
    """The example that the field quotes, mean load 181.25; even shares reach the proven optimum."""
    found = afresh(KNOWN_EXAMPLE[None, None, :], 8, 2, **settings)
    after = Placement(found.layers[0].phy2log_RS[None], KNOWN_EXAMPLE.size)
    tables_RLE = found.layers[0].log2phy_RE[:, None]
    split = str(settings.get("split", "tables"))
    loads_1LR = expected_loads(KNOWN_EXAMPLE[None, None, :], after, tables_RLE, None, split)
    assert least <= loads_1LR.max() <= most
