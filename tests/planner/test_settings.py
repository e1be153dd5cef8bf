"""Errors for invalid settings give the setting's name, value and bounds."""

from __future__ import annotations

import math

import pytest

from eplb_core.planner.settings import PlannerSettings, SettingsError


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("policy", "magic", "policy is 'magic'; choose one of none, deepseek, flashlb"),
        ("split", "fair", "split is 'fair'; choose one of tables, even, deal, step"),
        ("par_threshold", 0.5, "par_threshold is 0.5; it must be a finite number, 1.0 or more"),
        ("min_gain", math.nan, "min_gain is nan; it must be a finite number, 0.0 or more"),
        ("move_price", -1.0, "move_price is -1.0"),
        ("move_price", "dear", "move_price is 'dear'; it must be a finite number, 0.0 or more"),
        ("deal_width", 0, "deal_width is 0; it must be a finite number, 1 or more"),
        ("deal_width", 65, "deal_width is 65; it must be a finite number, 64 or less"),
        ("max_layers", 0, "max_layers is 0; it must be a finite number, 1 or more"),
        ("threads", 0, "threads is 0; it must be a finite number, 1 or more"),
        ("budget_ms", 0, "budget_ms is 0; it must be a finite number, more than 0"),
        ("seed", None, "seed is None; it must be a whole number"),
        ("seed", True, "seed is True; it must be a whole number"),
        ("fitted_curve", "yes", "fitted_curve is 'yes'; it must be True or False"),
        ("cost_curve", "curve.json", "cost_curve is 'curve.json'; it must be a CostCurve"),
        ("budget_ms", math.nan, "budget_ms is nan; it must be a finite number"),
    ],
)
def test_invalid_settings_are_rejected(field: str, value: object, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        PlannerSettings(**{field: value})


def test_values_at_the_bounds_are_accepted() -> None:
    PlannerSettings(par_threshold=1.0, min_gain=0.0, move_price=0.0, seed=0, max_layers=1, threads=1)
