"""One window's steps, left alone, as served, and under the best known: by the definition, with an interval."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from eplb_service.cost.curve import CostCurve
from eplb_service.cost.moving import NOTHING_MEASURED
from eplb_service.heat.sources import StepTimes
from eplb_service.heat.synthetic import synthetic_heat
from eplb_service.heat.window import Window
from eplb_service.placement import Placement
from eplb_service.planner.counterfactual import _time_price, counterfactual, priced
from eplb_service.planner.decide import plan, plan_afresh
from eplb_service.planner.plan import Serving
from eplb_service.planner.score import split_us
from eplb_service.planner.settings import PlannerSettings
from eplb_service.planner.topology import Topology
from eplb_service.wire.operator import Worth
from tests.cost.curves import H200, plain_rank_us

RANKS, SLOTS, EXPERTS, LAYERS, STEPS = 4, 5, 16, 2, 48
SETTINGS = PlannerSettings(threads=1)
HEAT = synthetic_heat("static", STEPS, LAYERS, EXPERTS, tokens=512, top_k=4, seed=3)
WINDOW = Window(HEAT)
FIRST = Placement.linear(LAYERS, EXPERTS, RANKS, SLOTS)
FOUND = Serving(FIRST, FIRST.default_log2phy())
TOPOLOGY = Topology.flat(RANKS)
NOTHING = StepTimes(np.full(STEPS, np.nan), np.full(STEPS, np.nan))


def balanced(settings: PlannerSettings = SETTINGS) -> Serving:
    return FOUND.changed_by(plan_afresh(WINDOW, FIRST, TOPOLOGY, settings))


def judged(serving: Serving, settings: PlannerSettings = SETTINGS, times: StepTimes = NOTHING) -> Worth:
    found = counterfactual(WINDOW, FOUND, serving, (), settings, times)
    assert found is not None
    return found[0]


def plain_step_us(way: Serving, curve: CostCurve) -> list[list[float]]:
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


def us_of_steps(window: Window, way: Serving, curve: CostCurve) -> np.ndarray:
    return split_us(window.heat_TLE, way.placement, way.log2phy_RLE, None, "tables", curve)


@pytest.mark.parametrize("curve", [H200, CostCurve(3.0, 0.0, 0.0, 0.25)])
def test_times_are_those_of_the_definition(curve: CostCurve) -> None:
    for way in (FOUND, balanced()):
        np.testing.assert_allclose(us_of_steps(WINDOW, way, curve), plain_step_us(way, curve), rtol=1e-5)


def test_balancing_skewed_heat_helps_and_the_interval_says_so() -> None:
    found = judged(balanced(), replace(SETTINGS, cost_curve=H200))
    assert found.left_alone_ms == pytest.approx(np.sum(plain_step_us(FOUND, H200)) / STEPS / 1e3, rel=1e-4)
    assert found.gain_ms == pytest.approx(found.left_alone_ms - found.serving_ms)
    assert 0 < found.gain_low_ms < found.gain_ms < found.gain_high_ms
    assert found.price_kind == "stated"


def test_what_has_not_changed_has_won_exactly_nothing() -> None:
    found = judged(FOUND)
    assert (found.gain_ms, found.gain_low_ms, found.gain_high_ms) == (0, 0, 0)
    assert found.left_alone_ms == found.serving_ms


def test_the_best_known_is_never_slower_than_what_it_is_chosen_from() -> None:
    decided = plan(WINDOW, FIRST, FOUND.log2phy_RLE, TOPOLOGY, SETTINGS)
    changed = FOUND.changed_by(decided)
    found, _ = counterfactual(WINDOW, FOUND, FOUND, [changed], SETTINGS, NOTHING)
    assert found.best_ms < found.serving_ms
    after, _ = counterfactual(WINDOW, FOUND, changed, [balanced()], SETTINGS, NOTHING)
    assert after.best_ms <= after.serving_ms


def test_step_times_make_shares_and_rates_of_it() -> None:
    times = StepTimes(np.full(STEPS, 40_000.0), np.full(STEPS, 512.0))
    found = judged(balanced(), times=times)
    assert found.step_ms == 40
    assert found.gain_percent == pytest.approx(100 * found.gain_ms / (40 + found.gain_ms))
    assert found.tokens_per_second == pytest.approx(512 / 0.040)
    left_alone = 512 / (0.040 + found.gain_ms / 1e3)
    assert found.tokens_per_second_won == pytest.approx(512 / 0.040 - left_alone)
    unknown = judged(balanced())
    assert unknown.gain_percent is unknown.tokens_per_second is unknown.tokens_per_second_won is None


@pytest.mark.parametrize("seed", range(6))
def test_a_gain_at_a_fitted_price_has_the_true_one_in_its_interval(seed: int) -> None:
    curve, steps = CostCurve(0.0, 12.0, 4.0, 0.06), 128
    rng = np.random.default_rng(seed)
    liked_TLE = rng.dirichlet(np.full(EXPERTS, 0.8), LAYERS) * np.exp(
        rng.standard_normal((steps, LAYERS, EXPERTS))
    )
    batch_T = np.exp(rng.uniform(np.log(64), np.log(8192), steps))
    scaled_TLE = liked_TLE / liked_TLE.sum(axis=2, keepdims=True) * batch_T[:, None, None]
    window = Window(rng.poisson(scaled_TLE).astype(np.int32))
    serving = FOUND.changed_by(plan_afresh(window, FIRST, TOPOLOGY, SETTINGS))
    us_TL = us_of_steps(window, serving, curve)
    others_T = 700 + 0.05 * window.heat_TLE.sum(axis=(1, 2)) / RANKS
    measured_T = (us_TL.sum(axis=1) + others_T) * np.exp(0.003 * rng.standard_normal(steps))
    times = StepTimes(measured_T, np.full(steps, np.nan))
    (truth, given), (found, fitted) = (
        counterfactual(window, FOUND, serving, (), settings, times)
        for settings in (replace(SETTINGS, cost_curve=curve), SETTINGS)
    )
    assert found.price_kind == "fitted"
    assert fitted is not None
    assert given is None
    assert found.gain_low_ms <= truth.gain_ms <= found.gain_high_ms


def test_what_is_not_known_of_the_price_widens_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    order = np.random.default_rng(0).permutation(EXPERTS).astype(np.int32)
    other = Placement(order[FIRST.phy2log_LRS], EXPERTS)
    settings = replace(SETTINGS, cost_curve=H200)
    sure = judged(Serving(other, other.default_log2phy()), settings)
    unsure = replace(_time_price(settings, WINDOW, FOUND, NOTHING), least=0.5, most=2.0)
    monkeypatch.setattr("eplb_service.planner.counterfactual._time_price", lambda *_: unsure)
    found = judged(Serving(other, other.default_log2phy()), settings)
    assert found.gain_ms == sure.gain_ms
    assert found.gain_low_ms == min(0.5 * sure.gain_low_ms, 2 * sure.gain_low_ms)
    assert found.gain_high_ms == max(0.5 * sure.gain_high_ms, 2 * sure.gain_high_ms)


def test_steps_without_tokens_say_nothing() -> None:
    idle = Window(np.zeros_like(HEAT))
    assert counterfactual(idle, FOUND, FOUND, (), SETTINGS, NOTHING) is None
    once = np.zeros_like(HEAT)
    once[5] = HEAT[5]
    assert counterfactual(Window(once), FOUND, balanced(), (), SETTINGS, NOTHING) is None


def test_a_host_that_splits_every_step_is_judged_by_its_own_split() -> None:
    settings = replace(SETTINGS, split="step")
    even, tables = judged(balanced(), settings), judged(balanced())
    assert even.serving_ms == pytest.approx(tables.serving_ms), "both by layer_ms as they serve"
    slopes = [_time_price(one, WINDOW, balanced(), NOTHING).curve.slope_us for one in (settings, SETTINGS)]
    assert slopes[0] > slopes[1], "its hottest rank has fewer tokens"


def test_a_layers_time_is_its_part_of_what_serves_and_says_whose_figure_that_is() -> None:
    found = judged(balanced(), replace(SETTINGS, cost_curve=H200))
    moving = priced(NOTHING_MEASURED, found, LAYERS)
    assert moving.layer_ms == pytest.approx(found.serving_ms / LAYERS)
    assert moving.layer_source == "stated, as the price of time"
    assert priced(NOTHING_MEASURED, replace(found, serving_ms=0.0), LAYERS) is NOTHING_MEASURED
