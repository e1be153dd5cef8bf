"""Generated heat is the same for a seed, another for another, and every step has all its tokens."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.solver.heats import KINDS, generate, source_mix


@pytest.mark.parametrize("kind", KINDS)
def test_heat_is_a_function_of_its_seed(kind: str) -> None:
    heat_TLE = generate(kind, layers=2, experts=32, steps=20, seed=3)
    np.testing.assert_array_equal(heat_TLE, generate(kind, layers=2, experts=32, steps=20, seed=3))
    assert (heat_TLE != generate(kind, layers=2, experts=32, steps=20, seed=4)).any()


@pytest.mark.parametrize("kind", KINDS)
def test_every_step_has_all_its_tokens_and_no_expert_is_chosen_by_more_than_there_are(kind: str) -> None:
    heat_TLE = generate(kind, layers=4, experts=16, steps=50, tokens=1000, choices=4)
    assert (heat_TLE.sum(axis=2) == 4000).all()
    # The share of an expert is bounded; what is drawn scatters around it.
    assert heat_TLE.max() < 1000 * 1.2


def test_phased_heat_alternates_and_static_heat_does_not() -> None:
    def change(kind: str) -> float:
        heat_TLE = generate(kind, layers=2, experts=64, steps=100).astype(float)
        first, second = heat_TLE[:50].sum(axis=0), heat_TLE[50:].sum(axis=0)
        return float(np.abs(first - second).sum() / (first + second).sum())

    assert change("phased") > 5 * change("static")


def test_a_source_mix_splits_all_of_an_experts_tokens() -> None:
    mix_RLE = source_mix(layers=2, experts=8, ranks=4, spread=0.5, seed=1)
    np.testing.assert_allclose(mix_RLE.sum(axis=0), 1.0)
    assert mix_RLE.std() > 0.05
    np.testing.assert_allclose(source_mix(layers=2, experts=8, ranks=4, spread=0.0), 0.25)
