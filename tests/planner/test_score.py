"""Rank loads follow the tables, the noise floor matches sampling, and the confidence interval contains the gain."""

from __future__ import annotations

import math

import numpy as np
import pytest

from eplb_core.placement import Placement
from eplb_core.planner.forecast import NO_FORECASTS
from eplb_core.planner.score import gain_of, noise_floor
from tests.planner.drawn import rank_loads


def slow_rank_loads(heat_NLE, placement, log2phy_RLE, source_RLE):
    episodes, layers, experts = heat_NLE.shape
    loads = np.zeros((episodes, layers, placement.ranks))
    for layer in range(layers):
        for expert in range(experts):
            total = source_RLE[:, layer, expert].sum()
            for source in range(placement.ranks):
                share = source_RLE[source, layer, expert] / total if total else 1 / placement.ranks
                rank = log2phy_RLE[source, layer, expert] // placement.slots
                loads[:, layer, rank] += share * heat_NLE[:, layer, expert]
    return loads


@pytest.mark.parametrize("seed", range(5))
def test_loads_match_the_slow_twin(seed: int) -> None:
    generator = np.random.default_rng(seed)
    placement = Placement.linear(3, 10, 4, 4)
    heat_NLE = generator.integers(0, 50, (6, 3, 10))
    source_RLE = generator.integers(0, 3, (4, 3, 10)).astype(float)
    log2phy_RLE = placement.default_log2phy()
    load_NLR = rank_loads(heat_NLE, placement, log2phy_RLE, source_RLE)
    np.testing.assert_allclose(load_NLR, slow_rank_loads(heat_NLE, placement, log2phy_RLE, source_RLE))


@pytest.mark.parametrize(
    ("ranks", "tokens", "expected"), [(32, 32768, 1.065), (8, 256, 1.26), (1, 10, 1.0), (8, 0, np.nan)]
)
def test_the_noise_floor_matches_sampling(ranks: int, tokens: int, expected: float) -> None:
    heat_NLE = np.full((1, 1, 64), tokens / 64)
    assert noise_floor(heat_NLE.sum(axis=2), ranks)[0] == pytest.approx(expected, abs=0.005, nan_ok=True)


def test_the_interval_contains_the_gain() -> None:
    generator = np.random.default_rng(0)
    before_TL = 1.5 + 0.1 * generator.normal(size=(500, 4))
    inside = 0
    for seed in range(40):
        after_TL = before_TL - 0.05 + 0.1 * np.random.default_rng(seed).normal(size=(500, 4))
        gain = gain_of(before_TL, after_TL)
        assert gain.low < gain.mean < gain.high
        inside += gain.low <= 0.05 <= gain.high
        assert gain.paid
    assert inside >= 34


@pytest.mark.parametrize(("ahead", "alike"), [(256, 0.0), (64, 0.0), (256, 0.4), (32, 0.98)])
def test_the_interval_contains_the_gain_of_the_following_steps(ahead: int, alike: float) -> None:
    steps = 256
    inside = 0
    inside_own = 0
    draws = 200
    for seed in range(draws):
        jumps_T = np.random.default_rng(seed).normal(size=steps + ahead)
        gain_T = np.empty_like(jumps_T)
        gain_T[0] = jumps_T[0]
        for step in range(1, len(gain_T)):
            gain_T[step] = alike * gain_T[step - 1] + math.sqrt(1 - alike**2) * jumps_T[step]
        after_TL = 1.5 - 0.05 - 0.1 * gain_T[:steps, None]
        before_TL = np.full((steps, 1), 1.5)
        comes = 0.05 + 0.1 * gain_T[steps:].mean()
        forecast = gain_of(before_TL, after_TL, ahead)
        gain = gain_of(before_TL, after_TL)
        assert (forecast.mean, forecast.error) == (gain.mean, gain.error)
        inside += forecast.low <= comes <= forecast.high
        inside_own += gain.low <= comes <= gain.high
    assert 0.9 * draws <= inside <= 0.99 * draws
    assert inside_own < 0.9 * draws


def test_the_interval_widens_with_the_errors_of_past_forecasts() -> None:
    generator = np.random.default_rng(0)
    before_TL = np.full((64, 1), 1.5)
    forecasts = NO_FORECASTS
    held = []
    for number in range(200):
        # The mean gain differs between windows, so one window does not predict the next.
        gain_TL = 0.3 + 0.1 * generator.normal() + 0.01 * generator.normal(size=(64, 1))
        realised = gain_of(before_TL, before_TL - gain_TL) if forecasts.since(64 * number) else None
        forecasts = forecasts.next(before_TL, before_TL - gain_TL, 64, 64 * number, realised)
        held.append(forecasts.held)
    assert (held[0], len(forecasts.misses)) == (None, 20)
    assert 0.9 <= np.mean(held[1:]) <= 0.98
    assert forecasts.gain.high - forecasts.gain.mean == max(forecasts.misses)


def test_a_gain_of_zero_does_not_pay_off() -> None:
    par_TL = 1.5 + 0.1 * np.random.default_rng(0).normal(size=(100, 2))
    assert gain_of(par_TL, par_TL).paid is False
    assert gain_of(par_TL, par_TL + 0.1).paid is False


def test_steps_and_layers_without_tokens_are_ignored() -> None:
    before_TL = np.array([[1.5, np.nan], [np.nan, np.nan], [1.7, 2.0]])
    after_TL = np.array([[1.2, 1.0], [1.0, 1.0], [1.2, 1.7]])
    assert gain_of(before_TL, after_TL).mean == pytest.approx((0.3 + 0.4) / 2)
    empty = gain_of(before_TL[1:2], after_TL[1:2])
    assert math.isnan(empty.mean)
    assert (empty.known, empty.paid) == (False, None)
