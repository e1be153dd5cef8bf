"""A promise is the mean and the scatter of the window's steps, layers without tokens left out."""

from __future__ import annotations

import numpy as np

from eplb_service.planner.promise import channels_of, promise_of


def test_the_last_channel_is_the_mean_of_the_layers_that_had_tokens() -> None:
    par_TL = np.array([[1.0, 2.0], [np.nan, 3.0], [np.nan, np.nan]])
    np.testing.assert_array_equal(channels_of(par_TL)[:, 2], [1.5, 3.0, np.nan])


def test_a_promise_allows_for_what_was_fitted_to_its_own_steps() -> None:
    par_TL = 1.2 + 0.1 * np.random.default_rng(0).normal(size=(400, 2))
    made = promise_of(par_TL, np.array([0.0, 0.3]), held_out=True)
    np.testing.assert_allclose(made.mean_C, [1.2, 1.5, 1.35], atol=0.02)
    np.testing.assert_allclose(made.variance_C, [0.01, 0.01, 0.005], rtol=0.2)
    np.testing.assert_allclose(made.inflation_C, 1.0, atol=0.6)
    assert made.steps == 400


def test_steps_without_tokens_count_nowhere() -> None:
    par_TL = np.array([[1.0, np.nan], [np.nan, np.nan], [2.0, np.nan]])
    made = promise_of(par_TL, np.zeros(2), held_out=False)
    np.testing.assert_array_equal(made.mean_C, [1.5, np.nan, 1.5])
    np.testing.assert_array_equal(made.variance_C, [0.5, 0.0, 0.5])
