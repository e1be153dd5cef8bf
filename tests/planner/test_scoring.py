"""Rank loads follow the actual tables; the noise floor is that of sampling."""

from __future__ import annotations

import numpy as np
import pytest

from eplb_service.placement import Placement
from eplb_service.planner.noise_floor import noise_floor
from eplb_service.planner.scoring import rank_loads


def slow_rank_loads(heat_NLE, placement, log2phy_RLE, source_RLE):
    episodes, layers, experts = heat_NLE.shape
    loads = np.zeros((episodes, layers, placement.ranks))
    for layer in range(layers):
        for expert in range(experts):
            total = source_RLE[:, layer, expert].sum()
            for source in range(placement.ranks):
                share = source_RLE[source, layer, expert] / total if total else 1 / placement.ranks
                rank = log2phy_RLE[source, layer, expert] // placement.slots
                loads[:, layer, rank] += share * heat_NLE[:, layer, expert]
    return loads


@pytest.mark.parametrize("seed", range(5))
def test_loads_are_those_of_the_slow_twin(seed: int) -> None:
    generator = np.random.default_rng(seed)
    placement = Placement.linear(3, 10, 4, 4)
    heat_NLE = generator.integers(0, 50, (6, 3, 10))
    source_RLE = generator.integers(0, 3, (4, 3, 10)).astype(float)
    log2phy_RLE = placement.default_log2phy()
    found = rank_loads(heat_NLE, placement, log2phy_RLE, source_RLE)
    np.testing.assert_allclose(found, slow_rank_loads(heat_NLE, placement, log2phy_RLE, source_RLE))


@pytest.mark.parametrize(("ranks", "tokens", "expected"), [(32, 32768, 1.065), (8, 256, 1.26), (1, 10, 1.0)])
def test_noise_floor_is_that_of_sampling(ranks: int, tokens: int, expected: float) -> None:
    heat_NLE = np.full((1, 1, 64), tokens / 64)
    assert noise_floor(heat_NLE.sum(axis=2), ranks)[0] == pytest.approx(expected, abs=0.005)


def test_there_is_no_noise_floor_without_tokens() -> None:
    np.testing.assert_array_equal(noise_floor(np.zeros((2, 1)), 8), [np.nan])
