"""A departure from a promise that lasts is found within 16 steps, and still heat hardly ever raises an alarm."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.decide.alarms import served
from eplb_core.planner.pace import Pace
from eplb_core.planner.plan import Promise, channels_of, promise_of


def test_the_last_channel_is_the_mean_of_the_layers_that_had_tokens() -> None:
    par_TL = np.array([[1.0, 2.0], [np.nan, 3.0], [np.nan, np.nan]])
    np.testing.assert_array_equal(channels_of(par_TL)[:, 2], [1.5, 3.0, np.nan])


def test_a_promise_allows_for_what_was_fitted_to_its_own_steps() -> None:
    par_TL = 1.2 + 0.1 * np.random.default_rng(0).normal(size=(400, 2))
    made = promise_of(par_TL + np.array([0.0, 0.3]), held_out=True)
    np.testing.assert_allclose(made.mean_C, [1.2, 1.5, 1.35], atol=0.02)
    np.testing.assert_allclose(made.variance_C, [0.01, 0.01, 0.005], rtol=0.2)
    np.testing.assert_allclose(made.inflation_C, 1.0, atol=0.6)
    assert made.steps == 400


def test_steps_without_tokens_count_nowhere() -> None:
    par_TL = np.array([[1.0, np.nan], [np.nan, np.nan], [2.0, np.nan]])
    made = promise_of(par_TL, held_out=False)
    np.testing.assert_array_equal(made.mean_C, [1.5, np.nan, 1.5])
    np.testing.assert_array_equal(made.variance_C, [0.5, 0.0, 0.5])


def paced(promise: Promise) -> Pace:
    """A pace that no decision is due for."""
    return Pace(first=0, memory=512, longest=512, due_at=1 << 40).serving(promise)


class PlainTest:
    """The test on one series, step by step, in plain arithmetic."""

    def __init__(self, mean: float, variance: float, inflation: float, weight: int) -> None:
        self.mean, self.variance, self.inflation, self.weight = mean, variance, inflation, weight
        self.sum, self.since = 0.0, 0

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
def test_each_layer_is_tested_as_by_plain_arithmetic(seed: int, rise: float, steps: int) -> None:
    generator = np.random.default_rng(seed)
    par_TL = 1.3 + 0.05 * generator.normal(size=(steps, 1))
    par_TL[steps // 2 :] += rise
    promise = Promise(np.full(2, 1.3), np.full(2, 0.0025), np.full(2, 1.2), 10)
    plain = PlainTest(1.3, 0.0025, 1.2, 10)
    expected = next((n + 1 for n, par in enumerate(par_TL[:, 0].tolist()) if plain.after(par)), None)
    pace, taken = paced(promise).after_steps(par_TL)
    assert pace.alarm == (None if expected is None else (0, plain.since))
    assert taken == (expected or steps)
    assert pace.sum_C[0] == pytest.approx(plain.sum)
    assert pace.expected.mean_C[0] == pytest.approx(plain.mean)


@pytest.mark.parametrize(("ranks", "choices"), [(8, 256), (32, 32_768)])
def test_still_heat_raises_fewer_alarms_than_one_in_ten_thousand_steps(ranks: int, choices: int) -> None:
    par_TL = served(np.random.default_rng(7), 24_000, ranks, choices)
    alarms = 0
    for first in range(0, len(par_TL), 1000):
        pace = paced(promise_of(par_TL[first : first + 64], held_out=True))
        alarms += pace.after_steps(par_TL[first + 64 : first + 1000])[0].alarm is not None
    assert alarms <= 2


@pytest.mark.parametrize(("ranks", "choices"), [(8, 256), (32, 32_768)])
def test_a_fifth_more_in_one_layer_is_found_within_16_steps(ranks: int, choices: int) -> None:
    found = []
    for seed in range(20):
        par_TL = served(np.random.default_rng(seed), 164, ranks, choices)
        par_TL[100:, 5] *= 1.2
        pace, taken = paced(promise_of(par_TL[:64], held_out=True)).after_steps(par_TL[64:])
        layer, lasted = pace.alarm
        assert layer == 5
        found.append(64 + taken - 100)
        assert lasted >= found[-1] - 4
    assert np.quantile(found, 0.9) <= 16
    assert min(found) > 0


def test_a_promise_a_little_too_good_is_no_change() -> None:
    par_TL = served(np.random.default_rng(0), 400, 8, 256)[:, :12]
    promise = promise_of(par_TL[:16] - 0.04, held_out=True)
    assert paced(promise).after_steps(par_TL[16:])[0].alarm is None


def test_what_is_not_known_is_learned_before_anything_is_an_alarm() -> None:
    par_TL = served(np.random.default_rng(3), 300, 8, 256)[:, :2]
    nothing = Promise(np.full(3, np.nan), np.zeros(3), np.ones(3), 0, held_out=False)
    pace, _ = paced(nothing).after_steps(par_TL[:200])
    assert pace.alarm is None
    np.testing.assert_allclose(pace.expected.mean_C[:2], par_TL[:200].mean(axis=0), rtol=0.02)
    assert pace.after_steps(par_TL[200:] + 0.6)[0].alarm is not None


def test_a_layer_without_tokens_says_nothing() -> None:
    par_TL = np.full((50, 2), 1.2) + 0.02 * np.random.default_rng(0).normal(size=(50, 2))
    par_TL[:, 1] = np.nan
    pace, _ = paced(promise_of(par_TL[:20], held_out=True)).after_steps(par_TL[20:])
    assert pace.alarm is None
    assert np.isnan(pace.expected.mean_C[1])
    par_TL[:, 1] = 2.0
    assert pace.after_steps(par_TL[:1])[0].expected.mean_C[1] == 2.0


def test_what_was_known_of_neighbouring_steps_is_kept_for_a_while() -> None:
    promise = Promise(np.full(2, 1.2), np.full(2, 0.01), np.ones(2), 4)
    pace = Pace(first=0, memory=512, longest=512, inflation_C=np.full(2, 5.0)).serving(promise)
    assert pace.inflation_C.tolist() == pace.expected.inflation_C.tolist() == [4.6, 4.6]


def test_a_kept_placement_is_tested_with_the_scatter_of_its_window() -> None:
    generator = np.random.default_rng(0)
    calm_TL = 1.5 + 0.03 * generator.normal(size=(256, 2))
    burst_TL = calm_TL.copy()
    for first in range(20, 256, 64):
        burst_TL[first : first + 8] += 0.3
    learned, _ = paced(promise_of(calm_TL, held_out=True)).after_steps(calm_TL[:64])
    assert learned.after_steps(burst_TL[:64])[0].alarm is not None
    kept = learned.keeping(promise_of(burst_TL, held_out=True))
    assert kept.after_steps(burst_TL[:64])[0].alarm is None
    assert learned.expected is not None
    assert kept.expected is not None
    np.testing.assert_array_equal(kept.expected.mean_C, learned.expected.mean_C)
    # A calmer window does not reduce the variance below the learned one.
    again = kept.keeping(promise_of(calm_TL, held_out=True))
    assert again.expected is not None
    np.testing.assert_array_equal(again.expected.variance_C, kept.expected.variance_C)
