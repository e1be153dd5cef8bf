"""The log stores each switch report once, checks reports against the clock, and estimates costs from them."""

from __future__ import annotations

import numpy as np
import pytest

from eplb_core.cost.moving import NOTHING_MEASURED
from eplb_core.heat.sources import ServedSteps
from eplb_core.planner.plan import LayerPlan
from eplb_core.planner.switch_log import SwitchLog
from eplb_core.wire.agent import PlanState, PlanStatus

RANKS = 4
STEP_US = 10_000.0


def layer_plan(layer: int, *receivers: int) -> LayerPlan:
    moves_M5 = np.array([[0, 0, rank, 0, 0] for rank in receivers], dtype=np.int32).reshape(-1, 5)
    return LayerPlan(layer, np.zeros((RANKS, 1), np.int32), np.zeros((RANKS, 1), np.int32), moves_M5)


class Ranks:
    """Ranks that commit one plan after another. Each layer takes 20 steps, five of them for the transfer."""

    def __init__(self) -> None:
        self.log = SwitchLog()
        self.now = 0.0
        self.step = 200
        self.plan_id = 0
        self.us: dict[int, float] = {}

    def steps(self, count: int, us: float = STEP_US) -> None:
        for _ in range(count):
            self.us[self.step] = us
            self.step += 1
            self.now += us / 1e6

    def say(self, state: PlanState, layer: int = 0, ranks: range = range(RANKS), **facts: float) -> None:
        for rank in ranks:
            status = PlanStatus(self.plan_id, state, layer, step=self.step, **facts)
            self.log.heard(rank, status, self.now)

    def offer(self, *layers: LayerPlan) -> None:
        self.plan_id += 1
        self.log.offered(self.plan_id, layers, RANKS, self.now)

    def switch(self, layers: list[LayerPlan], lost: float = 0.0) -> None:
        """Commit a plan with transfers of 50 ms, and with steps of 10 ms that take longer by the fraction ``lost``."""
        self.offer(*layers)
        self.steps(4)
        self.say(PlanState.ACCEPTED, layers[0].layer)
        for layer in layers:
            self.steps(8)
            self.steps(5, STEP_US / (1 - lost))
            self.say(PlanState.TRANSFERRED, layer.layer, transfer_seconds=5 * STEP_US / (1 - lost) / 1e6)
            self.steps(3)
            self.say(PlanState.COMMITTED, layer.layer, commit_seconds=0.002)
            self.steps(4)
        self.steps(100)
        self.look()

    def look(self) -> None:
        newest = sorted(self.us)[-256:]
        us_T = np.array([self.us[step] for step in newest], dtype=np.float64)
        self.log.looked_at(ServedSteps(np.array(newest, dtype=np.float64), us_T, *np.ones((2, us_T.size))))


@pytest.fixture
def ranks() -> Ranks:
    return Ranks()


def test_enough_plans_yield_all_three_costs(ranks: Ranks) -> None:
    for _ in range(3):
        ranks.switch([layer_plan(0, 1, 1, 2), layer_plan(1, 3)], lost=0.2)
    some = ranks.log.costs()
    assert some.lost_share is None
    assert some.commit_seconds == pytest.approx(0.002)
    ranks.switch([layer_plan(2, 1, 1)], lost=0.2)
    costs = ranks.log.costs()
    # All layers have equal weight, regardless of which rank receives experts.
    assert costs.expert_seconds == pytest.approx(0.0625, rel=0.3)
    assert costs.lost_share == pytest.approx(0.2, abs=0.01)


def test_a_rank_that_received_no_experts_yields_no_transfer_cost(ranks: Ranks) -> None:
    for _ in range(4):
        ranks.switch([layer_plan(0)])
    costs = ranks.log.costs()
    assert (costs.expert_seconds, costs.commit_seconds) == (None, pytest.approx(0.002))


@pytest.mark.parametrize(("seconds", "believed"), [(1.09, True), (1.2, False), (-0.1, False), (1e6, False)])
def test_a_report_longer_than_its_plan_is_ignored(ranks: Ranks, seconds: float, believed: bool) -> None:
    for _ in range(4):
        ranks.offer(layer_plan(0, 1))
        ranks.say(PlanState.ACCEPTED)
        ranks.steps(10)
        ranks.say(PlanState.TRANSFERRED, transfer_seconds=seconds)
        ranks.look()
    assert (ranks.log.costs().expert_seconds is not None) is believed


def test_one_exaggerating_rank_does_not_shift_the_estimate(ranks: Ranks) -> None:
    for _ in range(4):
        ranks.offer(layer_plan(0, 0, 1, 2, 3))
        ranks.say(PlanState.ACCEPTED)
        ranks.steps(10)
        ranks.say(PlanState.TRANSFERRED, ranks=range(1), transfer_seconds=1.0)
        ranks.say(PlanState.TRANSFERRED, transfer_seconds=0.05)
        ranks.say(PlanState.COMMITTED, ranks=range(1), commit_seconds=1.0)
        ranks.say(PlanState.COMMITTED, commit_seconds=0.002)
        ranks.look()
    costs = ranks.log.costs()
    assert costs.expert_seconds == pytest.approx(0.05)
    assert costs.commit_seconds == pytest.approx(0.002)


def test_reports_of_unknown_plans_or_clients_are_ignored(ranks: Ranks) -> None:
    for _ in range(4):
        ranks.offer(layer_plan(0, 1))
        ranks.log.heard(0, PlanStatus(99, PlanState.TRANSFERRED, transfer_seconds=1.0), 0.0)
        for rank, layer in ((1 << 20, 0), (1, 77)):
            ranks.log.heard(rank, PlanStatus(ranks.plan_id, PlanState.ACCEPTED, layer, step=1), 0.1)
            status = PlanStatus(ranks.plan_id, PlanState.TRANSFERRED, layer, transfer_seconds=0.1, step=9)
            ranks.log.heard(rank, status, 0.1)
        ranks.look()
    assert ranks.log.costs() == NOTHING_MEASURED


def test_an_aborted_plan_counts_up_to_its_last_commit(ranks: Ranks) -> None:
    ranks.offer(*(layer_plan(layer, 1) for layer in range(5)))
    ranks.say(PlanState.ACCEPTED)
    for layer in range(4):
        ranks.steps(10)
        ranks.say(PlanState.TRANSFERRED, layer, transfer_seconds=0.05)
        if layer < 3:
            ranks.say(PlanState.COMMITTED, layer, commit_seconds=0.001)
    ranks.say(PlanState.ABORTED, 4)
    ranks.look()
    costs = ranks.log.costs()
    assert (costs.expert_seconds, costs.commit_seconds) == (pytest.approx(0.05), None)


def test_layers_transferred_together_slow_the_same_steps(ranks: Ranks) -> None:
    for _ in range(4):
        ranks.offer(layer_plan(0, 1), layer_plan(1, 2), layer_plan(2, 3))
        ranks.steps(4)
        ranks.say(PlanState.ACCEPTED)
        ranks.steps(8)
        ranks.steps(10, STEP_US / 0.8)
        for layer in (0, 1):
            ranks.say(PlanState.TRANSFERRED, layer, transfer_seconds=5 * STEP_US / 0.8 / 1e6)
        ranks.steps(3)
        for layer in (0, 1):
            ranks.say(PlanState.COMMITTED, layer, commit_seconds=0.002)
        ranks.steps(9)
        ranks.say(PlanState.TRANSFERRED, 2, transfer_seconds=5 * STEP_US / 0.8 / 1e6)
        ranks.say(PlanState.COMMITTED, 2, commit_seconds=0.002)
        ranks.steps(100)
        ranks.look()
    costs = ranks.log.costs()
    # Together, the first two layers slow down ten steps. The third layer's five steps are not slowed down.
    assert costs.lost_share == pytest.approx(0.143, abs=0.02)
    assert costs.expert_seconds == pytest.approx(0.0625)
    assert costs.commit_seconds == pytest.approx(0.002)


def test_the_log_is_bounded_and_keeps_the_newest_reports(ranks: Ranks) -> None:
    for lost in [0.4] * 8 + [0.1] * 16:
        ranks.switch([layer_plan(0, 1)], lost=lost)
    assert ranks.log.costs().lost_share == pytest.approx(0.1, abs=0.01)
