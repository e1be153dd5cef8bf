"""New placements leave as many experts as possible on their ranks and in their slots, and every move has a sender."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from eplb_core.solver.topology import choose_senders, keep_slots, match_ranks
from tests.solver.layers_of import shapes
from tests.solver.placed_layer import random_placement
from tests.solver.slow import topology as slow

SETTINGS = settings(max_examples=50)
SEEDS = st.integers(0, 2**32 - 1)


def two_placements(shape: tuple[int, int, int], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a new and a current placement, which are unrelated or differ only by shuffled ranks and slots."""
    generator = np.random.default_rng(seed)
    new_RS = random_placement(*shape, generator)
    if seed % 2:
        return new_RS, random_placement(*shape, generator)
    shuffled_RS = generator.permuted(new_RS[generator.permutation(len(new_RS))], axis=1)
    return new_RS, np.ascontiguousarray(shuffled_RS)


@SETTINGS
@given(shapes(8, 5), SEEDS, st.integers(1, 4))
def test_rows_go_to_the_ranks_that_hold_most_of_their_experts(
    shape: tuple[int, int, int], seed: int, nodes: int
) -> None:
    new_RS, deployed_RS = two_placements(shape, seed)
    nodes_R = np.random.default_rng(seed).integers(0, nodes, len(new_RS)).astype(np.int32)
    dealt_RS = match_ranks(new_RS, deployed_RS, shape[2], nodes_R)
    np.testing.assert_array_equal(dealt_RS, slow.match_ranks(new_RS, deployed_RS, nodes_R))
    assert sorted(dealt_RS.tolist()) == sorted(new_RS.tolist())
    overlap_RR = slow.overlaps(new_RS, deployed_RS)
    best = overlap_RR[linear_sum_assignment(-overlap_RR)].sum()
    overlap = np.trace(slow.overlaps(dealt_RS, deployed_RS))
    # The weight of a greedy matching is at least half of the maximum.
    assert best / 2 <= overlap <= best
    if not seed % 2:
        assert overlap == best == new_RS.size


@SETTINGS
@given(shapes(8, 5), SEEDS)
def test_experts_that_remain_on_a_rank_keep_their_slots(shape: tuple[int, int, int], seed: int) -> None:
    new_RS, deployed_RS = two_placements(shape, seed)
    kept_RS, moves = keep_slots(new_RS, deployed_RS)
    expected_RS, expected_moves = slow.keep_slots(new_RS, deployed_RS)
    np.testing.assert_array_equal(kept_RS, expected_RS)
    assert moves == expected_moves == np.count_nonzero(kept_RS != deployed_RS)
    np.testing.assert_array_equal(np.sort(kept_RS, axis=1), np.sort(new_RS, axis=1))


@SETTINGS
@given(shapes(8, 5), SEEDS, st.integers(1, 4))
def test_each_expert_is_sent_by_the_least_busy_of_its_nearest_holders(
    shape: tuple[int, int, int], seed: int, nodes: int
) -> None:
    new_RS, deployed_RS = two_placements(shape, seed)
    kept_RS, moves = keep_slots(new_RS, deployed_RS)
    nodes_R = np.random.default_rng(seed).integers(0, nodes, len(new_RS)).astype(np.int32)
    move_M5 = choose_senders(deployed_RS, kept_RS, nodes_R)
    np.testing.assert_array_equal(move_M5, slow.choose_senders(deployed_RS, kept_RS, nodes_R))
    rebuilt_RS = deployed_RS.copy()
    for sender, sender_slot, rank, slot, expert in move_M5.tolist():
        assert deployed_RS[sender, sender_slot] == expert
        assert sender != rank
        rebuilt_RS[rank, slot] = expert
    np.testing.assert_array_equal(rebuilt_RS, kept_RS)
    assert len(move_M5) == moves
