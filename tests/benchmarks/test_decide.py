"""Tests of ``make bench-decide``: peers that decide at our policy's interval, and heat that was not used for tuning."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.decide.heat import UNTUNED, shipped, untuned
from benchmarks.decide.served import Delay, Row, interval_of, own_rows, peer_rows
from benchmarks.solver.heats import generate
from eplb_core.planner.settings import PlannerSettings
from eplb_lab.bench.closed_loop import Scenario
from eplb_lab.bench.decision import Decision, Scene


class Records:
    """A one-peer contest that records the heat of every decision."""

    peers = ("peer",)

    def __init__(self) -> None:
        self.seen: list[np.ndarray] = []

    def decide(self, name: str, scene: Scene, *, fresh: bool) -> Decision:
        self.seen.append(scene.heat_TLE)
        moved = np.roll(scene.placement_LRS, 1, axis=1)
        return Decision(moved, None, None, 1, 0.5, 0.5)


def test_peers_that_decide_at_our_interval_get_full_windows() -> None:
    heat_TLE = np.random.default_rng(0).integers(1, 9, (24, 1, 4))
    scenario = Scenario("drawn", heat_TLE, 2, 2, 8)
    contest = Records()
    (row,) = peer_rows(scenario, contest, 4)  # type: ignore[arg-type]
    assert len(contest.seen) == 4
    for number, seen_TLE in enumerate(contest.seen):
        np.testing.assert_array_equal(seen_TLE, heat_TLE[4 * number : 4 * number + 8])
    # Decisions in the first served window are not counted; the same holds for our policy.
    assert (row.policy, row.decisions, row.moves_per_window) == ("peer, as often as ours, at once", 2, 2 * 4)
    (by_window,) = peer_rows(scenario, contest)  # type: ignore[arg-type]
    assert (by_window.policy, by_window.decisions, by_window.moves_per_window) == ("peer, at once", 1, 4)


@pytest.mark.parametrize(("decisions", "interval"), [(50, 28), (11, None), (0, None)])
def test_peers_use_the_mean_interval_of_our_decisions(decisions: int, interval: int | None) -> None:
    scenario = Scenario("drawn", np.ones((1664, 1, 4), dtype=np.int32), 2, 2, 128)
    assert interval_of(scenario, [Row("ours", 1.0, 0.0, decisions, 0.0)]) == interval


def test_untuned_heat_drifts_while_its_number_of_tokens_is_constant() -> None:
    scenarios = list(untuned(0, 1))
    assert [scenario.name for scenario in scenarios] == [f"{kind} (untuned)" for kind in UNTUNED]
    for scenario in scenarios:
        assert (scenario.heat_TLE.sum(axis=2) == 4096 * 8).all()
        first_E = scenario.heat_TLE[:64, 0].sum(axis=0)
        last_E = scenario.heat_TLE[-64:, 0].sum(axis=0)
        assert np.corrcoef(first_E, last_E)[0, 1] < 0.9


def test_the_shipped_recording_has_three_decisions() -> None:
    scenario = shipped()
    assert (scenario.heat_TLE.shape, scenario.decisions) == ((256, 4, 32), 3)


def test_rows_name_the_pace_of_plans_and_slower_plans_balance_worse() -> None:
    heat_TLE = np.array(generate("drift", 2, 32, 64 * 6, 0))
    scenario = Scenario("drift", heat_TLE, 4, 10, 64)
    delay = Delay(step_ms=40.0, solve_ms=200.0, model_layers=8)
    rows = list(own_rows(scenario, PlannerSettings(threads=1), 1 << 20, math.inf, delay, unscored=3))
    assert [row.policy for row in rows] == [
        "none",
        "ours, at once",
        "ours, at the pace of 8 layers, 40 ms per step",
    ]
    none, at_once, paced = rows
    assert at_once.par < paced.par < none.par
