"""Switches show a gain in time if the step time depends on balance, and no gain otherwise."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from eplb_core.cost.moving import SwitchedPlan, SwitchEffect
from eplb_core.heat.sources import ServedSteps
from eplb_core.planner.measured_gain import MeasuredPrice, effect_of, measured_price

STEPS_PER_PLAN = 96
"""Number of steps from one plan to the next. The transfer takes the last ten."""
US_PER_TOKEN = 2.0

Times = Callable[[np.random.Generator, np.ndarray, np.ndarray], np.ndarray]
"""Function that returns step times, given the steps' tokens and the slowest ranks' tokens, both ``[T]``."""


def by_balance(rng: np.random.Generator, tokens_T: np.ndarray, slowest_T: np.ndarray) -> np.ndarray:
    return 5000 + 0.3 * tokens_T + US_PER_TOKEN * slowest_T


def by_tokens(rng: np.random.Generator, tokens_T: np.ndarray, slowest_T: np.ndarray) -> np.ndarray:
    return 500 + 2.0 * tokens_T


def by_nothing(rng: np.random.Generator, tokens_T: np.ndarray, slowest_T: np.ndarray) -> np.ndarray:
    return np.full(len(tokens_T), 20_000.0)


def by_chance(rng: np.random.Generator, tokens_T: np.ndarray, slowest_T: np.ndarray) -> np.ndarray:
    return rng.lognormal(np.log(20_000), 0.2, len(tokens_T))


def by_a_trend(rng: np.random.Generator, tokens_T: np.ndarray, slowest_T: np.ndarray) -> np.ndarray:
    return np.linspace(30_000, 10_000, len(tokens_T)) * rng.lognormal(0, 0.01, len(tokens_T))


def by_waves(rng: np.random.Generator, tokens_T: np.ndarray, slowest_T: np.ndarray) -> np.ndarray:
    period = rng.uniform(40, 400)
    phase = rng.uniform(0, 6.28)
    noise_T = rng.lognormal(0, 0.03, len(tokens_T))
    return 20_000 * (1 + 0.3 * np.sin(np.arange(len(tokens_T)) / period * 6.28 + phase)) * noise_T


def by_load(rng: np.random.Generator, tokens_T: np.ndarray, slowest_T: np.ndarray) -> np.ndarray:
    """Return step times that jump because the host does other work as well."""
    shifts = np.repeat(rng.choice([1.0, 1.3, 1.6], len(tokens_T) // 50 + 1), 50)[: len(tokens_T)]
    return 15_000 * shifts * rng.lognormal(0, 0.05, len(tokens_T))


def priced(seed: int, times: Times, switches: int = 8, *, noise: float = 0.0) -> MeasuredPrice | None:
    """Measure the price on heat that drifts out of balance between switches, each of which restores balance."""
    rng = np.random.default_rng(seed)
    steps = STEPS_PER_PLAN * (switches + 1)
    tokens_T = rng.integers(3000, 5000, steps).astype(np.float64)
    phase_T = np.arange(steps) % STEPS_PER_PLAN / STEPS_PER_PLAN
    par_T = 1.1 + rng.uniform(0.1, 0.7, switches + 1)[np.arange(steps) // STEPS_PER_PLAN] * phase_T
    par_T[:STEPS_PER_PLAN] += 0.8
    slowest_T = tokens_T / 4 * par_T * rng.lognormal(0, 0.02, steps)
    us_T = times(rng, tokens_T, slowest_T) * rng.lognormal(0, noise, steps)
    served = ServedSteps(np.arange(steps, dtype=np.float64), us_T, tokens_T, slowest_T)
    plans = [
        SwitchedPlan(STEPS_PER_PLAN * at - 10.0, float(STEPS_PER_PLAN * at), ())
        for at in range(1, switches + 1)
    ]
    effects = [effect_of(plan, plans, served) for plan in plans]
    return measured_price([effect for effect in effects if effect is not None])


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("noise", [0.0, 0.01, 0.05])
def test_the_interval_contains_the_token_price_if_time_follows_balance(seed: int, noise: float) -> None:
    price = priced(seed, by_balance, noise=noise)
    assert price is not None
    assert price.low - 1e-6 <= US_PER_TOKEN <= price.high + 1e-6
    assert price.low > 0


@pytest.mark.parametrize("times", [by_tokens, by_nothing, by_chance, by_a_trend, by_waves, by_load])
def test_the_interval_contains_zero_if_time_does_not_follow_balance(times: Times) -> None:
    misses = 0
    for seed in range(40):
        for switches in (4, 8, 14):
            price = priced(seed, times, switches)
            assert price is not None
            # Rounding may leave an error of about a billionth of a microsecond.
            misses += price.low > 1e-6
    assert misses <= 2, f"{misses} of 120"


def test_too_few_switches_yield_no_price() -> None:
    assert priced(0, by_balance, switches=3) is None
    assert measured_price([SwitchEffect(0.0, 0.0, 64)] * 8) is None


def test_one_large_switch_does_not_count_as_several_switches() -> None:
    small = [SwitchEffect(us, 10.0, 64) for us in (-300.0, 250.0, -100.0, 200.0)]
    price = measured_price([SwitchEffect(2000.0, 1000.0, 64), *small])
    assert price is not None
    assert price.low < 0 < price.high


def test_scatter_between_switches_widens_the_interval() -> None:
    similar, scattered = (
        measured_price([SwitchEffect(100.0 + spread * sign, 50.0, 64) for sign in (-1, 1, -1, 1, -1, 1)])
        for spread in (2.0, 60.0)
    )
    assert similar is not None
    assert scattered is not None
    assert similar.us_per_token == scattered.us_per_token == pytest.approx(2.0)
    assert similar.low > 0 > scattered.low


def test_steps_of_different_sizes_or_plans_are_not_compared() -> None:
    step_T = np.arange(80, dtype=np.float64)
    tokens_T = np.where(step_T < 40, 1000.0, 4000.0)
    served = ServedSteps(step_T, np.full(80, 9000.0), tokens_T, tokens_T)
    plan = SwitchedPlan(38.0, 42.0, ())
    assert effect_of(plan, [plan], served) is None
    even = ServedSteps(step_T, np.full(80, 9000.0), np.full(80, 1000.0), np.full(80, 500.0))
    assert effect_of(plan, [plan], even) == SwitchEffect(
        pytest.approx(0.0, abs=1e-6), pytest.approx(0.0, abs=1e-6), 38
    )
    crowded = [SwitchedPlan(20.0, 33.0, ()), plan, SwitchedPlan(60.0, 70.0, (), decided_from=49.0)]
    assert effect_of(plan, crowded, even) is None
