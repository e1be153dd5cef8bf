"""Kernels draw from the published generator, every number below the bound about as often."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_service.solver.chance import draw
from tests.solver.slow.chance import Chance, splitmix

SETTINGS = settings(max_examples=100)
BOUNDS = st.one_of(st.integers(1, 100), st.integers(1, 2**32 - 1))


@SETTINGS
@given(st.integers(0, 2**64 - 1), st.lists(BOUNDS, min_size=1, max_size=5))
def test_chance_is_the_published_generator(seed: int, bounds: list[int]) -> None:
    state_1, chance = np.array([seed], dtype=np.uint64), Chance(seed)
    for below in bounds:
        found = draw(state_1, below)
        assert 0 <= found < below
        assert found == chance.draw(below)
        assert int(state_1[0]) == chance.state


def test_chance_gives_the_known_first_number() -> None:
    assert splitmix(0)[1] == 0xE220A8397B1DCDAF
    assert draw(np.zeros(1, dtype=np.uint64), 2**32 - 1) == 0xE220A839 - 1
    assert draw(np.zeros(1, dtype=np.uint64), 100) == 0xE2 * 100 // 256


def test_every_number_comes_about_as_often() -> None:
    state_1 = np.array([7], dtype=np.uint64)
    often = np.bincount([draw(state_1, 7) for _ in range(14_000)], minlength=7)
    assert len(often) == 7
    np.testing.assert_allclose(often, 2_000, rtol=0.1)
