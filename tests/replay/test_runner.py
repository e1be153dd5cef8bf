"""A replay decides on each window as the service would, and scores exactly the steps that follow, under what serves."""

import numpy as np
import pytest

from eplb_service.heat.synthetic import synthetic_heat
from eplb_service.heat.window import Window, checked_heat
from eplb_service.placement import Placement
from eplb_service.planner.decide import plan
from eplb_service.planner.scoring import par, rank_loads
from eplb_service.planner.settings import PlannerSettings, SettingsError
from eplb_service.planner.topology import Topology
from eplb_service.replay.runner import replay, switched
from eplb_service.replay.schedule import ReplayError, Schedule

HEAT_TLE = checked_heat(synthetic_heat("phased", 130, layers=3, experts=16, tokens=256, top_k=2, seed=5))
LINEAR = Placement.linear(layers=3, experts=16, ranks=4, slots=5)
SCHEDULE = Schedule(window=40, interval=30)


def test_none_is_the_start_placement_under_the_fixed_tables():
    [none] = replay(HEAT_TLE, LINEAR, ["none"], SCHEDULE).policies
    expected_L = par(rank_loads(HEAT_TLE[40:], LINEAR, LINEAR.default_log2phy()))
    assert none.par_realised_L == pytest.approx(expected_L)
    assert none.par_realised == pytest.approx(expected_L.mean())
    assert none.moves == 0


def test_each_decision_is_the_planner_on_its_window():
    result = replay(HEAT_TLE, LINEAR, ["flashlb"], SCHEDULE, settings=PlannerSettings(seed=2))
    placement, log2phy_RLE = LINEAR, LINEAR.default_log2phy()
    for decision, step in zip(result.policies[0].decisions, (40, 70, 100), strict=True):
        window = Window(HEAT_TLE[step - 40 : step])
        decided = plan(window, placement, log2phy_RLE, Topology.flat(4), PlannerSettings(seed=2))
        placement, log2phy_RLE = switched(placement, log2phy_RLE, decided)
        assert (decision.step, decision.steps) == (step, 30)
        assert (decision.moves, decision.layers_changed) == (decided.moves, len(decided.layers))
        assert (decision.par_seen, decision.par_planned) == (decided.par_seen, decided.par_planned)
        expected_L = par(rank_loads(HEAT_TLE[step : step + 30], placement, log2phy_RLE))
        assert decision.par_realised_L == pytest.approx(expected_L)


def test_policies_see_the_same_steps_and_do_not_touch_each_other():
    together = replay(HEAT_TLE, LINEAR, ["deepseek", "flashlb"], SCHEDULE)
    alone = replay(HEAT_TLE, LINEAR, ["flashlb"], SCHEDULE)
    assert together.policies[1].par_realised == alone.policies[0].par_realised
    assert together.policies[1].moves == alone.policies[0].moves
    assert together.steps == alone.steps == 90


def test_balancing_beats_not_balancing_on_steady_heat():
    heat_TLE = checked_heat(synthetic_heat("static", 130, layers=3, experts=16, tokens=256, top_k=2, seed=5))
    none, deepseek, flashlb = replay(heat_TLE, LINEAR, ["none", "deepseek", "flashlb"], SCHEDULE).policies
    assert flashlb.par_realised < none.par_realised
    assert deepseek.par_realised < none.par_realised


def test_tells_every_decision_as_it_is_made():
    told = []
    result = replay(
        HEAT_TLE, LINEAR, ["none", "flashlb"], SCHEDULE, on_decision=lambda *made: told.append(made)
    )
    assert told == [(policy.policy, decision) for policy in result.policies for decision in policy.decisions]


def test_a_last_interval_cut_short_counts_by_its_steps():
    [policy] = replay(HEAT_TLE[:75], LINEAR, ["none"], SCHEDULE).policies
    assert [decision.steps for decision in policy.decisions] == [30, 5]
    expected = np.average([decision.par_realised for decision in policy.decisions], weights=[30, 5])
    assert policy.par_realised == pytest.approx(expected)


@pytest.mark.parametrize(("steps", "first_steps"), [(41, [40]), (70, [40]), (71, [40, 70])])
def test_schedule(steps, first_steps):
    assert list(SCHEDULE.decisions(steps)) == first_steps


def test_refusals():
    with pytest.raises(ReplayError, match="has 40 steps, a window of 40 leaves none"):
        SCHEDULE.decisions(40)
    with pytest.raises(ReplayError, match="interval is 0"):
        Schedule(window=1, interval=0)
    with pytest.raises(SettingsError, match="greedy"):
        replay(HEAT_TLE, LINEAR, ["greedy"], SCHEDULE)
