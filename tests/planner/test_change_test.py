"""The change test detects a lasting departure from the promise within 16 steps, with few false alarms."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.decide.alarms import served
from eplb_core.planner.pace import Pace
from eplb_core.planner.plan import Promise, append_mean, promise_of_steps


def test_the_last_channel_is_the_mean_over_layers_with_tokens() -> None:
    par_TL = np.array([[1.0, 2.0], [np.nan, 3.0], [np.nan, np.nan]])
    np.testing.assert_array_equal(append_mean(par_TL)[:, 2], [1.5, 3.0, np.nan])


def test_a_promise_has_the_mean_and_variance_of_its_steps() -> None:
    par_TL = 1.2 + 0.1 * np.random.default_rng(0).normal(size=(400, 2))
    promise = promise_of_steps(par_TL + np.array([0.0, 0.3]), held_out=True)
    np.testing.assert_allclose(promise.mean_C, [1.2, 1.5, 1.35], atol=0.02)
    np.testing.assert_allclose(promise.variance_C, [0.01, 0.01, 0.005], rtol=0.2)
    np.testing.assert_allclose(promise.inflation_C, 1.0, atol=0.6)
    assert promise.steps == 400


def test_a_promise_ignores_steps_without_tokens() -> None:
    par_TL = np.array([[1.0, np.nan], [np.nan, np.nan], [2.0, np.nan]])
    promise = promise_of_steps(par_TL, held_out=False)
    np.testing.assert_array_equal(promise.mean_C, [1.5, np.nan, 1.5])
    np.testing.assert_array_equal(promise.variance_C, [0.5, 0.0, 0.5])


def paced(promise: Promise) -> Pace:
    """Return a pace with no decision due."""
    return Pace(first=0, memory=512, longest=512, due_at=1 << 40).serving(promise)


class SlowChangeTest:
    """Slow twin of the change test for one series."""

    def __init__(self, mean: float, variance: float, inflation: float, weight: int) -> None:
        self.mean = mean
        self.variance = variance
        self.inflation = inflation
        self.weight = weight
        self.sum = 0.0
        self.since = 0

    def after(self, par: float) -> bool:
        least = (0.01 * self.mean) ** 2
        deviation = math.sqrt(max(self.variance, least) * self.inflation * (1 + 1 / self.weight))
        excess = par - self.mean
        self.sum = max(0.0, self.sum + excess / deviation - 1.0)
        self.since = self.since + 1 if self.sum > 0 else 0
        taught = min(max(excess, -3 * deviation), 3 * deviation)
        self.weight += 1
        if self.sum <= 3.0:
            self.mean += taught / self.weight
            self.variance += (taught**2 * (1 - 1 / self.weight) - self.variance) / self.weight
        return self.sum > 11.0


@given(st.integers(0, 2**32 - 1), st.floats(0.0, 0.5), st.integers(1, 40))
def test_each_layers_test_matches_the_slow_twin(seed: int, rise: float, steps: int) -> None:
    generator = np.random.default_rng(seed)
    par_TL = 1.3 + 0.05 * generator.normal(size=(steps, 1))
    par_TL[steps // 2 :] += rise
    promise = Promise(np.full(2, 1.3), np.full(2, 0.0025), np.full(2, 1.2), 10)
    twin = SlowChangeTest(1.3, 0.0025, 1.2, 10)
    expected = next((n + 1 for n, par in enumerate(par_TL[:, 0].tolist()) if twin.after(par)), None)
    pace, step_count = paced(promise).after_steps(par_TL)
    assert pace.alarm == (None if expected is None else (0, twin.since))
    assert step_count == (expected or steps)
    assert pace.sum_C[0] == pytest.approx(twin.sum)
    assert pace.expected.mean_C[0] == pytest.approx(twin.mean)


@pytest.mark.parametrize(("ranks", "choices"), [(8, 256), (32, 32_768)])
def test_stationary_heat_raises_at_most_one_alarm_in_ten_thousand_steps(ranks: int, choices: int) -> None:
    par_TL = served(np.random.default_rng(7), 24_000, ranks, choices)
    alarms = 0
    for first in range(0, len(par_TL), 1000):
        pace = paced(promise_of_steps(par_TL[first : first + 64], held_out=True))
        alarms += pace.after_steps(par_TL[first + 64 : first + 1000])[0].alarm is not None
    assert alarms <= 2


@pytest.mark.parametrize(("ranks", "choices"), [(8, 256), (32, 32_768)])
def test_a_rise_of_one_fifth_in_one_layer_raises_an_alarm_within_16_steps(ranks: int, choices: int) -> None:
    delays = []
    for seed in range(20):
        par_TL = served(np.random.default_rng(seed), 164, ranks, choices)
        par_TL[100:, 5] *= 1.2
        pace, step_count = paced(promise_of_steps(par_TL[:64], held_out=True)).after_steps(par_TL[64:])
        layer, duration = pace.alarm
        assert layer == 5
        delays.append(64 + step_count - 100)
        assert duration >= delays[-1] - 4
    assert np.quantile(delays, 0.9) <= 16
    assert min(delays) > 0


def test_a_slightly_optimistic_promise_raises_no_alarm() -> None:
    par_TL = served(np.random.default_rng(0), 400, 8, 256)[:, :12]
    promise = promise_of_steps(par_TL[:16] - 0.04, held_out=True)
    assert paced(promise).after_steps(par_TL[16:])[0].alarm is None


def test_a_promise_without_values_is_learned_before_any_alarm() -> None:
    par_TL = served(np.random.default_rng(3), 300, 8, 256)[:, :2]
    empty = Promise(np.full(3, np.nan), np.zeros(3), np.ones(3), 0, held_out=False)
    pace, _ = paced(empty).after_steps(par_TL[:200])
    assert pace.alarm is None
    np.testing.assert_allclose(pace.expected.mean_C[:2], par_TL[:200].mean(axis=0), rtol=0.02)
    assert pace.after_steps(par_TL[200:] + 0.6)[0].alarm is not None


def test_a_layer_without_tokens_raises_no_alarm() -> None:
    par_TL = np.full((50, 2), 1.2) + 0.02 * np.random.default_rng(0).normal(size=(50, 2))
    par_TL[:, 1] = np.nan
    pace, _ = paced(promise_of_steps(par_TL[:20], held_out=True)).after_steps(par_TL[20:])
    assert pace.alarm is None
    assert np.isnan(pace.expected.mean_C[1])
    par_TL[:, 1] = 2.0
    assert pace.after_steps(par_TL[:1])[0].expected.mean_C[1] == 2.0


def test_the_learned_inflation_decays_gradually_over_promises() -> None:
    promise = Promise(np.full(2, 1.2), np.full(2, 0.01), np.ones(2), 4)
    pace = Pace(first=0, memory=512, longest=512, inflation_C=np.full(2, 5.0)).serving(promise)
    assert pace.inflation_C.tolist() == pace.expected.inflation_C.tolist() == [4.6, 4.6]


def test_a_kept_placement_is_tested_with_the_variance_of_its_window() -> None:
    generator = np.random.default_rng(0)
    calm_TL = 1.5 + 0.03 * generator.normal(size=(256, 2))
    burst_TL = calm_TL.copy()
    for first in range(20, 256, 64):
        burst_TL[first : first + 8] += 0.3
    learned, _ = paced(promise_of_steps(calm_TL, held_out=True)).after_steps(calm_TL[:64])
    assert learned.after_steps(burst_TL[:64])[0].alarm is not None
    kept = learned.keeping(promise_of_steps(burst_TL, held_out=True))
    assert kept.after_steps(burst_TL[:64])[0].alarm is None
    assert learned.expected is not None
    assert kept.expected is not None
    np.testing.assert_array_equal(kept.expected.mean_C, learned.expected.mean_C)
    # A window with less scatter does not reduce the learned variance.
    again = kept.keeping(promise_of_steps(calm_TL, held_out=True))
    assert again.expected is not None
    np.testing.assert_array_equal(again.expected.variance_C, kept.expected.variance_C)
