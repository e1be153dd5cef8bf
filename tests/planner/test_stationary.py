"""A decision looks back only over steps that predict later heat."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.solver.heats import generate
from eplb_core.planner.heat_changes import has_changed, stationary_steps
from tests.planner.drawn import still_heat


def drawn(steps: int, seed: int, tokens: int = 8192) -> np.ndarray:
    return still_heat(steps, 3, 16, tokens, seed)


@pytest.mark.parametrize("since", [40, 60, 100])
def test_heat_from_before_a_jump_is_not_used(since: int) -> None:
    heat_TLE = np.concatenate([drawn(300, 0), drawn(since, 1)])
    assert since / 3 <= stationary_steps(heat_TLE, 16) <= since


def slow_stationary_steps(heat_TLE: np.ndarray, ahead: int) -> int:
    """Slow twin that evaluates each look-back from its own mean."""
    part_TLE = heat_TLE / np.maximum(heat_TLE.sum(axis=2, keepdims=True), 1.0)
    before = len(part_TLE) - ahead
    lengths = [length for length in (16, 32, 64, 128, 256) if length < before] + [before]
    regret_K = np.zeros(len(lengths))
    for number in range(min(4, max(before // (2 * ahead), 1))):
        known_TLE, came_TLE = np.split(part_TLE[: len(part_TLE) - number * ahead], [-ahead])
        came_LE = came_TLE.mean(axis=0)
        missed_KL = [((known_TLE[-steps:].mean(axis=0) - came_LE) ** 2).sum(axis=1) for steps in lengths]
        error_K = (np.array(missed_KL) / np.maximum((came_LE**2).sum(axis=1), 1e-30)).mean(axis=1)
        regret_K += error_K / error_K.min()
    return max(np.array(lengths)[regret_K <= 1.1 * regret_K.min()]) + ahead


@pytest.mark.parametrize("seed", range(8))
def test_the_look_back_matches_the_slow_twin(seed: int) -> None:
    generator = np.random.default_rng(seed)
    heat_TLE = np.concatenate([drawn(int(steps), seed + 10) for steps in generator.integers(20, 200, 3)])
    ahead = int(generator.integers(4, 40))
    assert stationary_steps(heat_TLE, ahead) == slow_stationary_steps(heat_TLE, ahead)


@pytest.mark.parametrize(("since", "tokens"), [(4, 8192), (9, 8192), (16, 8192), (16, 64)])
def test_a_jump_in_heat_counts_as_a_change_and_stationary_heat_does_not(since: int, tokens: int) -> None:
    assert has_changed(np.concatenate([drawn(100, 0, tokens), drawn(since, 1, tokens)]), since)
    assert not has_changed(drawn(100 + since, 0, tokens), since)


@pytest.mark.parametrize(("kind", "since"), [("bursty", 10), ("bursty", 16), ("drift", 10)])
def test_bursts_and_drift_are_rarely_detected_as_changes(kind: str, since: int) -> None:
    heat_TLE = generate(kind, 4, 256, 1024, 0)
    ends = range(256, 1024, 16)
    assert sum(has_changed(heat_TLE[:end], since) for end in ends) <= len(ends) // 10


def test_heat_without_earlier_steps_counts_as_changed() -> None:
    assert has_changed(drawn(8, 0), 8)
    assert has_changed(drawn(8, 0), 1)


@pytest.mark.parametrize(("steps", "ahead"), [(20, 0), (20, 8), (300, 16)])
def test_all_steps_of_short_or_stationary_heat_are_used(steps: int, ahead: int) -> None:
    assert stationary_steps(drawn(steps, 0), ahead) == steps


def test_layers_without_tokens_do_not_affect_the_look_back() -> None:
    heat_TLE = np.concatenate([drawn(100, 0), drawn(40, 1)])
    heat_TLE[:, 1] = 0
    assert stationary_steps(heat_TLE, 16) <= 40
