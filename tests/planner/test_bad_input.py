"""The planner rejects invalid heat and topologies with a reason, and accepts heat without tokens."""

from __future__ import annotations

import numpy as np
import pytest

from eplb_core.heat.window import HeatError, Window
from eplb_core.placement import Placement
from eplb_core.planner.decide import plan_from_scratch
from eplb_core.planner.settings import PlannerSettings
from eplb_core.planner.topology import Topology, TopologyError
from tests.planner.drawn import decided


def nearly_constant_heat() -> np.ndarray:
    """Return five steps with nearly equal heat, ``[T, L, E]``."""
    generator = np.random.default_rng(1)
    return generator.gamma(0.5, 100, (3, 8)) * generator.uniform(0.98, 1.02, (5, 3, 8))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -1.0])
def test_negative_and_non_finite_heat_is_rejected(value: float) -> None:
    heat_TLE = nearly_constant_heat()
    source_RLE = np.ones((4, 3, 8))
    heat_TLE[3, 1, 2] = source_RLE[0, 2, 5] = value
    with pytest.raises(HeatError, match=rf"heat is {value} at step 3, layer 1, expert 2; it must be finite"):
        decided(heat_TLE, 3)
    with pytest.raises(HeatError, match="source heat has negative or non-finite values"):
        Window(nearly_constant_heat(), source_RLE)


def test_sums_beyond_the_precision_of_float64_are_rejected() -> None:
    largest = 2**53 // (5 * 8)
    assert decided(np.full((5, 3, 8), largest), 3).par_seen >= 1.0
    with pytest.raises(HeatError, match=r"more than 2\*\*53"):
        decided(np.full((5, 3, 8), largest + 1), 3)
    with pytest.raises(HeatError, match=r"more than 2\*\*53"):
        decided(np.full((5, 3, 8), 2**62), 3)


def test_inconsistent_topologies_are_rejected() -> None:
    with pytest.raises(TopologyError, match="nodes for 4 ranks but token groups for 3"):
        Topology(np.zeros(4), np.zeros(3))
    with pytest.raises(TopologyError, match="bytes_per_expert is -1"):
        Topology(np.zeros(4), np.zeros(4), bytes_per_expert=-1)


@pytest.mark.parametrize("policy", ["deepseek", "flashlb"])
@pytest.mark.parametrize("split", ["tables", "even", "deal", "step"])
def test_a_layer_without_tokens_does_not_change_and_causes_no_error(policy: str, split: str) -> None:
    placement = Placement.linear(2, 8, 4, 3)
    heat_TLE = np.zeros((5, 2, 8))
    heat_TLE[:, 1, 3] = 7
    decision = plan_from_scratch(
        Window(heat_TLE), placement, Topology.flat(4), PlannerSettings(policy=policy, split=split)
    )
    assert not any("failed" in verdict.reason for verdict in decision.verdicts)
    idle = decision.verdicts[0]
    assert np.isnan([idle.par_seen, idle.par_planned, idle.noise_floor]).all()
    assert idle.reason == "left alone: it received no tokens"
    assert decision.par_planned == decision.verdicts[1].par_planned
    # The one hot expert is split over all four ranks. With 7 tokens in a step, some rank receives at least two. With
    # float counts, only the stepwise split can divide a token.
    least = 1.0 if split == "step" else 8 / 7
    assert least - 1e-5 <= decision.verdicts[1].par_planned <= 4 / 7 * 3.5
