"""With a cost curve, the planner lowers the time and reports it; a linear curve changes no decision."""

from __future__ import annotations

import numpy as np
import pytest

from eplb_core.cost.curve import CostCurve, write_curves
from eplb_core.planner.settings import PlannerSettings, SettingsError, planner_settings
from eplb_core.planner.solver_call import _sampled_steps, time_curve
from eplb_service.io.synthetic import synthetic_heat
from eplb_service.offline import solve
from tests.cost.curves import H200

SMALL = synthetic_heat("static", 64, 2, 64, tokens=64, top_k=4, seed=1)
LARGE = synthetic_heat("static", 64, 2, 64, tokens=8192, top_k=4, seed=1)


def test_a_linear_curve_changes_no_placement_and_no_table():
    by_tokens = solve(LARGE, 8, 9)
    timed = solve(LARGE, 8, 9, cost_curve=CostCurve(20, 0, 0, 0.0615))
    assert np.array_equal(by_tokens.phy2log, timed.phy2log)
    assert np.array_equal(by_tokens.log2phy, timed.log2phy)
    assert by_tokens.ms_after is None
    assert timed.ms_after is not None
    hottest = sum(20 + 0.0615 * tokens for tokens in timed.hottest_after_L)
    assert timed.ms_after == pytest.approx(hottest / 1e3)


@pytest.mark.parametrize("heat", [SMALL, LARGE])
def test_total_times_are_the_sums_over_the_verdicts(heat):
    timed = solve(heat, 8, 9, cost_curve=H200)
    balanced = solve(heat, 8, 9)
    assert timed.ms_after < timed.ms_before
    assert timed.ms_after == pytest.approx(sum(verdict.us_planned for verdict in timed.verdicts) / 1e3)
    assert all("its slowest rank" in verdict.reason for verdict in timed.verdicts)
    assert all(verdict.us_seen is None for verdict in balanced.verdicts)


def test_a_placement_fitted_to_the_heat_is_kept_with_a_reason():
    first = solve(LARGE, 8, 9, cost_curve=H200)
    again = solve(LARGE, 8, 9, cost_curve=H200, placement=first.phy2log, log2phy=first.log2phy)
    assert again.moves == 0
    assert all("no change pays" in verdict.reason for verdict in again.verdicts if not verdict.changed)


def test_steps_are_sampled_evenly_and_never_summed():
    assert _sampled_steps(10, 5).tolist() == [1, 3, 5, 7, 9]
    assert _sampled_steps(10, 128).tolist() == list(range(10))


def test_other_policies_and_linear_curves_balance_tokens():
    assert time_curve(PlannerSettings(cost_curve=H200)) is not None
    assert time_curve(PlannerSettings(cost_curve=H200, policy="deepseek")) is None
    assert time_curve(PlannerSettings(cost_curve=CostCurve(1, 0, 0, 1))) is None
    assert time_curve(PlannerSettings()) is None


def test_a_curve_is_read_from_its_file(tmp_path):
    path = tmp_path / "curve.json"
    write_curves(path, [H200])
    assert planner_settings({"cost_curve": str(path)}).cost_curve == H200
    assert planner_settings({"cost_curve": None}).cost_curve is None
    with pytest.raises(SettingsError, match="cannot be read"):
        planner_settings({"cost_curve": str(tmp_path / "none.json")})
    with pytest.raises(SettingsError, match="cannot be used together"):
        PlannerSettings(cost_curve=H200, expert_groups=2)
