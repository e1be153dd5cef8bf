"""A decision looks back as far as heat forecasts what came, and no farther."""

from __future__ import annotations

import numpy as np
import pytest

from eplb_service.planner.stationary import looked_back, stationary_steps


def drawn(steps: int, seed: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    popularity_LE = generator.dirichlet(np.ones(16), 3)
    return np.stack([generator.multinomial(8192, row_E, size=steps) for row_E in popularity_LE], axis=1)


def test_all_of_still_heat_is_used() -> None:
    assert stationary_steps(drawn(300, 0), 16) == 300


@pytest.mark.parametrize("since", [40, 60, 100])
def test_heat_from_before_a_jump_is_not_used(since: int) -> None:
    heat_TLE = np.concatenate([drawn(300, 0), drawn(since, 1)])
    assert since / 3 <= stationary_steps(heat_TLE, 16) <= since


def test_few_steps_are_all_used() -> None:
    assert stationary_steps(drawn(20, 0), 8) == 20
    assert stationary_steps(drawn(20, 0), 0) == 20


def test_layers_without_tokens_do_not_matter() -> None:
    heat_TLE = np.concatenate([drawn(100, 0), drawn(40, 1)])
    heat_TLE[:, 1] = 0
    assert stationary_steps(heat_TLE, 16) <= 40


@pytest.mark.parametrize("steps", [1, 40, 48])
def test_by_the_clock_all_is_looked_at_while_no_more_than_an_interval_is_remembered(steps: int) -> None:
    assert looked_back(np.concatenate([drawn(steps // 2, 0), drawn(steps - steps // 2, 1)]), 48) == steps


def test_by_the_clock_more_than_an_interval_is_looked_at_of_still_heat() -> None:
    assert all(looked_back(drawn(300, seed), 48) >= 96 for seed in range(5))
    assert looked_back(drawn(50, 0), 48) == 50


def test_by_the_clock_nothing_is_looked_at_from_before_a_change_at_the_last_decision() -> None:
    assert looked_back(np.concatenate([drawn(300, 0), drawn(48, 1)]), 48) <= 48


def test_an_interval_of_one_step_looks_at_all() -> None:
    assert looked_back(drawn(20, 0), 1) == 20
