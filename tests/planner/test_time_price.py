"""The best price of time that is known is used, and says what it is and why it is nothing better."""

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
RANKS, SLOTS, EXPERTS, STEPS = 4, 6, 24, 160


def window() -> Window:
    """Batches and skew that vary from step to step."""
    rng = np.random.default_rng(0)
    popularity = rng.dirichlet(np.full(EXPERTS, 0.5), (STEPS, 2))
    batch_T = np.exp(rng.uniform(np.log(64), np.log(8192), STEPS))
    return Window(rng.poisson(batch_T[:, None, None] * popularity).astype(np.int32))


WINDOW = window()
PLACEMENT = Placement.linear(2, EXPERTS, RANKS, SLOTS)
SERVING = Layout(PLACEMENT, PLACEMENT.default_log2phy())


def times(noise: float, curve: CostCurve = CURVE) -> StepTimes:
    """What steps take under a curve, slot by slot."""
    tokens = WINDOW.heat_TLE.reshape(STEPS, 2, RANKS, SLOTS)
    us_T = 700 + curve.slot_us(tokens).sum(axis=3).max(axis=2).sum(axis=1)
    scatter_T = np.exp(noise * np.random.default_rng(1).standard_normal(STEPS))
    return StepTimes(us_T * scatter_T, np.full(STEPS, np.nan))


UNKNOWN = StepTimes(np.full(STEPS, np.nan), np.full(STEPS, np.nan))


def priced(settings: PlannerSettings = SETTINGS, known: StepTimes = UNKNOWN) -> TimePrice:
    return time_price(settings, WINDOW, SERVING, known)


def test_a_curve_that_is_given_is_measured_only_where_it_was_fitted() -> None:
    fit = FitQuality(40, 10, 0.02, 0.05, 0.08)
    assert priced(replace(SETTINGS, cost_curve=CURVE), times(0.0)).kind == STATED
    measured = priced(replace(SETTINGS, cost_curve=replace(CURVE, fit=fit)))
    assert (measured.kind, measured.least, measured.most) == (MEASURED, 0.95, 1.05)
    assert "median error 2.0%" in measured.reason


def test_step_times_give_the_curve_where_none_is_given() -> None:
    found = priced(known=times(0.003))
    assert found.kind == FITTED
    assert found.curve.slope_us == pytest.approx(CURVE.slope_us, rel=0.15)
    assert found.least < 1 < found.most
    assert "held-out" in found.reason


@pytest.mark.parametrize(
    ("known", "why"),
    [
        (UNKNOWN, "0 steps are too few"),
        (times(0.6), "misses the steps held out|do not depend measurably"),
        (StepTimes(np.full(STEPS, 900.0), np.full(STEPS, np.nan)), "do not grow|do not depend measurably"),
    ],
)
def test_a_fit_that_says_nothing_is_refused_and_the_fallback_named(known: StepTimes, why: str) -> None:
    found = priced(known=known)
    assert found.kind == ASSUMED
    assert found.curve.linear
    assert re.search(why, found.reason)


def test_the_linear_price_makes_a_layer_take_what_is_stated() -> None:
    found = priced(replace(SETTINGS, layer_ms=2.0))
    assert found.kind == STATED
    peak_TL = WINDOW.heat_TLE.reshape(STEPS, 2, RANKS, SLOTS).sum(axis=3).max(axis=2)
    assert found.curve.slope_us * peak_TL.mean() == pytest.approx(2000)


def test_half_of_a_step_is_assumed_to_be_experts_where_steps_are_timed_and_nothing_is_stated() -> None:
    timed = StepTimes(np.full(STEPS, 900.0), np.full(STEPS, np.nan))
    found = priced(known=timed)
    peak_TL = WINDOW.heat_TLE.reshape(STEPS, 2, RANKS, SLOTS).sum(axis=3).max(axis=2)
    assert found.curve.slope_us * peak_TL.mean() == pytest.approx(900 / 2 / 2)
    assert "50% of a measured step" in found.reason
    assert "0.4 ms per layer" in priced().reason
    assert "(stated: layer_ms)" in priced(replace(SETTINGS, layer_ms=2.0), timed).reason


def test_with_split_step_nothing_is_fitted() -> None:
    found = priced(replace(SETTINGS, split="step"), times(0.0))
    assert found.kind == ASSUMED
    assert (
        "with split step ranks have even tokens in every step; measure a curve with eplb calibrate"
        in found.reason
    )
