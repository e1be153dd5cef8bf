"""Advice follows from what was replayed: balance where it wins, and plainly not where it cannot."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from eplb_core.cost.curve import CostCurve
from eplb_core.planner.settings import PlannerSettings
from eplb_lab.bench.scoring import realised_par
from eplb_service import solve
from eplb_service.io.synthetic import synthetic_heat
from eplb_service.io.trace import ArrayTrace
from eplb_service.replay.advise import Option, advise, cheapest
from eplb_service.replay.costs import Costs
from eplb_service.replay.jobs import replay, scene_for
from eplb_service.replay.policy import ReplayError, Setup
from tests.planner.small_batches import routed

SETTINGS = PlannerSettings()
SKEWED_TLE = synthetic_heat("static", 250, layers=2, experts=32, tokens=2048, top_k=4, seed=2)


def advised(heat_TLE, ranks, slots, costs=None):
    return rounds(heat_TLE, slots, SETTINGS, scene_for(ranks, costs))


def rounds(heat_TLE, slots, settings, scene):
    """The advice, and the replays that it is made of."""
    trace, done = ArrayTrace(heat_TLE), []

    def run(jobs):
        done.append(replay(trace, jobs, scene))
        return done[-1]

    return advise(run, slots, 40, trace.steps, settings), done


@pytest.fixture(scope="module")
def skewed():
    return advised(SKEWED_TLE, 8, [4, 5, 6], Costs(step_ms=30))


def test_skewed_heat_is_worth_balancing(skewed):
    given, (first, *_) = skewed
    assert given.pays
    assert given.par < given.par_left_alone
    assert given.par_left_alone == pytest.approx(first.baselines[0].par_DL[:-1].mean(), rel=0.05)
    assert given.chosen.net_ms > 0
    assert given.gain_L.mean() == pytest.approx(given.par_left_alone - given.par, abs=0.05)
    assert any("net of switching" in reason for reason in given.reasons)


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


def option_of(slots, par):
    return Option(str(slots), Setup(slots, 40, 40), 0.0, par, 0.1, 0.0)


def test_more_memory_must_win_a_tenth_of_what_can_be_won():
    options = [option_of(4, 1.75), option_of(5, 1.249), option_of(6, 1.20), option_of(8, 1.161)]
    assert cheapest(options, left_alone=2.09).setup.slots == 5
    assert cheapest(options, left_alone=1.76).setup.slots == 6
    assert cheapest([option_of(4, 1.011), option_of(8, 1.003)], left_alone=1.02).setup.slots == 4
    assert cheapest([option_of(4, 1.02), option_of(8, 1.003)], left_alone=1.03).setup.slots == 8


@pytest.mark.parametrize(
    ("heat_TLE", "ranks", "slots", "costs", "reason"),
    [
        (
            np.random.default_rng(1).poisson(1000, (250, 2, 16)),
            4,
            4,
            None,
            "as even as token sampling lets them",
        ),
        (np.random.default_rng(1).poisson(1.0, (250, 2, 8)), 8, 1, None, "so few tokens per layer and step"),
        (
            SKEWED_TLE,
            8,
            5,
            Costs(step_ms=1, commit_ms=10_000, solve_ms=0),
            "costs as much as balancing saves",
        ),
    ],
    ids=["even heat", "few tokens", "dear switches"],
)
def test_where_balancing_does_not_pay_the_reason_is_said_plainly(heat_TLE, ranks, slots, costs, reason):
    given, _ = advised(heat_TLE, ranks, [slots], costs)
    assert not given.pays
    assert any(reason in said for said in given.reasons)


def test_a_round_that_was_stopped_advises_nothing(skewed):
    _, (first, *_) = skewed
    with pytest.raises(ReplayError, match="stopped before there were enough results"):
        advise(lambda jobs: replace(first, interrupted=True), [4], 40, 250, SETTINGS)


CURVE = CostCurve(20.0, 11.6, 5.0, 0.0615)


def in_time(tokens):
    costs = Costs(curve=CURVE, bytes_per_expert=1 << 20)
    heat_TLE = synthetic_heat("static", 130, layers=1, experts=32, tokens=tokens, top_k=4, seed=2)
    return rounds(heat_TLE, (4, 5, 6), PlannerSettings(cost_curve=CURVE), scene_for(8, costs))[0]


def test_where_reading_takes_the_time_no_redundancy_is_advised_whatever_it_does_to_the_ratio():
    given = in_time(128)
    assert given.chosen.setup.slots == 4
    assert [option.bytes_per_rank for option in given.by_redundancy] == [slots << 20 for slots in (4, 5, 6)]
    assert any("ms if left alone" in reason for reason in given.reasons)


def test_where_computing_takes_the_time_the_slots_that_are_fastest_are_advised_and_never_simply_the_most():
    given = in_time(8192)
    times = {option.setup.slots: option.moe_ms for option in given.by_redundancy}
    assert given.chosen.setup.slots == min(
        slots for slots, ms in times.items() if ms <= min(times.values()) * 1.005
    )
    assert given.chosen.setup.slots == 5
    assert given.pays
    assert given.chosen.moe_ms < given.moe_ms_left_alone


DECODING = Path(__file__).parents[2] / "docs/examples/byte_moe_decoding.npz"
NEARLY_EVEN = 0.2


def served(heat_TLE, slots, window):
    """Return the mean PAR of whole tokens per window, placed on the previous window and scored without the planner."""
    pars = []
    for first in range(0, len(heat_TLE) - 2 * window + 1, window):
        seen_TLE = heat_TLE[first : first + window]
        next_TLE = heat_TLE[first + window : first + 2 * window]
        pars.append(realised_par(next_TLE, slots, solve(seen_TLE, 8, slots, threads=1).log2phy).mean())
    return np.mean(pars)


@pytest.mark.parametrize(
    ("tokens", "skew"),
    [(4, 0.8), (16, 0.8), (64, NEARLY_EVEN), (64, 0.8), (256, NEARLY_EVEN), (256, 0.8), (16, None)],
)
def test_no_more_slots_are_advised_than_come_near_the_best_on_following_windows(tokens, skew):
    heat_TLE = np.load(DECODING)["heat"] if skew is None else routed(256, tokens, skew, seed=7)[:, :2]
    slots = [4, 5, 6, 8]
    trace = ArrayTrace(heat_TLE.astype(np.int64))
    settings = replace(SETTINGS, threads=1)
    given = advise(lambda jobs: replay(trace, jobs, scene_for(8)), slots, 64, trace.steps, settings)
    par_of = {count: served(trace.heat_TLE, count, 64) for count in slots}
    fewest = min(count for count, par in par_of.items() if par <= 1.01 * min(par_of.values()))
    assert given.chosen.setup.slots <= fewest, par_of
