"""A departure that lasts is found within 16 steps, and still heat hardly ever raises an alarm."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eplb_service.planner.change_test import Alarm, ChangeTest
from eplb_service.planner.promise import Promise, no_promise, promise_of


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
    test, taken, alarm = ChangeTest.of(promise).after(par_TL)
    assert (alarm is None) == (expected is None)
    assert taken == (expected or steps)
    assert test.sum_C[0] == pytest.approx(plain.sum)
    assert test.mean_C[0] == pytest.approx(plain.mean)
    if alarm is not None:
        assert alarm == Alarm(0, plain.since)


def served(generator: np.random.Generator, steps: int, ranks: int, choices: int, layers: int) -> np.ndarray:
    """Ratios of ranks that are balanced in the mean, each with a share of its own, and tokens drawn."""
    shares_LR = 1.0 + 0.1 * generator.random((layers, ranks))
    shares_LR /= shares_LR.sum(axis=1, keepdims=True)
    loads = np.stack([generator.multinomial(choices, row_R, size=steps) for row_R in shares_LR], axis=1)
    return loads.max(axis=2) / (choices / ranks)


@pytest.mark.parametrize(("ranks", "choices"), [(8, 256), (32, 32_768)])
def test_still_heat_raises_fewer_alarms_than_one_in_ten_thousand_steps(ranks: int, choices: int) -> None:
    par_TL = served(np.random.default_rng(7), 24_000, ranks, choices, layers=12)
    alarms = 0
    for first in range(0, len(par_TL), 1000):
        test = ChangeTest.of(promise_of(par_TL[first : first + 64], np.zeros(12), held_out=True))
        left_TL = par_TL[first + 64 : first + 1000]
        while len(left_TL):
            test, taken, alarm = test.after(left_TL)
            left_TL = left_TL[taken:]
            alarms += alarm is not None
    assert alarms <= 2


@pytest.mark.parametrize(("ranks", "choices"), [(8, 256), (32, 32_768)])
def test_a_fifth_more_in_one_layer_is_found_within_16_steps(ranks: int, choices: int) -> None:
    found = []
    for seed in range(20):
        par_TL = served(np.random.default_rng(seed), 164, ranks, choices, layers=12)
        par_TL[100:, 5] *= 1.2
        test = ChangeTest.of(promise_of(par_TL[:64], np.zeros(12), held_out=True))
        test, taken, alarm = test.after(par_TL[64:])
        assert alarm is not None
        assert alarm.layer == 5
        found.append(64 + taken - 100)
        assert alarm.steps >= found[-1] - 4
    assert np.quantile(found, 0.9) <= 16
    assert min(found) > 0


def test_a_promise_a_little_too_good_is_no_change() -> None:
    par_TL = served(np.random.default_rng(0), 400, 8, 256, layers=12)
    promise = promise_of(par_TL[:16] - 0.04, np.zeros(12), held_out=True)
    _, _, alarm = ChangeTest.of(promise).after(par_TL[16:])
    assert alarm is None


def test_what_is_not_known_is_learned_before_anything_is_an_alarm() -> None:
    par_TL = served(np.random.default_rng(3), 300, 8, 256, layers=2)
    test, _, alarm = ChangeTest.of(no_promise(2)).after(par_TL[:200])
    assert alarm is None
    np.testing.assert_allclose(test.mean_C[:2], par_TL[:200].mean(axis=0), rtol=0.02)
    _, _, alarm = test.after(par_TL[200:] + 0.6)
    assert alarm is not None


def test_a_layer_without_tokens_says_nothing() -> None:
    par_TL = np.full((50, 2), 1.2) + 0.02 * np.random.default_rng(0).normal(size=(50, 2))
    par_TL[:, 1] = np.nan
    test = ChangeTest.of(promise_of(par_TL[:20], np.zeros(2), held_out=True))
    test, _, alarm = test.after(par_TL[20:])
    assert alarm is None
    assert np.isnan(test.mean_C[1])
    par_TL[:, 1] = 2.0
    test, _, alarm = test.after(par_TL[:1])
    assert test.mean_C[1] == 2.0


def test_what_was_known_of_neighbouring_steps_is_kept_for_a_while() -> None:
    promise = Promise(np.full(2, 1.2), np.full(2, 0.01), np.ones(2), 4)
    assert ChangeTest.of(promise, np.full(2, 5.0)).inflation_C.tolist() == [4.6, 4.6]
