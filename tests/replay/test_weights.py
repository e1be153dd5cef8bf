"""A layer's ratio is the mean over its steps with tokens, however they fall into decisions."""

from __future__ import annotations

import numpy as np
import pytest

from eplb_service.heat.synthetic import synthetic_heat
from eplb_service.io.trace import ArrayTrace
from eplb_service.placement import Placement, par
from eplb_service.planner.scoring import rank_loads
from eplb_service.planner.settings import PlannerSettings
from eplb_service.replay.policy import ON_CHANGE
from eplb_service.replay.policy_replay import Setup
from eplb_service.replay.runner import jobs_for, replay, scene_for
from eplb_service.replay.schedule import Schedule

LAYERS, EXPERTS, RANKS, SLOTS, WINDOW = 2, 16, 4, 4, 20


def bursts() -> np.ndarray:
    """A layer that has tokens in two steps of the second stretch alone, others than in the third."""
    heat_TLE = synthetic_heat("drift", 70, LAYERS, EXPERTS, tokens=64, top_k=2, seed=2)
    heat_TLE[22:40, 1] = 0
    return heat_TLE


@pytest.mark.parametrize("policy", ["none", ON_CHANGE])
def test_steps_without_tokens_count_nowhere(policy: str) -> None:
    heat_TLE = bursts()
    settings = PlannerSettings(threads=1, policy="none") if policy == "none" else PlannerSettings(threads=1)
    jobs = jobs_for([policy], [Setup(SLOTS, Schedule(WINDOW, WINDOW))], settings, hindsight=False)
    found = replay(ArrayTrace(heat_TLE), jobs, scene_for(RANKS))
    (row,) = found.policies
    busy_DL = np.stack([decision.busy_L for decision in row.decisions])
    np.testing.assert_array_equal(busy_DL, [[20, 2], [20, 20], [10, 10]])
    left_alone = Placement.linear(LAYERS, EXPERTS, RANKS, SLOTS)
    truth_L = par(rank_loads(heat_TLE[WINDOW:], left_alone, left_alone.default_log2phy()))
    assert found.score(row).par_left_alone == pytest.approx(truth_L.mean())
    if policy == "none":
        np.testing.assert_allclose(row.par_realised_L, truth_L)
