"""Advice follows from replays: it recommends balancing if that pays off, and otherwise gives the reason."""

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
    return advice_and_replays(heat_TLE, slots, SETTINGS, scene_for(ranks, costs))


def advice_and_replays(heat_TLE, slots, settings, scene):
    """Return the advice and the replays that it is based on."""
    trace = ArrayTrace(heat_TLE)
    replays = []

    def run(jobs):
        replays.append(replay(trace, jobs, scene))
        return replays[-1]

    return advise(run, slots, 40, trace.steps, settings), replays


@pytest.fixture(scope="module")
def skewed():
    return advised(SKEWED_TLE, 8, [4, 5, 6], Costs(step_ms=30))


def test_balancing_pays_off_on_skewed_heat(skewed):
    advice, (first, *_) = skewed
    assert advice.pays
    assert advice.par < advice.par_left_alone
    assert advice.par_left_alone == pytest.approx(first.baselines[0].par_DL[:-1].mean(), rel=0.05)
    assert advice.chosen.net_ms > 0
    assert advice.gain_L.mean() == pytest.approx(advice.par_left_alone - advice.par, abs=0.05)
    assert any("net of switching" in reason for reason in advice.reasons)


def test_slots_are_compared_under_the_recommended_schedule(skewed):
    advice, _ = skewed
    schedule = advice.chosen.setup
    assert {(o.setup.window, o.setup.interval) for o in advice.by_redundancy} == {
        (schedule.window, schedule.interval)
    }
    assert [option.setup.slots for option in advice.by_redundancy] == [4, 5, 6]
    best = min(option.par for option in advice.by_schedule)
    [same] = [
        option
        for option in advice.by_schedule
        if (option.setup.window, option.setup.interval) == (schedule.window, schedule.interval)
    ]
    assert same.par <= best + 0.01


def option_of(slots, par):
    return Option(str(slots), Setup(slots, 40, 40), 0.0, par, 0.1, 0.0)


def test_more_slots_must_bring_a_tenth_of_the_possible_gain():
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
            "as balanced as token sampling allows",
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
    ids=["even heat", "few tokens", "expensive switches"],
)
def test_the_advice_gives_the_reason_if_balancing_does_not_pay_off(heat_TLE, ranks, slots, costs, reason):
    advice, _ = advised(heat_TLE, ranks, [slots], costs)
    assert not advice.pays
    assert any(reason in text for text in advice.reasons)


def test_an_interrupted_round_yields_no_advice(skewed):
    _, (first, *_) = skewed
    with pytest.raises(ReplayError, match="stopped before there were enough results"):
        advise(lambda jobs: replace(first, interrupted=True), [4], 40, 250, SETTINGS)


CURVE = CostCurve(20.0, 11.6, 5.0, 0.0615)


def advice_by_time(tokens):
    costs = Costs(curve=CURVE, bytes_per_expert=1 << 20)
    heat_TLE = synthetic_heat("static", 130, layers=1, experts=32, tokens=tokens, top_k=4, seed=2)
    return advice_and_replays(heat_TLE, (4, 5, 6), PlannerSettings(cost_curve=CURVE), scene_for(8, costs))[0]


def test_no_redundant_slots_are_recommended_if_reading_dominates():
    advice = advice_by_time(128)
    assert advice.chosen.setup.slots == 4
    assert [option.bytes_per_rank for option in advice.by_redundancy] == [slots << 20 for slots in (4, 5, 6)]
    assert any("ms with the initial placement" in reason for reason in advice.reasons)


def test_the_fastest_slot_count_is_recommended_if_computing_dominates():
    advice = advice_by_time(8192)
    times = {option.setup.slots: option.moe_ms for option in advice.by_redundancy}
    assert advice.chosen.setup.slots == min(
        slots for slots, ms in times.items() if ms <= min(times.values()) * 1.005
    )
    assert advice.chosen.setup.slots == 5
    assert advice.pays
    assert advice.chosen.moe_ms < advice.moe_ms_left_alone


DECODING = Path(__file__).parents[2] / "docs/examples/byte_moe_decoding.npz"
NEARLY_EVEN = 0.2


def served(heat_TLE, slots, window):
    """Return each window's mean PAR in whole tokens under the previous window's placement, without the planner."""
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
def test_the_fewest_slots_close_to_the_best_are_recommended(tokens, skew):
    heat_TLE = np.load(DECODING)["heat"] if skew is None else routed(256, tokens, skew, seed=7)[:, :2]
    slots = [4, 5, 6, 8]
    trace = ArrayTrace(heat_TLE.astype(np.int64))
    settings = replace(SETTINGS, threads=1)
    advice = advise(lambda jobs: replay(trace, jobs, scene_for(8)), slots, 64, trace.steps, settings)
    par_of = {count: served(trace.heat_TLE, count, 64) for count in slots}
    fewest = min(count for count, par in par_of.items() if par <= 1.01 * min(par_of.values()))
    assert advice.chosen.setup.slots <= fewest, par_of
