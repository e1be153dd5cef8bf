"""The error of a mean is that of independent values where they are, and wider where neighbours resemble each other."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eplb_service.solver.significance import MOST_LAGS, inflation, standard_error


def plain_inflation(values: list[float]) -> float:
    mean = sum(values) / len(values)
    centred = [value - mean for value in values]
    spread = sum(value * value for value in centred)
    if spread == 0:
        return 1.0
    lags, total = min(MOST_LAGS, len(values) // 4), spread
    for lag in range(1, lags + 1):
        products = [centred[n] * centred[n - lag] for n in range(lag, len(values))]
        total += 2.0 * (1.0 - lag / (lags + 1)) * sum(products)
    return max(1.0, total / spread)


@given(st.integers(1, 90), st.integers(0, 2**32 - 1))
def test_inflation_is_bartletts_sum_over_lags(count: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    values_NK = np.cumsum(generator.normal(size=(count, 3)), axis=0)
    values_NK[:, 2] = 1.5
    expected = [plain_inflation(values_NK[:, k].tolist()) for k in range(3)]
    np.testing.assert_allclose(inflation(values_NK), expected, rtol=1e-9)


def test_error_of_independent_values_is_the_textbooks() -> None:
    values_N = np.random.default_rng(0).normal(size=4000)
    assert standard_error(values_N) == pytest.approx(1 / np.sqrt(4000), rel=0.15)


def test_error_of_values_that_last_is_wider() -> None:
    generator = np.random.default_rng(0)
    lasting_N = np.repeat(generator.normal(size=500), 8)
    # 500 independent values, whatever the number of their repetitions; the lag window sees most of it.
    assert standard_error(lasting_N) == pytest.approx(1 / np.sqrt(500), rel=0.25)


@pytest.mark.parametrize("values", [[], [1.0]])
def test_too_few_values_have_no_error(values: list[float]) -> None:
    assert standard_error(np.array(values)) == np.inf
