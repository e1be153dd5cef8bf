"""The forecast that predicts the held-out half best is chosen, and standard errors account for autocorrelation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from eplb_core.planner.token_split import source_shares
from eplb_core.solver.model import episodes_of, with_covariance
from eplb_core.solver.window import (
    CLEARLY_BETTER,
    MAX_LAGS,
    MIN_STEPS_TO_TRIM,
    Forecast,
    _skewness,
    _trimmed_mean,
    choose_forecast,
    forecast_heat,
    halves_of,
    inflation,
    shares_of_groups,
    standard_error,
)
from tests.solver.layers_of import heat_of_kind, with_bursts_of
from tests.solver.slow import forecast as slow
from tests.solver.slow import heat

SETTINGS = settings(max_examples=60)
SEEDS = st.integers(0, 2**32 - 1)

HALF_LIVES = st.lists(st.sampled_from((math.inf, 16.0, 4.0, 1.0, 0.3)), min_size=1, max_size=4, unique=True)
RANKS = 4


def drifting(episodes: int, experts: int, seed: int) -> np.ndarray:
    """Return heat that drifts, jumps or is stationary, with some empty episodes."""
    generator = np.random.default_rng(seed)
    heat_NE = heat_of_kind("skewed", episodes, experts, generator)
    if seed % 3 == 0:
        heat_NE[episodes // 3 :] = heat_of_kind("skewed", episodes - episodes // 3, experts, generator)
    if seed % 3 == 1:
        heat_NE *= np.exp(np.cumsum(generator.normal(0, 0.5, heat_NE.shape), axis=0))
    heat_NE[generator.random(episodes) < 0.2] = 0
    return heat_NE


def as_floats(of_heat) -> tuple[np.ndarray, np.ndarray]:
    return of_heat.scaled_EN.astype(float), of_heat.share_N.astype(float)


@SETTINGS
@example(4, 4, 5804429, [1.0, math.inf])
@given(st.integers(4, 12), st.integers(1, 6), SEEDS, HALF_LIVES)
def test_the_half_life_with_the_smallest_error_is_chosen(
    episodes: int, experts: int, seed: int, half_lives: list[float]
) -> None:
    heat_NE = drifting(episodes, experts, seed)
    past = episodes_of(heat_NE, RANKS)
    older, newer = (with_covariance(*half) for half in halves_of(past))
    for half, half_NE in zip(
        (older, newer), (heat_NE[: episodes // 2], heat_NE[episodes // 2 :]), strict=True
    ):
        expected = heat.normalise(half_NE, np.ones(len(half_NE)), RANKS)
        for actual, desired in zip(as_floats(half), expected, strict=True):
            np.testing.assert_allclose(actual, desired, rtol=1e-6)
    result = choose_forecast(past, np.array(half_lives))
    errors = slow.squared_errors(*map(as_floats, (older, newer)), half_lives)
    if result.half_life == half_lives[0]:
        assert result.wander == 0
        silent = not newer.mean_E.any()
        assert silent or min(errors) >= 0.999 * CLEARLY_BETTER * errors[0] - 1e-9
        return
    chosen = half_lives.index(result.half_life)
    assert errors[chosen] <= 1.001 * min(errors) + 1e-9
    assert errors[chosen] <= 1.001 * CLEARLY_BETTER * errors[0] + 1e-9
    newer_E = newer.scaled_EN @ newer.share_N
    assert result.wander * (newer_E**2).sum() == pytest.approx(errors[chosen], rel=1e-3, abs=1e-6)


@SETTINGS
@given(
    st.integers(1, 8),
    st.integers(1, 5),
    SEEDS,
    st.sampled_from((math.inf, 4.0, 0.5)),
    st.sampled_from((0.5, 2.0)),
)
def test_weighted_heat_follows_its_newest_episodes(
    episodes: int, experts: int, seed: int, half_life: float, ahead: float
) -> None:
    past = episodes_of(drifting(episodes, experts, seed), RANKS)
    result = forecast_heat(past, Forecast(half_life, 0.3), ahead)
    scaled_EN, share_N = as_floats(past)
    np.testing.assert_array_equal(result.scaled_EN, past.scaled_EN)
    if math.isinf(half_life) or share_N.sum() == 0:
        np.testing.assert_array_equal(result.share_N, share_N)
        return
    mean_E = slow.faded_mean(scaled_EN, share_N, half_life)
    np.testing.assert_allclose(result.mean_E, mean_E, rtol=1e-5, atol=1e-6)
    assert result.share_N.sum() == pytest.approx(1.0, rel=1e-5)
    covariance_EE = with_covariance(*past).gram_EE + np.diag(ahead * 0.3 * mean_E**2)
    np.testing.assert_allclose(result.gram_EE, covariance_EE, rtol=1e-4, atol=1e-5)


def test_stationary_heat_has_equal_weights_and_a_jump_does_not() -> None:
    generator = np.random.default_rng(0)
    steady_NE = generator.multinomial(4000, generator.dirichlet(np.ones(12)), 16).astype(float)
    half_life_H = np.array([math.inf, 4.0, 1.0])
    assert choose_forecast(episodes_of(steady_NE, RANKS), half_life_H).half_life == math.inf
    jumping_NE = steady_NE.copy()
    jumping_NE[:6] = steady_NE[:6, ::-1]
    assert choose_forecast(episodes_of(jumping_NE, RANKS), half_life_H).half_life == 1.0


@SETTINGS
@given(st.integers(1, 40), st.integers(1, 6), SEEDS, st.booleans())
def test_the_trimmed_mean_uses_the_half_with_the_fewest_tokens(
    episodes: int, experts: int, seed: int, with_bursts: bool
) -> None:
    past = episodes_of((with_bursts_of if with_bursts else drifting)(episodes, experts, seed), RANKS)
    scaled_EN, share_N = as_floats(past)
    trimmed_E = slow.trimmed_mean(scaled_EN, share_N)
    np.testing.assert_allclose(_trimmed_mean(past.scaled_EN, past.share_N), trimmed_E, rtol=1e-4, atol=1e-6)
    result = forecast_heat(past, Forecast(math.inf, 0.0, trimmed=True), 2.0)
    trimmed_EN = slow.trimmed_heat(scaled_EN, share_N, RANKS)
    np.testing.assert_allclose(result.scaled_EN, trimmed_EN, rtol=1e-3, atol=1e-5)
    kept_N = share_N * trimmed_EN.any(axis=0)
    np.testing.assert_allclose(result.share_N, kept_N / max(kept_N.sum(), 1e-30), rtol=1e-5)


def test_bursts_are_trimmed_and_drift_is_not() -> None:
    half_life_H = np.array([math.inf, 16.0, 4.0])
    chosen = [
        choose_forecast(episodes_of(with_bursts_of(64, 64, seed), RANKS), half_life_H) for seed in range(8)
    ]
    assert sum(forecast.trimmed for forecast in chosen) >= 7
    for heat_NE in (np.full((64, 64), 5.0), drifting(64, 64, 1)):
        assert not choose_forecast(episodes_of(heat_NE, RANKS), half_life_H).trimmed


@settings(max_examples=30)
@given(st.integers(1, 40), st.integers(1, 6), SEEDS, st.booleans())
def test_skewness_is_averaged_over_the_experts(episodes: int, experts: int, seed: int, bursts: bool) -> None:
    past = episodes_of((with_bursts_of if bursts else drifting)(episodes, experts, seed), RANKS)
    scaled_EN, share_N = as_floats(past)
    skewness = []
    for row_N in scaled_EN[:, share_N > 0]:
        moments = [((row_N - row_N.mean()) ** power).mean() if row_N.size else 0.0 for power in (2, 3)]
        if moments[0] ** 0.5 > 1e-4 * (row_N.mean() if row_N.size else 0.0):
            skewness.append(moments[1] / moments[0] ** 1.5)
    assert _skewness(past.scaled_EN, past.share_N) == pytest.approx(
        np.mean(skewness) if skewness else 0.0, rel=1e-2, abs=1e-2
    )


def test_alternating_heat_is_not_trimmed() -> None:
    generator = np.random.default_rng(0)
    first_E, second_E = generator.dirichlet(np.ones(64), 2)
    # Trimming would keep only the first kind of heat, and the held-out half happens to be of this kind.
    kinds_NE = np.array([first_E] * 24 + [second_E] * 8 + [first_E] * 32)
    heat_NE = np.stack([generator.multinomial(20_000, row_E) for row_E in kinds_NE]).astype(float)
    assert not choose_forecast(episodes_of(heat_NE, RANKS), np.array([math.inf])).trimmed


def test_means_are_not_trimmed_if_there_are_few_episodes_or_trimming_is_disabled() -> None:
    half_life_H = np.array([math.inf])
    heat_NE = with_bursts_of(2 * MIN_STEPS_TO_TRIM, 64, 5)
    assert choose_forecast(episodes_of(heat_NE, RANKS), half_life_H).trimmed
    assert not choose_forecast(episodes_of(heat_NE, RANKS), half_life_H, trim=False).trimmed
    assert not choose_forecast(episodes_of(heat_NE[2:], RANKS), half_life_H).trimmed


def test_experts_that_mostly_have_no_tokens_keep_their_untrimmed_mean() -> None:
    past = episodes_of(np.eye(6)[:, :4] * 12, RANKS)
    np.testing.assert_allclose(_trimmed_mean(*past), past.scaled_EN @ past.share_N, rtol=1e-6)


def slow_inflation(values: list[float]) -> float:
    mean = sum(values) / len(values)
    centred = [value - mean for value in values]
    spread = sum(value * value for value in centred)
    if spread == 0:
        return 1.0
    lags = min(MAX_LAGS, len(values) // 4)
    total = spread
    for lag in range(1, lags + 1):
        products = [centred[n] * centred[n - lag] for n in range(lag, len(values))]
        total += 2.0 * (1.0 - lag / (lags + 1)) * sum(products)
    return max(1.0, total / spread)


@given(st.integers(1, 90), st.integers(0, 2**32 - 1))
def test_inflation_is_bartletts_sum_over_lags(count: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    values_NK = np.cumsum(generator.normal(size=(count, 3)), axis=0)
    values_NK[:, 2] = 1.5
    expected = [slow_inflation(values_NK[:, k].tolist()) for k in range(3)]
    np.testing.assert_allclose(inflation(values_NK), expected, rtol=1e-9)


def test_the_standard_error_matches_the_textbook_and_grows_with_autocorrelation() -> None:
    generator = np.random.default_rng(0)
    assert standard_error(generator.normal(size=4000)) == pytest.approx(1 / np.sqrt(4000), rel=0.15)
    repeated_N = np.repeat(generator.normal(size=500), 8)
    # Only 500 of the values are independent. The lag window covers most of the correlation.
    assert standard_error(repeated_N) == pytest.approx(1 / np.sqrt(500), rel=0.25)
    assert standard_error(repeated_N[:0]) == standard_error(repeated_N[:1]) == np.inf


def test_the_share_of_a_group_is_the_sum_over_its_ranks() -> None:
    generator = np.random.default_rng(0)
    source_RLE = generator.poisson(0.7, (6, 2, 9)).astype(float)
    group_R = generator.integers(0, 3, 6)
    expected_GE = np.zeros((3, 9))
    np.add.at(expected_GE, group_R, source_shares(source_RLE, 6, 2, 9)[:, 1])
    np.testing.assert_allclose(shares_of_groups(source_RLE, 1, group_R, 3), expected_GE)
