"""Tests of the peak-to-average ratio: steps without tokens are skipped, and a layer without tokens has no ratio."""

from __future__ import annotations

import numpy as np
import pytest

from eplb_core.placement import mean_par, par, step_par


def slow_par(loads_NR: list[list[float]]) -> float | None:
    ratios = [max(loads_R) / (sum(loads_R) / len(loads_R)) for loads_R in loads_NR if sum(loads_R)]
    return sum(ratios) / len(ratios) if ratios else None


@pytest.mark.parametrize("seed", range(8))
def test_par_equals_its_slow_twin(seed: int) -> None:
    rng = np.random.default_rng(seed)
    loads_NLR = rng.integers(0, 9, (5, 4, 3)) * (rng.random((5, 4, 1)) < 0.4)
    expected = [slow_par(loads_NLR[:, layer].tolist()) for layer in range(4)]
    np.testing.assert_allclose(par(loads_NLR), np.array(expected, dtype=float))


def test_steps_without_tokens_are_skipped_and_an_idle_layer_has_no_ratio() -> None:
    loads_NLR = np.array([[[3.0, 1.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]]])
    np.testing.assert_array_equal(step_par(loads_NLR), [[1.5, np.nan], [np.nan, np.nan]])
    np.testing.assert_array_equal(par(loads_NLR), [1.5, np.nan])
    assert mean_par(par(loads_NLR)) == 1.5
    assert np.isnan(mean_par(np.full(3, np.nan)))
    assert np.isnan(par(np.zeros((0, 2, 4)))).all()


def test_weights_apply_only_to_rows_with_a_ratio() -> None:
    par_DL = np.array([[1.0, np.nan, np.nan], [4.0, 3.0, np.nan]])
    np.testing.assert_allclose(mean_par(par_DL, axis=0, weights=np.array([[2.0], [1.0]])), [2.0, 3.0, np.nan])
