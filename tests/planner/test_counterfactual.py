"""Tests of the gain of balancing: its share of PAR, and time only if switches measured it."""

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
from eplb_core.planner.decide import plan_afresh
from eplb_core.planner.plan import Layout
from eplb_core.planner.score import par_by_step, split_steps, split_us
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
    return FOUND.changed_by(plan_afresh(WINDOW, FIRST, TOPOLOGY, settings))


TIMED = StepTimes(np.full(STEPS, 40_000.0), np.full(STEPS, 512.0))
MEASURED_EFFECTS = [
    SwitchEffect(us, tokens, 64) for us, tokens in ((900, 90), (510, 50), (705, 70), (1180, 120))
]
NO_EFFECTS = [SwitchEffect(us, tokens, 64) for us, tokens in ((400, 90), (-300, 50), (-250, 70), (200, 120))]


def served_by(way: Layout, times: StepTimes = NOTHING, effects: Sequence[SwitchEffect] = ()) -> Served:
    """The window's steps as this way serves them, in the shares that it expects."""
    steps = split_steps(HEAT, way.placement, way.log2phy_RLE, None, "tables")
    return Served(par_by_step(steps), steps.peak_TK.sum(axis=1), times, effects)


def judged(
    serving: Layout,
    settings: PlannerSettings = SETTINGS,
    times: StepTimes = NOTHING,
    effects: Sequence[SwitchEffect] = (),
    price: TimePrice | None = None,
) -> Worth:
    found = worth_of(WINDOW, FOUND, serving, served_by(serving, times, effects), settings, price)
    assert found is not None
    return found


def plain_step_us(way: Layout, curve: CostCurve) -> list[list[float]]:
    """Slot by slot, source by source, as the definition reads."""
    phy2log_LRS = way.placement.phy2log_LRS
    found = []
    for heat_LE in HEAT:
        row = []
        for layer in range(LAYERS):
            tokens_P = [0.0] * (RANKS * SLOTS)
            for source in range(RANKS):
                for expert in range(EXPERTS):
                    slot = way.log2phy_RLE[source, layer, expert]
                    assert phy2log_LRS[layer].ravel()[slot] == expert
                    tokens_P[slot] += heat_LE[layer, expert] / RANKS
            ranks = [tokens_P[rank * SLOTS : (rank + 1) * SLOTS] for rank in range(RANKS)]
            row.append(max(plain_rank_us(curve, tokens) for tokens in ranks))
        found.append(row)
    return found


def us_of_steps(window: Window, way: Layout, curve: CostCurve) -> np.ndarray:
    return split_us(window.heat_TLE, way.placement, way.log2phy_RLE, None, "tables", curve)


@pytest.mark.parametrize("curve", [H200, CostCurve(3.0, 0.0, 0.0, 0.25)])
def test_times_are_those_of_the_definition(curve: CostCurve) -> None:
    for way in (FOUND, balanced()):
        found_TL = us_of_steps(WINDOW, way, curve)
        # Expected tokens by slot are what many whole ones come to, but for chance.
        np.testing.assert_allclose(found_TL, plain_step_us(way, curve), rtol=0.15)
        np.testing.assert_allclose(
            found_TL.mean(axis=0), np.mean(plain_step_us(way, curve), axis=0), rtol=0.03
        )


def test_balance_alone_is_a_share_and_no_time() -> None:
    found = judged(balanced(), times=TIMED)
    assert found.par < found.par_left_alone
    assert found.par_gain_percent == pytest.approx(100 * (1 - found.par / found.par_left_alone))
    assert (found.verdict, found.gain_ms, found.estimate_low_ms) == (NOT_MEASURED, None, None)
    assert "4 switches are needed, 0 are known" in found.reason
    assert found.step_ms == 40
    assert "no step times" in judged(balanced()).reason


def test_an_assumed_price_gives_no_milliseconds() -> None:
    price = time_price(SETTINGS, WINDOW, balanced(), TIMED)
    assert price.kind == "assumed"
    found = judged(balanced(), times=TIMED, price=price)
    assert (found.gain_ms, found.estimate_low_ms, found.tokens_per_second_won) == (None, None, None)


@pytest.mark.parametrize("settings", [replace(SETTINGS, cost_curve=H200), replace(SETTINGS, layer_ms=2.0)])
def test_a_stated_price_gives_a_range_that_is_no_verdict(settings: PlannerSettings) -> None:
    price = time_price(settings, WINDOW, balanced(), TIMED)
    found = judged(balanced(), settings, TIMED, price=price)
    assert found.verdict == NOT_MEASURED
    assert found.gain_ms is None
    low, high = found.estimate_low_ms, found.estimate_high_ms
    assert low is not None
    assert high is not None
    curve = price.curve
    truth = (us_of_steps(WINDOW, FOUND, curve) - us_of_steps(WINDOW, balanced(), curve)).sum(
        axis=1
    ).mean() / 1e3
    assert 0 < low <= 0.5 * truth < 1.5 * truth <= high
    unchanged = judged(FOUND, settings, TIMED, price=price)
    assert unchanged.estimate_low_ms is None


def test_switches_that_saved_time_make_it_a_measured_gain() -> None:
    found = judged(balanced(), times=TIMED, effects=MEASURED_EFFECTS)
    assert found.verdict == HELPS
    assert found.price_kind == "measured"
    assert found.gain_ms is not None
    assert found.gain_low_ms is not None
    assert 0 < found.gain_low_ms < found.gain_ms
    share = found.gain_ms / (40 + found.gain_ms)
    assert found.gain_percent == pytest.approx(100 * share)
    assert found.ranks_worth == pytest.approx(RANKS * share)
    assert found.tokens_per_second == pytest.approx(512 / 0.040)
    left_alone = 512 / (0.040 + found.gain_ms / 1e3)
    assert found.tokens_per_second_won == pytest.approx(512 / 0.040 - left_alone)


def test_switches_that_saved_nothing_say_that_it_cannot_be_measured() -> None:
    price = time_price(replace(SETTINGS, cost_curve=H200), WINDOW, balanced(), TIMED)
    found = judged(balanced(), times=TIMED, effects=NO_EFFECTS, price=price)
    assert (found.verdict, found.gain_ms, found.ranks_worth) == (NOT_MEASURABLE, None, None)
    assert found.estimate_low_ms is None, "what was measured outweighs what was stated"
    assert "does not measurably follow balance over 4 switches" in found.reason


def test_step_times_that_never_change_are_no_gain() -> None:
    still = [SwitchEffect(0.0, tokens, 64) for tokens in (90.0, 50.0, 70.0, 120.0)]
    assert judged(balanced(), times=TIMED, effects=still).verdict == NOT_MEASURABLE


def test_what_has_not_changed_gains_nothing() -> None:
    found = judged(FOUND, times=TIMED, effects=MEASURED_EFFECTS)
    assert found.par == found.par_left_alone
    assert (found.verdict, found.gain_ms) == (NO_GAIN, None)


def test_steps_without_tokens_say_nothing() -> None:
    idle = np.zeros_like(HEAT)
    steps = split_steps(idle, FIRST, FOUND.log2phy_RLE, None, "tables")
    served = Served(par_by_step(steps), steps.peak_TK.sum(axis=1), NOTHING)
    assert worth_of(Window(idle), FOUND, FOUND, served, SETTINGS) is None


def test_a_host_that_splits_every_step_is_judged_by_its_own_split() -> None:
    settings = replace(SETTINGS, split="step")
    slopes = [time_price(one, WINDOW, balanced(), NOTHING).curve.slope_us for one in (settings, SETTINGS)]
    assert slopes[0] > slopes[1], "its hottest rank has fewer tokens"


def test_a_layers_time_is_its_part_of_what_serves_and_says_whose_figure_that_is() -> None:
    price = time_price(replace(SETTINGS, cost_curve=H200), WINDOW, balanced(), NOTHING)
    moving = priced(NOTHING_MEASURED, price)
    assert moving.layer_ms == pytest.approx(
        np.sum(plain_step_us(balanced(), H200)) / STEPS / LAYERS / 1e3, rel=0.01
    )
    assert moving.layer_source == "stated, as the price of time"
    assert priced(NOTHING_MEASURED, replace(price, layer_ms=0.0)) is NOTHING_MEASURED
    assert priced(NOTHING_MEASURED, None) is NOTHING_MEASURED
