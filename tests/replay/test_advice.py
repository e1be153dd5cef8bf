"""Advice follows from what was replayed: balance where it wins, and plainly not where it cannot."""

import numpy as np
import pytest

from eplb_service.cost.curve import CostCurve
from eplb_service.heat.synthetic import synthetic_heat
from eplb_service.io.trace import ArrayTrace
from eplb_service.planner.settings import PlannerSettings
from eplb_service.planner.split_cost import SplitCost
from eplb_service.replay.advice import MOVE_PRICES, advise, first_jobs, second_jobs
from eplb_service.replay.costs import Costs
from eplb_service.replay.runner import replay, scene_for
from eplb_service.replay.schedule import ReplayError, Schedule

SETTINGS = PlannerSettings()


def advised(heat_TLE, ranks, slots, costs=None):
    trace, scene = ArrayTrace(heat_TLE), scene_for(ranks, costs)
    first = replay(trace, first_jobs(slots, Schedule(40, 40), SETTINGS), scene)
    second = replay(trace, second_jobs(first, trace.steps, SETTINGS), scene)
    return advise(first, second, SETTINGS, float(heat_TLE.sum(axis=2).mean())), first, second


@pytest.fixture(scope="module")
def skewed():
    heat_TLE = synthetic_heat("static", 250, layers=2, experts=32, tokens=2048, top_k=4, seed=2)
    return advised(heat_TLE, 8, [4, 5, 6], Costs(step_ms=30))


def test_skewed_heat_is_worth_balancing(skewed):
    given, first, _ = skewed
    assert given.pays
    assert given.par < given.par_left_alone
    assert given.par_left_alone == pytest.approx(first.baselines[0].left_alone_DL[:-1].mean(), rel=0.05)
    assert given.chosen.net_ms > 0
    assert given.gain_L.mean() == pytest.approx(given.par_left_alone - given.par, abs=0.05)
    assert any("net of switching" in reason for reason in given.reasons)


def test_the_cheapest_of_the_near_best_is_advised(skewed):
    given, _, _ = skewed
    best = min(option.par for option in given.by_redundancy)
    near = [option.setup.slots for option in given.by_redundancy if option.par <= best + 0.01]
    assert given.chosen.setup.slots == min(near)
    assert given.redundant == 8 * min(near) - 32
    assert given.chosen.par <= min(option.par for option in given.by_schedule) + 0.01


def test_the_curves_are_there(skewed):
    given, _, _ = skewed
    assert [option.setup.slots for option in given.by_redundancy] == [4, 5, 6]
    assert [option.move_price for option in given.by_moves] == list(MOVE_PRICES)
    assert len({(o.setup.schedule.window, o.setup.schedule.interval) for o in given.by_schedule}) == len(
        given.by_schedule
    )
    assert given.by_moves[0].moves_per_decision >= given.by_moves[-1].moves_per_decision


def test_even_heat_does_not_pay():
    rng = np.random.default_rng(1)
    given, _, _ = advised(rng.poisson(1000, (250, 2, 16)), 4, [4])
    assert not given.pays
    assert any("as even as token sampling lets them be" in reason for reason in given.reasons)


def test_few_tokens_and_few_experts_are_said_plainly():
    rng = np.random.default_rng(1)
    given, _, _ = advised(rng.poisson(1.0, (250, 2, 8)), 8, [1])
    assert not given.pays
    assert any("only 1 tokens per layer and step" in reason for reason in given.reasons)
    assert any("only 1 of the model's experts" in reason for reason in given.reasons)


def test_switching_that_costs_more_than_it_wins_does_not_pay():
    heat_TLE = synthetic_heat("static", 250, layers=2, experts=32, tokens=2048, top_k=4, seed=2)
    given, _, _ = advised(heat_TLE, 8, [5], Costs(step_ms=1, commit_ms=10_000, solve_ms=0))
    assert not given.pays
    assert any("costs as much as balance wins" in reason for reason in given.reasons)


def test_a_round_that_was_stopped_advises_nothing(skewed):
    from dataclasses import replace

    _, first, second = skewed
    with pytest.raises(ReplayError, match="before enough was known"):
        advise(first, replace(second, interrupted=True), SETTINGS, 1.0)


CURVE = CostCurve(20.0, 11.6, 5.0, 0.0615)


def in_time(tokens, slots=(4, 5, 6), settings=None):
    settings = settings or PlannerSettings(cost_curve=CURVE)
    costs = Costs(curve=CURVE, bytes_per_expert=1 << 20, split=SplitCost.of(settings, 8, 32))
    heat_TLE = synthetic_heat("static", 130, layers=1, experts=32, tokens=tokens, top_k=4, seed=2)
    trace, scene = ArrayTrace(heat_TLE), scene_for(8, costs)
    first = replay(trace, first_jobs(slots, Schedule(40, 40), settings), scene)
    second = replay(trace, second_jobs(first, trace.steps, settings), scene)
    return advise(first, second, settings, float(heat_TLE.sum(axis=2).mean()))


def test_where_reading_takes_the_time_no_redundancy_is_advised_whatever_it_does_to_the_ratio():
    given = in_time(128)
    assert given.chosen.setup.slots == 4
    assert [option.bytes_per_rank for option in given.by_redundancy] == [slots << 20 for slots in (4, 5, 6)]
    assert any("ms of a step, left alone" in reason for reason in given.reasons)


def test_where_computing_takes_the_time_the_slots_that_are_fastest_are_advised_and_never_simply_the_most():
    given = in_time(8192)
    times = {option.setup.slots: option.moe_ms for option in given.by_redundancy}
    assert given.chosen.setup.slots == min(
        slots for slots, ms in times.items() if ms <= min(times.values()) * 1.005
    )
    assert given.chosen.setup.slots == 5
    assert given.pays
    assert given.chosen.moe_ms < given.moe_ms_left_alone


def test_whether_the_stepwise_split_pays_is_said_and_it_takes_no_part_in_the_choice_of_slots():
    free, dear = (
        in_time(8192, (4, 5), PlannerSettings(split="step", split_overhead_us=us, cost_curve=CURVE))
        for us in (0.0, 500.0)
    )
    for given in (free, dear):
        assert [option.setup.slots for option in given.by_redundancy] == [4, 5]
        assert not any("tables" in option.label for option in (*given.by_schedule, *given.by_moves))
    assert any("itself takes 0.000 ms" in reason and "the split pays" in reason for reason in free.reasons)
    assert any("the split does not pay" in reason for reason in dear.reasons)
    assert dear.chosen.moe_ms > free.chosen.moe_ms + 0.4
