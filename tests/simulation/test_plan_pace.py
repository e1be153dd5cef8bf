"""Tests that a replay's cost model predicts the passes at which real agents switch a plan's layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eplb_core.placement import staging_rows
from eplb_core.wire.plan import RankPlan
from eplb_lab.history.check import read_histories
from eplb_service.replay import costs
from eplb_service.replay.costs import PICK_UP_PASSES, Costs
from tests.simulation.world import World
from worker_agent.settings import AgentSettings
from worker_agent.swap import vote
from worker_agent.swap.machine import SwitchState

RANKS = 4
LAYERS = 8
SLOTS = 3


def test_replay_costs_match_the_agents_defaults() -> None:
    settings = AgentSettings(service="127.0.0.1:1")
    assert (settings.vote_interval, vote._VOTE_LAG) == (costs.VOTE_INTERVAL, costs.VOTE_LAG)
    idle = vote._IDLE_INTERVALS * settings.vote_interval
    assert idle // 2 + vote._VOTE_LAG == PICK_UP_PASSES
    assert vote._BUSY_PASSES == costs.BUSY_PASSES
    assert settings.staging_mib << 20 == costs.STAGING_BYTES
    assert Costs().link_share == settings.link_share


@pytest.fixture
def accepted(monkeypatch: pytest.MonkeyPatch) -> dict[int, tuple[RankPlan, int]]:
    """Return the accepted plans by id, each with the last step at which a rank accepted it."""
    accepted_plans: dict[int, tuple[RankPlan, int]] = {}
    offer = SwitchState.offer

    def noting(state: SwitchState, plan: RankPlan, step: int, checked_for: int) -> Any:
        after, actions = offer(state, plan, step, checked_for)
        if after.plan is plan:
            accepted_plans[plan.plan_id] = plan, max(step, accepted_plans.get(plan.plan_id, (plan, 0))[1])
        return after, actions

    monkeypatch.setattr(SwitchState, "offer", noting)
    return accepted_plans


def moved(plan: RankPlan, column: int) -> list[np.ndarray]:
    """Return the number of experts that each rank sends (``column`` 0) or receives (``column`` 2), by layer."""
    return [np.bincount(layer.moves_M5[:, column], minlength=RANKS) for layer in plan.layers]


def test_layers_switch_at_the_passes_that_the_costs_predict(
    tmp_path: Path, accepted: dict[int, tuple[RankPlan, int]]
) -> None:
    world = World(2, ranks=RANKS, bound=0.0, many=0)
    world.faults = []
    world.shapes.layers = LAYERS
    world.shapes.ahead = 1
    # Each layer's weights arrive within one pass.
    world.shapes.pass_seconds = 1.0
    world.settings.update(vote_interval=4, bytes_per_step=None, history=tmp_path)
    assert world.run().breaches == ()
    for agent in world.engine.agents.values():
        agent._history.close(0)
    (histories,) = read_histories(tmp_path).values()
    commits = histories[0].of("commit")
    replay_costs = Costs(step_ms=1000, solve_ms=0, bytes_per_expert=16)
    compared = 0
    for plan, offered in accepted.values():
        step_of = {commit["layer"]: commit["step"] for commit in commits if commit["plan_id"] == plan.plan_id}
        if len(step_of) < len(plan.layers):
            # The run ended before the plan did.
            continue
        observed_L = np.array([step_of[layer.layer] for layer in plan.layers])
        rows = staging_rows(SLOTS, 16, costs.STAGING_BYTES)
        predicted_L = offered + replay_costs.arrival_steps(moved(plan, 2), moved(plan, 0), rows)
        (longer_than_mean,) = set((observed_L - predicted_L).tolist())
        assert -8 <= longer_than_mean < 8
        compared += 1
    assert compared >= 2
