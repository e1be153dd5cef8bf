"""The planner uses the best available time price, and reports its kind and why no better price is available."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from eplb_core.cost.curve import CostCurve, FitQuality
from eplb_core.heat.sources import StepTimes
from eplb_core.heat.window import Window
from eplb_core.placement import Placement
from eplb_core.planner.counterfactual import ASSUMED, FITTED, MEASURED, STATED, TimePrice, time_price
from eplb_core.planner.plan import Layout
from eplb_core.planner.settings import PlannerSettings

SETTINGS = PlannerSettings()
CURVE = CostCurve(5.0, 12.0, 4.0, 0.06)
RANKS = 4
SLOTS = 6
EXPERTS = 24
STEPS = 160


def window() -> Window:
    """Draw a window in which batch size and skew vary from step to step."""
    rng = np.random.default_rng(0)
    popularity = rng.dirichlet(np.full(EXPERTS, 0.5), (STEPS, 2))
    batch_T = np.exp(rng.uniform(np.log(64), np.log(8192), STEPS))
    return Window(rng.poisson(batch_T[:, None, None] * popularity).astype(np.int32))


WINDOW = window()
PLACEMENT = Placement.linear(2, EXPERTS, RANKS, SLOTS)
SERVING = Layout(PLACEMENT, PLACEMENT.default_log2phy())


def times(noise: float, curve: CostCurve = CURVE) -> StepTimes:
    """Return the step times that a cost curve gives, summed over slots."""
    tokens = WINDOW.heat_TLE.reshape(STEPS, 2, RANKS, SLOTS)
    us_T = 700 + curve.slot_us(tokens).sum(axis=3).max(axis=2).sum(axis=1)
    scatter_T = np.exp(noise * np.random.default_rng(1).standard_normal(STEPS))
    return StepTimes(us_T * scatter_T, np.full(STEPS, np.nan))


UNKNOWN = StepTimes(np.full(STEPS, np.nan), np.full(STEPS, np.nan))


def priced(settings: PlannerSettings = SETTINGS, step_times: StepTimes = UNKNOWN) -> TimePrice:
    return time_price(settings, WINDOW, SERVING, step_times)


def test_a_stated_curve_counts_as_measured_only_if_it_was_fitted() -> None:
    fit = FitQuality(40, 10, 0.02, 0.05, 0.08)
    assert priced(replace(SETTINGS, cost_curve=CURVE), times(0.0)).kind == STATED
    measured = priced(replace(SETTINGS, cost_curve=replace(CURVE, fit=fit)))
    assert (measured.kind, measured.least, measured.most) == (MEASURED, 0.95, 1.05)
    assert "median error 2.0%" in measured.reason


def test_step_times_yield_a_curve_if_none_is_stated() -> None:
    price = priced(step_times=times(0.003))
    assert price.kind == FITTED
    assert price.curve.slope_us == pytest.approx(CURVE.slope_us, rel=0.15)
    assert price.least < 1 < price.most
    assert "held-out" in price.reason


@pytest.mark.parametrize(
    ("step_times", "why"),
    [
        (UNKNOWN, "0 steps are too few"),
        (times(0.6), "does not fit the held-out steps|do not measurably depend"),
        (StepTimes(np.full(STEPS, 900.0), np.full(STEPS, np.nan)), "do not grow|do not measurably depend"),
    ],
)
def test_an_inconclusive_fit_is_rejected_and_the_fallback_is_named(step_times: StepTimes, why: str) -> None:
    price = priced(step_times=step_times)
    assert price.kind == ASSUMED
    assert price.curve.linear
    assert re.search(why, price.reason)


def test_the_linear_price_reproduces_the_stated_layer_time() -> None:
    price = priced(replace(SETTINGS, layer_ms=2.0))
    assert price.kind == STATED
    peak_TL = WINDOW.heat_TLE.reshape(STEPS, 2, RANKS, SLOTS).sum(axis=3).max(axis=2)
    assert price.curve.slope_us * peak_TL.mean() == pytest.approx(2000)


def test_experts_are_assumed_to_take_half_of_a_timed_step() -> None:
    timed = StepTimes(np.full(STEPS, 900.0), np.full(STEPS, np.nan))
    price = priced(step_times=timed)
    peak_TL = WINDOW.heat_TLE.reshape(STEPS, 2, RANKS, SLOTS).sum(axis=3).max(axis=2)
    assert price.curve.slope_us * peak_TL.mean() == pytest.approx(900 / 2 / 2)
    assert "50% of a measured step" in price.reason
    assert "0.4 ms per layer" in priced().reason
    assert "(stated: layer_ms)" in priced(replace(SETTINGS, layer_ms=2.0), timed).reason


def test_no_curve_is_fitted_under_the_stepwise_split() -> None:
    price = priced(replace(SETTINGS, split="step"), times(0.0))
    assert price.kind == ASSUMED
    assert (
        "with split=step, tokens are balanced in every step; measure a curve with eplb calibrate"
        in price.reason
    )
