"""Generated heat is the same for a seed, another for another, and every step has all its tokens."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.solver.heats import KINDS, generate


@pytest.mark.parametrize("kind", KINDS)
def test_heat_is_a_function_of_its_seed_and_every_step_has_all_its_tokens(kind: str) -> None:
    heat_TLE, same_TLE, other_TLE = (generate(kind, 4, 16, 50, seed, 1000, choices=4) for seed in (3, 3, 4))
    np.testing.assert_array_equal(heat_TLE, same_TLE)
    assert (heat_TLE != other_TLE).any()
    assert (heat_TLE.sum(axis=2) == 4000).all()
    # The share of an expert is bounded; what is drawn scatters around it.
    assert heat_TLE.max() < 1000 * 1.2
