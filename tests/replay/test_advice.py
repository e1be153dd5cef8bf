"""Advice follows from what was replayed: balance where it wins, and plainly not where it cannot."""

from dataclasses import replace

import numpy as np
import pytest

from eplb_service.cost.curve import CostCurve
from eplb_service.heat.synthetic import synthetic_heat
from eplb_service.io.trace import ArrayTrace
from eplb_service.planner.price import SplitCost
from eplb_service.planner.settings import PlannerSettings
from eplb_service.replay.advise import MOVE_PRICES, Option, _reasons_of_memory, advise, cheapest
from eplb_service.replay.costs import Costs
from eplb_service.replay.jobs import replay, scene_for
from eplb_service.replay.policy import ReplayError, Setup

SETTINGS = PlannerSettings()


def advised(heat_TLE, ranks, slots, costs=None):
    return rounds(heat_TLE, slots, SETTINGS, scene_for(ranks, costs))


def rounds(heat_TLE, slots, settings, scene):
    """The advice, and the replays that it is made of."""
    trace, done = ArrayTrace(heat_TLE), []

    def run(jobs):
        done.append(replay(trace, jobs, scene))
        return done[-1]

    choices = float(heat_TLE.sum(axis=2).mean())
    return advise(run, slots, 40, trace.steps, settings, choices), done


@pytest.fixture(scope="module")
def skewed():
    heat_TLE = synthetic_heat("static", 250, layers=2, experts=32, tokens=2048, top_k=4, seed=2)
    return advised(heat_TLE, 8, [4, 5, 6], Costs(step_ms=30))


def test_skewed_heat_is_worth_balancing(skewed):
    given, (first, *_) = skewed
    assert given.pays
    assert given.par < given.par_left_alone
    assert given.par_left_alone == pytest.approx(first.baselines[0].par_DL[:-1].mean(), rel=0.05)
    assert given.chosen.net_ms > 0
    assert given.gain_L.mean() == pytest.approx(given.par_left_alone - given.par, abs=0.05)
    assert any("net of switching" in reason for reason in given.reasons)


def test_the_fewest_slots_are_advised_that_win_nine_tenths_of_what_can_be_won(skewed):
    given, _ = skewed
    best = min(option.par for option in given.by_redundancy)
    within = max(0.01, 0.1 * (given.par_left_alone - best))
    near = [option.setup.slots for option in given.by_redundancy if option.par <= best + within]
    assert given.chosen.setup.slots == min(near)
    assert given.redundant == 8 * min(near) - 32


def test_slots_are_compared_under_the_schedule_that_is_advised(skewed):
    given, _ = skewed
    schedule = given.chosen.setup
    assert {(o.setup.window, o.setup.interval) for o in given.by_redundancy} == {
        (schedule.window, schedule.interval)
    }
    assert [option.setup.slots for option in given.by_redundancy] == [4, 5, 6]
    best = min(option.par for option in given.by_schedule)
    [same] = [
        option
        for option in given.by_schedule
        if (option.setup.window, option.setup.interval) == (schedule.window, schedule.interval)
    ]
    assert same.par <= best + 0.01


def option_of(slots, par, *, net_ms=0.0, bytes_per_rank=0):
    setup = Setup(slots, 40, 40)
    return Option(str(slots), setup, 0.0, par, 1.0, 0.1, net_ms, None, bytes_per_rank)


def test_more_memory_must_win_a_tenth_of_what_can_be_won():
    options = [option_of(4, 1.75), option_of(5, 1.249), option_of(6, 1.20), option_of(8, 1.161)]
    assert cheapest(options, left_alone=2.09).setup.slots == 5
    assert cheapest(options, left_alone=1.76).setup.slots == 6
    assert cheapest([option_of(4, 1.011), option_of(8, 1.003)], left_alone=1.02).setup.slots == 4
    assert cheapest([option_of(4, 1.02), option_of(8, 1.003)], left_alone=1.03).setup.slots == 8


def test_memory_is_said_of_what_is_advised_and_of_what_would_win_most(skewed):
    _, (_, _, third) = skewed
    options = [
        option_of(5, 1.249, net_ms=6.0, bytes_per_rank=5 << 30),
        option_of(8, 1.161, net_ms=6.6, bytes_per_rank=8 << 30),
    ]
    more = "more memory for experts than without any"
    assert _reasons_of_memory(third, options, options[0]) == [
        f"8 redundant experts take 25% {more} (5.00 GiB per rank).",
        f"32 would win another 0.088, 0.60 ms, and take 100% {more} (8.00 GiB per rank).",
    ]
    assert _reasons_of_memory(third, [option_of(4, 1.2)], option_of(4, 1.2)) == []


def test_the_curves_are_there(skewed):
    given, _ = skewed
    assert [option.setup.slots for option in given.by_redundancy] == [4, 5, 6]
    assert [option.move_price for option in given.by_moves] == list(MOVE_PRICES)
    assert len({(o.setup.window, o.setup.interval) for o in given.by_schedule}) == len(given.by_schedule)
    assert given.by_moves[0].moves_per_decision >= given.by_moves[-1].moves_per_decision


def test_even_heat_does_not_pay():
    rng = np.random.default_rng(1)
    given, _ = advised(rng.poisson(1000, (250, 2, 16)), 4, [4])
    assert not given.pays
    assert any("as even as token sampling lets them be" in reason for reason in given.reasons)


def test_few_tokens_and_few_experts_are_said_plainly():
    rng = np.random.default_rng(1)
    given, _ = advised(rng.poisson(1.0, (250, 2, 8)), 8, [1])
    assert not given.pays
    assert any("only 1 tokens per layer and step" in reason for reason in given.reasons)
    assert any("only 1 of the model's experts" in reason for reason in given.reasons)


def test_switching_that_costs_more_than_it_wins_does_not_pay():
    heat_TLE = synthetic_heat("static", 250, layers=2, experts=32, tokens=2048, top_k=4, seed=2)
    given, _ = advised(heat_TLE, 8, [5], Costs(step_ms=1, commit_ms=10_000, solve_ms=0))
    assert not given.pays
    assert any("costs as much as balance wins" in reason for reason in given.reasons)


def test_a_round_that_was_stopped_advises_nothing(skewed):
    _, (first, *_) = skewed
    with pytest.raises(ReplayError, match="before enough was known"):
        advise(lambda jobs: replace(first, interrupted=True), [4], 40, 250, SETTINGS, 1.0)


CURVE = CostCurve(20.0, 11.6, 5.0, 0.0615)


def in_time(tokens, slots=(4, 5, 6), settings=None, split=None):
    settings = settings or PlannerSettings(cost_curve=CURVE)
    costs = Costs(curve=CURVE, bytes_per_expert=1 << 20, split=split)
    heat_TLE = synthetic_heat("static", 130, layers=1, experts=32, tokens=tokens, top_k=4, seed=2)
    return rounds(heat_TLE, slots, settings, scene_for(8, costs))[0]


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
        in_time(8192, (4, 5), PlannerSettings(split="step", cost_curve=CURVE), SplitCost(us, 0, 22))
        for us in (0.0, 500.0)
    )
    for given in (free, dear):
        assert [option.setup.slots for option in given.by_redundancy] == [4, 5]
        assert not any("tables" in option.label for option in (*given.by_schedule, *given.by_moves))
    assert any("itself takes 0.000 ms" in reason and "the split pays" in reason for reason in free.reasons)
    assert any("the split does not pay" in reason for reason in dear.reasons)
    assert dear.chosen.moe_ms > free.chosen.moe_ms + 0.4
