"""With a cost curve, the search still balances tokens, but a layer changes only if that saves time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from eplb_core.cost.curve import CostCurve, write_curves
from eplb_core.heat.window import Window
from eplb_core.placement import Placement
from eplb_core.planner.dealing import default_tables
from eplb_core.planner.decide import plan
from eplb_core.planner.holdout import Parts, held_out
from eplb_core.planner.plan import Plan
from eplb_core.planner.score import drawn_par, slowest_rank_us
from eplb_core.planner.settings import PlannerSettings, SettingsError, planner_settings
from eplb_core.planner.topology import Topology
from eplb_service.io.synthetic import synthetic_heat
from eplb_service.offline import solve
from tests.cost.curves import H200
from tests.planner.small_batches import LAYERS, RANKS, SLOTS, routed

SMALL = synthetic_heat("static", 64, 2, 64, tokens=64, top_k=4, seed=1)
LARGE = synthetic_heat("static", 64, 2, 64, tokens=8192, top_k=4, seed=1)
LINEAR = CostCurve(20, 0, 0, 0.0615)
READS = CostCurve(0.0, 50.0, 0.0, 1e-6)
"""Cost curve for which only the number of slots with tokens matters."""
INITIAL = Placement.linear(LAYERS, 32, RANKS, SLOTS)
SETTINGS = PlannerSettings(threads=1, min_gain=0.0, move_price=0.0)


def decided(heat_TLE: np.ndarray, settings: PlannerSettings, *, hold_out: bool = True) -> Plan:
    tables_RLE = default_tables(INITIAL, settings.split, settings.deal_width)
    flat = Topology.flat(RANKS)
    return plan(Window(heat_TLE), INITIAL, tables_RLE, flat, settings, hold_out=hold_out)


@pytest.mark.parametrize("start", [{}, {"placement": Placement.linear(2, 64, 8, 9).phy2log_LRS}])
@pytest.mark.parametrize("heat_TLE", [SMALL, LARGE])
def test_a_linear_curve_changes_no_placement_and_no_table(
    heat_TLE: np.ndarray, start: dict[str, Any]
) -> None:
    by_tokens = solve(heat_TLE, 8, 9, move_price=0.1, **start)
    timed = solve(heat_TLE, 8, 9, move_price=0.1, cost_curve=LINEAR, **start)
    np.testing.assert_array_equal(by_tokens.phy2log, timed.phy2log)
    np.testing.assert_array_equal(by_tokens.log2phy, timed.log2phy)
    assert by_tokens.ms_after is None
    assert timed.ms_after is not None


def test_a_linear_curve_gives_the_hottest_ranks_time() -> None:
    timed = solve(LARGE, 8, 9, cost_curve=LINEAR)
    hottest = sum(20 + 0.0615 * tokens for tokens in timed.hottest_after_L)
    assert timed.ms_after == pytest.approx(hottest / 1e3)


def test_total_times_are_the_sums_over_the_verdicts() -> None:
    timed = solve(LARGE, 8, 9, cost_curve=H200)
    balanced = solve(LARGE, 8, 9)
    assert timed.ms_after is not None
    assert timed.ms_before is not None
    assert timed.ms_after < timed.ms_before
    assert timed.ms_after == pytest.approx(sum(verdict.us_planned for verdict in timed.verdicts) / 1e3)
    assert all("its slowest rank" in verdict.reason for verdict in timed.verdicts)
    assert all(verdict.us_seen is None for verdict in balanced.verdicts)


def test_a_placement_fitted_to_the_heat_is_kept() -> None:
    first = solve(LARGE, 8, 9, cost_curve=H200)
    again = solve(LARGE, 8, 9, cost_curve=H200, placement=first.phy2log, log2phy=first.log2phy)
    assert again.moves == 0


@pytest.mark.parametrize("split", ["tables", "even", "deal", "step"])
@pytest.mark.parametrize("tokens", [4, 64, 1024])
def test_every_change_saves_time_on_the_window_and_equals_the_change_that_balances_tokens(
    tokens: int, split: str
) -> None:
    heat_TLE = routed(96, tokens, 1.2)
    settings = replace(SETTINGS, split=split)
    by_tokens = {change.layer: change for change in decided(heat_TLE, settings).layers}
    by_time = decided(heat_TLE, replace(settings, cost_curve=H200))
    for change in by_time.layers:
        np.testing.assert_array_equal(change.phy2log_RS, by_tokens[change.layer].phy2log_RS)
        layer_K = np.array([change.layer])
        tables_RLE = default_tables(INITIAL, split, settings.deal_width)
        before = Placement(INITIAL.phy2log_LRS[layer_K], 32), tables_RLE[:, layer_K]
        after = Placement(change.phy2log_RS[None], 32), change.log2phy_RE[:, None]
        before_us, after_us = (
            slowest_rank_us(heat_TLE, *layout, None, split, H200, layer_K=layer_K).mean()
            for layout in (before, after)
        )
        assert after_us < before_us
        verdict = by_time.verdicts[change.layer]
        assert (verdict.us_seen, verdict.us_planned) == pytest.approx((before_us, after_us))


@pytest.mark.parametrize("split", ["tables", "even", "deal", "step"])
def test_every_change_that_saves_time_is_accepted(split: str) -> None:
    settings = replace(SETTINGS, split=split)
    heat_TLE = routed(96, 4096, 1.2)
    by_tokens = decided(heat_TLE, settings)
    by_time = decided(heat_TLE, replace(settings, cost_curve=H200))
    assert by_tokens.layers
    assert {change.layer for change in by_time.layers} == {change.layer for change in by_tokens.layers}


@pytest.mark.parametrize("split", ["tables", "even", "deal", "step"])
def test_a_change_that_only_balances_tokens_is_rejected(split: str) -> None:
    settings = replace(SETTINGS, split=split)
    heat_TLE = routed(96, 4096, 1.2)
    by_tokens = decided(heat_TLE, settings)
    by_time = decided(heat_TLE, replace(settings, cost_curve=READS))
    assert by_tokens.layers
    assert by_time.layers == ()
    for change in by_tokens.layers:
        reason = by_time.verdicts[change.layer].reason
        assert reason.startswith("kept: the change saves too little time for its ")


def test_a_small_batch_must_save_time_on_held_out_steps() -> None:
    heat_TLE = routed(48, 1)
    settings = replace(SETTINGS, cost_curve=H200, par_threshold=1.0)
    on_the_window = decided(heat_TLE, settings, hold_out=False)
    assert on_the_window.layers
    held_out_too = decided(heat_TLE, settings)
    for change in on_the_window.layers:
        verdict = held_out_too.verdicts[change.layer]
        assert not verdict.changed
        assert verdict.reason.endswith(" of the layer's time, but its moves cost 0.000")


def test_a_held_out_gain_in_time_is_a_share_of_the_current_time() -> None:
    heat_TLE = routed(64, 16)
    parts = Parts.of(heat_TLE)
    current = Placement(INITIAL.phy2log_LRS[1:2], 32)
    candidate = Placement(INITIAL.phy2log_LRS[1:2, :, ::-1].copy(), 32)
    layouts = [(placement, placement.default_log2phy()) for placement in (current, candidate)]
    layouts[1] = (candidate, np.roll(layouts[1][1], 1, axis=0))
    by_tokens = held_out(parts, 1, *layouts, None, "tables")
    # Every step has the same number of tokens, so time is proportional to PAR.
    by_time = held_out(parts, 1, *layouts, None, "tables", CostCurve(0.0, 0.0, 0.0, 1.0))
    current_par = drawn_par(parts.test_TLE, *layouts[0], None, "tables", np.array([1])).mean()
    np.testing.assert_allclose(by_time.gain_T * current_par, by_tokens.gain_T, atol=1e-12)
    assert by_time.error * current_par == pytest.approx(by_tokens.error)
    assert by_time.gap == by_tokens.gap


def test_a_layer_changes_only_if_it_saves_the_minimum_share_of_its_time() -> None:
    heat_TLE = routed(96, 4096, 1.2)
    settings = replace(SETTINGS, cost_curve=H200)
    free = decided(heat_TLE, settings)
    (worst, *_) = free.layers
    verdict = free.verdicts[worst.layer]
    share = 1 - verdict.us_planned / verdict.us_seen
    for min_gain, changes in ((0.9 * share, True), (1.1 * share, False)):
        decision = decided(heat_TLE, replace(settings, min_gain=min_gain))
        assert decision.verdicts[worst.layer].changed is changes


def test_expert_groups_can_be_combined_with_a_curve() -> None:
    heat_TLE = routed(96, 4096, 1.2)
    two_nodes = Topology(np.arange(RANKS) // 4, np.arange(RANKS))
    options = {"split": "even", "expert_groups": 4, "topology": two_nodes, "threads": 1}
    by_tokens, timed = (solve(heat_TLE, RANKS, SLOTS, cost_curve=curve, **options) for curve in (None, H200))
    assert any(verdict.changed for verdict in timed.verdicts)
    np.testing.assert_array_equal(by_tokens.phy2log, timed.phy2log)


def test_a_cost_curve_decides_only_if_it_includes_reads_and_the_policy_is_flashlb() -> None:
    assert PlannerSettings(cost_curve=H200).deciding_curve == H200
    assert PlannerSettings(cost_curve=H200, policy="deepseek").deciding_curve is None
    assert PlannerSettings(cost_curve=LINEAR).deciding_curve is None
    assert PlannerSettings().deciding_curve is None


def test_a_curve_is_read_from_its_file(tmp_path) -> None:
    path = tmp_path / "curve.json"
    write_curves(path, [H200])
    assert planner_settings({"cost_curve": str(path)}).cost_curve == H200
    assert planner_settings({"cost_curve": None}).cost_curve is None
    with pytest.raises(SettingsError, match="cannot be read"):
        planner_settings({"cost_curve": str(tmp_path / "none.json")})
