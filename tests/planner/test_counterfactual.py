"""The gain from balancing is given as a share of the PAR, and as a time only if switches have measured it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from eplb_core.cost.curve import CostCurve
from eplb_core.cost.moving import NOTHING_MEASURED, SwitchEffect
from eplb_core.heat.sources import StepTimes
from eplb_core.heat.window import Window
from eplb_core.planner.counterfactual import Served, TimePrice, priced, time_price, worth_of
from eplb_core.planner.decide import plan_from_scratch
from eplb_core.planner.plan import Layout
from eplb_core.planner.score import par_by_step, slowest_rank_us, split_steps
from eplb_core.planner.settings import PlannerSettings
from eplb_core.planner.verdicts import HELPS, NO_GAIN, NOT_MEASURABLE, NOT_MEASURED, Worth
from tests.cost.curves import H200, plain_rank_us
from tests.planner.first_layout import (
    EXPERTS,
    FIRST,
    FOUND,
    HEAT,
    LAYERS,
    RANKS,
    SETTINGS,
    SLOTS,
    STEPS,
    TOPOLOGY,
    WINDOW,
)

NOTHING = StepTimes(np.full(STEPS, np.nan), np.full(STEPS, np.nan))


def balanced(settings: PlannerSettings = SETTINGS) -> Layout:
    return FOUND.changed_by(plan_from_scratch(WINDOW, FIRST, TOPOLOGY, settings))


TIMED = StepTimes(np.full(STEPS, 40_000.0), np.full(STEPS, 512.0))
MEASURED_EFFECTS = [
    SwitchEffect(us, tokens, 64) for us, tokens in ((900, 90), (510, 50), (705, 70), (1180, 120))
]
NO_EFFECTS = [SwitchEffect(us, tokens, 64) for us, tokens in ((400, 90), (-300, 50), (-250, 70), (200, 120))]


def served_by(layout: Layout, times: StepTimes = NOTHING, effects: Sequence[SwitchEffect] = ()) -> Served:
    """Return the window's PAR and the slowest ranks' loads under this layout."""
    steps = split_steps(HEAT, layout.placement, layout.log2phy_RLE, None, "tables")
    return Served(par_by_step(steps), steps.peak_TK.sum(axis=1), times, effects)


def judged(
    serving: Layout,
    settings: PlannerSettings = SETTINGS,
    times: StepTimes = NOTHING,
    effects: Sequence[SwitchEffect] = (),
    price: TimePrice | None = None,
) -> Worth:
    worth = worth_of(WINDOW, FOUND, serving, served_by(serving, times, effects), settings, price)
    assert worth is not None
    return worth


def slow_step_us(layout: Layout, curve: CostCurve) -> list[list[float]]:
    """Return the slowest rank's time for each step and layer, summed over slots and sources."""
    phy2log_LRS = layout.placement.phy2log_LRS
    us_TL = []
    for heat_LE in HEAT:
        row = []
        for layer in range(LAYERS):
            tokens_P = [0.0] * (RANKS * SLOTS)
            for source in range(RANKS):
                for expert in range(EXPERTS):
                    slot = layout.log2phy_RLE[source, layer, expert]
                    assert phy2log_LRS[layer].ravel()[slot] == expert
                    tokens_P[slot] += heat_LE[layer, expert] / RANKS
            ranks = [tokens_P[rank * SLOTS : (rank + 1) * SLOTS] for rank in range(RANKS)]
            row.append(max(plain_rank_us(curve, tokens) for tokens in ranks))
        us_TL.append(row)
    return us_TL


def us_of_steps(window: Window, layout: Layout, curve: CostCurve) -> np.ndarray:
    return slowest_rank_us(window.heat_TLE, layout.placement, layout.log2phy_RLE, None, "tables", curve)


@pytest.mark.parametrize("curve", [H200, CostCurve(3.0, 0.0, 0.0, 0.25)])
def test_step_times_match_the_slow_twin(curve: CostCurve) -> None:
    for layout in (FOUND, balanced()):
        us_TL = us_of_steps(WINDOW, layout, curve)
        # Whole tokens scatter around the expected tokens per slot, hence the tolerances.
        np.testing.assert_allclose(us_TL, slow_step_us(layout, curve), rtol=0.15)
        np.testing.assert_allclose(
            us_TL.mean(axis=0), np.mean(slow_step_us(layout, curve), axis=0), rtol=0.03
        )


def test_the_par_gain_is_not_converted_to_time_if_no_switch_was_measured() -> None:
    worth = judged(balanced(), times=TIMED)
    assert worth.par < worth.par_left_alone
    assert worth.par_gain_percent == pytest.approx(100 * (1 - worth.par / worth.par_left_alone))
    assert (worth.verdict, worth.gain_ms, worth.estimate_low_ms) == (NOT_MEASURED, None, None)
    assert "4 switches are needed; 0 are known" in worth.reason
    assert worth.step_ms == 40
    assert "no step times" in judged(balanced()).reason


def test_an_assumed_time_price_yields_no_milliseconds() -> None:
    price = time_price(SETTINGS, WINDOW, balanced(), TIMED)
    assert price.kind == "assumed"
    worth = judged(balanced(), times=TIMED, price=price)
    assert (worth.gain_ms, worth.estimate_low_ms, worth.tokens_per_second_won) == (None, None, None)


@pytest.mark.parametrize("settings", [replace(SETTINGS, cost_curve=H200), replace(SETTINGS, layer_ms=2.0)])
def test_a_stated_time_price_yields_a_range_but_no_verdict(settings: PlannerSettings) -> None:
    price = time_price(settings, WINDOW, balanced(), TIMED)
    worth = judged(balanced(), settings, TIMED, price=price)
    assert worth.verdict == NOT_MEASURED
    assert worth.gain_ms is None
    low = worth.estimate_low_ms
    high = worth.estimate_high_ms
    assert low is not None
    assert high is not None
    curve = price.curve
    truth = (us_of_steps(WINDOW, FOUND, curve) - us_of_steps(WINDOW, balanced(), curve)).sum(
        axis=1
    ).mean() / 1e3
    assert 0 < low <= 0.5 * truth < 1.5 * truth <= high
    unchanged = judged(FOUND, settings, TIMED, price=price)
    assert unchanged.estimate_low_ms is None


def test_switches_that_saved_time_yield_a_measured_gain() -> None:
    worth = judged(balanced(), times=TIMED, effects=MEASURED_EFFECTS)
    assert worth.verdict == HELPS
    assert worth.price_kind == "measured"
    assert worth.gain_ms is not None
    assert worth.gain_low_ms is not None
    assert 0 < worth.gain_low_ms < worth.gain_ms
    share = worth.gain_ms / (40 + worth.gain_ms)
    assert worth.gain_percent == pytest.approx(100 * share)
    assert worth.ranks_worth == pytest.approx(RANKS * share)
    assert worth.tokens_per_second == pytest.approx(512 / 0.040)
    left_alone = 512 / (0.040 + worth.gain_ms / 1e3)
    assert worth.tokens_per_second_won == pytest.approx(512 / 0.040 - left_alone)


def test_the_gain_is_not_measurable_if_switches_saved_no_time() -> None:
    price = time_price(replace(SETTINGS, cost_curve=H200), WINDOW, balanced(), TIMED)
    worth = judged(balanced(), times=TIMED, effects=NO_EFFECTS, price=price)
    assert (worth.verdict, worth.gain_ms, worth.ranks_worth) == (NOT_MEASURABLE, None, None)
    assert worth.estimate_low_ms is None, "measurements take precedence over stated costs"
    assert "does not measurably depend on balance over 4 switches" in worth.reason


def test_the_gain_is_not_measurable_if_step_times_are_constant() -> None:
    still = [SwitchEffect(0.0, tokens, 64) for tokens in (90.0, 50.0, 70.0, 120.0)]
    assert judged(balanced(), times=TIMED, effects=still).verdict == NOT_MEASURABLE


def test_the_unchanged_layout_has_no_gain() -> None:
    worth = judged(FOUND, times=TIMED, effects=MEASURED_EFFECTS)
    assert worth.par == worth.par_left_alone
    assert (worth.verdict, worth.gain_ms) == (NO_GAIN, None)


def test_a_window_without_tokens_has_no_gain() -> None:
    idle = np.zeros_like(HEAT)
    steps = split_steps(idle, FIRST, FOUND.log2phy_RLE, None, "tables")
    served = Served(par_by_step(steps), steps.peak_TK.sum(axis=1), NOTHING)
    assert worth_of(Window(idle), FOUND, FOUND, served, SETTINGS) is None


def test_the_assumed_time_price_follows_the_hosts_stepwise_split() -> None:
    settings = replace(SETTINGS, split="step")
    slopes = [
        time_price(chosen, WINDOW, balanced(), NOTHING).curve.slope_us for chosen in (settings, SETTINGS)
    ]
    assert slopes[0] > slopes[1], "the stepwise split leaves the hottest rank fewer tokens"


def test_a_layers_time_is_computed_from_the_current_layout_and_its_source_is_stated() -> None:
    price = time_price(replace(SETTINGS, cost_curve=H200), WINDOW, balanced(), NOTHING)
    moving = priced(NOTHING_MEASURED, price)
    assert moving.layer_ms == pytest.approx(
        np.sum(slow_step_us(balanced(), H200)) / STEPS / LAYERS / 1e3, rel=0.01
    )
    assert moving.layer_source == "from the stated cost of tokens"
    assert priced(NOTHING_MEASURED, replace(price, layer_ms=0.0)) is NOTHING_MEASURED
    assert priced(NOTHING_MEASURED, None) is NOTHING_MEASURED
