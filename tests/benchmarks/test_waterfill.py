"""Waterfill in the benchmark sends each token's shared expert to one rank that has room, and only where it may."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.split.quality import FOR_EVEN, FOR_STEPS
from benchmarks.split.waterfill import (
    AT_HOME,
    BY_ALL_COUNTS,
    BY_OWN_COUNTS,
    FEWEST_TOKENS,
    WAYS,
    Drawn,
    drawn_slots,
    shared_and_routed,
    work_of_ranks,
)

RANKS = 4


@pytest.fixture
def generator() -> np.random.Generator:
    return np.random.default_rng(0)


def skewed(tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Two choices of each token: one at rank 0, one at another; as many tokens from each rank."""
    return np.stack([np.zeros(tokens, int), 1 + np.arange(tokens) % 3], axis=1), np.arange(tokens) % RANKS


@pytest.mark.parametrize("way", WAYS)
def test_every_token_is_shared_once(way: str, generator: np.random.Generator) -> None:
    rank_TK, source_T = skewed(4 * FEWEST_TOKENS)
    work_R = work_of_ranks(rank_TK, source_T, RANKS, way, generator)
    assert work_R.sum() == rank_TK.size + len(source_T)


@pytest.mark.parametrize("way", [BY_OWN_COUNTS, BY_ALL_COUNTS])
def test_no_shared_expert_is_computed_where_there_is_no_room(
    way: str, generator: np.random.Generator
) -> None:
    rank_TK, source_T = skewed(4 * FEWEST_TOKENS)
    routed_R = np.bincount(rank_TK.ravel(), minlength=RANKS)
    work_R = work_of_ranks(rank_TK, source_T, RANKS, way, generator)
    assert work_R[0] == routed_R[0]
    assert (work_R[1:] > routed_R[1:]).all()


def test_a_token_goes_nowhere_that_it_would_not_go_anyway(generator: np.random.Generator) -> None:
    # Rank 3 has all the room, but no token goes there; those of rank 0 have ranks 0 and 1 to choose from.
    tokens = 2 * FEWEST_TOKENS
    rank_TK = np.tile([0, 1], (tokens, 1))
    work_R = work_of_ranks(rank_TK, np.zeros(tokens, int), RANKS, BY_ALL_COUNTS, generator)
    assert work_R[2:].tolist() == [0, 0]


@pytest.mark.parametrize("way", [BY_OWN_COUNTS, BY_ALL_COUNTS])
def test_few_tokens_stay_at_home(way: str, generator: np.random.Generator) -> None:
    rank_TK, source_T = skewed(4 * FEWEST_TOKENS - 4)
    at_home_R = work_of_ranks(rank_TK, source_T, RANKS, AT_HOME, generator)
    np.testing.assert_array_equal(work_of_ranks(rank_TK, source_T, RANKS, way, generator), at_home_R)


def test_replicas_are_drawn_by_their_shares(generator: np.random.Generator) -> None:
    placed_RS = np.array([[0, 1], [0, 2]], dtype=np.int32)
    ids_TK = np.tile([0, 1, 2], (4000, 1))
    slot_TK = drawn_slots(ids_TK, np.array([3000.0, 4000.0, 1000.0, 4000.0]), placed_RS, generator)
    assert (placed_RS.ravel()[slot_TK] == ids_TK).all()
    assert (slot_TK[:, 0] == 0).mean() == pytest.approx(0.75, abs=0.03)


def test_every_placement_and_split_is_measured() -> None:
    rows = list(shared_and_routed(Drawn(8, 256, 2, seed=0), RANKS, 3, window=8, steps=4))
    assert [name for name, _, _ in rows] == [FOR_EVEN] * 3 + [FOR_STEPS] * 3
    assert all(set(ratios) == set(WAYS) and min(ratios.values()) >= 1.0 for _, _, ratios in rows)


def test_tokens_choose_distinct_experts_of_one_popularity() -> None:
    drawn = Drawn(16, 500, 4, seed=1)
    first, second = (np.concatenate(list(drawn.steps(4, part))) for part in range(2))
    assert all(len(set(row)) == 4 for row in first.tolist())
    counts = [np.bincount(ids.ravel(), minlength=16) for ids in (first, second)]
    assert np.corrcoef(*counts)[0, 1] > 0.95
    assert not np.array_equal(first, second)
