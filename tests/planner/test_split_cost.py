"""With a cost curve, the stepwise split is judged by its time per slot plus the time that the split itself takes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from eplb_core.cost.curve import CostCurve
from eplb_core.heat.window import Window
from eplb_core.placement import Placement
from eplb_core.planner.decide import plan
from eplb_core.planner.plan import Plan
from eplb_core.planner.price import SplitCost
from eplb_core.planner.score import _stepwise_tokens, slowest_rank_us
from eplb_core.planner.settings import PlannerSettings, SettingsError
from eplb_core.planner.topology import Topology
from eplb_core.solver.model import SearchOptions
from eplb_service.io.synthetic import synthetic_heat
from eplb_service.offline import solve
from tests.cost.curves import H200, plain_rank_us
from tests.solver.slow import stepwise as slow
from worker_agent.stepwise import rounds_for

RANKS = 4
SLOTS = 5
EXPERTS = 16
LAYERS = 2
STEPS = 40
HEAT = synthetic_heat("static", STEPS, LAYERS, EXPERTS, tokens=2048, top_k=4, seed=5)
SMALL = synthetic_heat("static", STEPS, LAYERS, EXPERTS, tokens=8, top_k=4, seed=5)
FIRST = Placement.linear(LAYERS, EXPERTS, RANKS, SLOTS)
STEP = PlannerSettings(split="step", cost_curve=H200, threads=1)


def decided(settings: PlannerSettings, **options: bool) -> Plan:
    tables_RLE = FIRST.default_log2phy()
    flat = Topology.flat(RANKS)
    return plan(Window(HEAT), FIRST, tables_RLE, flat, settings, search=SearchOptions(**options))


def slow_us(heat_TLE: np.ndarray, placement: Placement, curve: CostCurve) -> list[list[float]]:
    """Compute the time from its definition, with an oracle that splits each step's tokens optimally."""
    tokens_TLRS = _stepwise_tokens(heat_TLE, placement)
    us_TL = []
    for heat_LE, tokens_LRS in zip(heat_TLE, tokens_TLRS, strict=True):
        row = []
        for heat_E, phy2log_RS, tokens_RS in zip(heat_LE, placement.phy2log_LRS, tokens_LRS, strict=True):
            best = slow.optimum(phy2log_RS, heat_E.astype(float))
            assert tokens_RS.sum(axis=1).max() == np.ceil(best - 1e-6)
            row.append(max(plain_rank_us(curve, tokens) for tokens in tokens_RS.tolist()))
        us_TL.append(row)
    return us_TL


@pytest.mark.parametrize("heat_TLE", [HEAT, SMALL])
def test_times_match_the_slow_twin_under_the_best_split_of_each_step(heat_TLE: np.ndarray) -> None:
    actual_TL = slowest_rank_us(heat_TLE, FIRST, FIRST.default_log2phy(), None, "step", H200)
    np.testing.assert_allclose(actual_TL, slow_us(heat_TLE, FIRST, H200))


def test_a_layer_without_tokens_takes_no_time_and_each_step_is_timed_independently() -> None:
    heat_TLE = np.concatenate([HEAT, SMALL])
    heat_TLE[7, 1] = 0
    actual_TL = slowest_rank_us(heat_TLE, FIRST, FIRST.default_log2phy(), None, "step", H200)
    assert np.argwhere(np.isnan(actual_TL)).tolist() == [[7, 1]]
    for step in (0, 31, 32, 33, 79):
        alone = slowest_rank_us(heat_TLE[step, None], FIRST, FIRST.default_log2phy(), None, "step", H200)
        np.testing.assert_array_equal(actual_TL[step], alone[0])


def test_the_cost_of_the_split_follows_from_its_bytes_and_rounds() -> None:
    assert SplitCost.of(PlannerSettings(), 8, 64) is None
    slow_link, assumed = (SplitCost.of(replace(STEP, link_bandwidth=gb), 8, 64) for gb in (0.001, 25.0))
    assert slow_link.us - assumed.us == pytest.approx(7 * 64 * 4 * (1 - 0.001 / 25))
    assert "assumed" in str(assumed)
    for choices in (0, 8192, 8193, 1 << 15, 1 << 19):
        more_us = SplitCost.of(STEP, 8, 64, choices).us - assumed.us
        assert more_us == pytest.approx(5.75 * (rounds_for(choices) - 22))
    assert assumed.ms_of_step(10) == pytest.approx(assumed.us / 100)


def test_a_curve_only_rejects_placements_and_never_changes_them() -> None:
    by_tokens = solve(HEAT, RANKS, SLOTS, split="step", threads=1)
    timed = solve(HEAT, RANKS, SLOTS, split="step", cost_curve=H200, threads=1)
    changed = [verdict.layer for verdict in timed.verdicts if verdict.changed]
    assert changed
    for layer in changed:
        np.testing.assert_array_equal(timed.phy2log[layer], by_tokens.phy2log[layer])
    assert timed.ms_after < timed.ms_before
    us_TL = slowest_rank_us(HEAT, Placement(timed.phy2log, EXPERTS), timed.log2phy, None, "step", H200)
    assert timed.ms_after == pytest.approx(us_TL.mean(axis=0).sum() / 1e3)


def test_a_change_that_balances_tokens_but_saves_no_time_is_skipped() -> None:
    # Below the knee, only the number of slots with tokens matters.
    reading = CostCurve(0.0, 50.0, 0.0, 1e-6)
    settings = replace(STEP, cost_curve=reading, par_threshold=1.0, min_gain=0.0, move_price=0.0)
    by_tokens = decided(replace(settings, cost_curve=None))
    by_time = decided(settings)
    assert by_tokens.layers
    for layer_plan in by_tokens.layers:
        verdict = by_time.verdicts[layer_plan.layer]
        assert not verdict.changed
        assert verdict.reason.startswith("kept: the change saves too little time for its ")
        planned = verdict.moves, verdict.par_planned, verdict.us_planned
        assert planned == (0, verdict.par_seen, verdict.us_seen)
    assert by_time.layers == ()


def test_a_layer_changes_only_if_it_saves_the_minimum_share_of_its_time() -> None:
    settings = replace(STEP, par_threshold=1.0, min_gain=0.0, move_price=0.0)
    free = decided(settings)
    (worst, *_) = free.layers
    verdict = free.verdicts[worst.layer]
    won = 1 - verdict.us_planned / verdict.us_seen
    for min_gain, changes in ((0.9 * won, True), (1.1 * won, False)):
        decision = decided(replace(settings, min_gain=min_gain), holdout=False)
        assert decision.verdicts[worst.layer].changed is changes


def test_a_fitted_curve_is_rejected_with_a_stepwise_split() -> None:
    with pytest.raises(SettingsError, match=r"fitted_curve cannot be used with split=step: .*eplb calibrate"):
        PlannerSettings(fitted_curve=True, split="step")
