"""A new placement is dealt to the ranks that hold most of it; what stays keeps its slot; each move has a sender."""

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
    """A new placement and the deployed one: unrelated, or the same with ranks and slots mixed."""
    generator = np.random.default_rng(seed)
    new_RS = random_placement(*shape, generator)
    if seed % 2:
        return new_RS, random_placement(*shape, generator)
    mixed_RS = generator.permuted(new_RS[generator.permutation(len(new_RS))], axis=1)
    return new_RS, np.ascontiguousarray(mixed_RS)


@SETTINGS
@given(shapes(8, 5), SEEDS, st.integers(1, 4))
def test_rows_go_where_most_of_them_is(shape: tuple[int, int, int], seed: int, nodes: int) -> None:
    new_RS, deployed_RS = two_placements(shape, seed)
    nodes_R = np.random.default_rng(seed).integers(0, nodes, len(new_RS)).astype(np.int32)
    dealt_RS = match_ranks(new_RS, deployed_RS, shape[2], nodes_R)
    np.testing.assert_array_equal(dealt_RS, slow.match_ranks(new_RS, deployed_RS, nodes_R))
    assert sorted(dealt_RS.tolist()) == sorted(new_RS.tolist())
    shared_RR = slow.overlaps(new_RS, deployed_RS)
    best = shared_RR[linear_sum_assignment(-shared_RR)].sum()
    found = np.trace(slow.overlaps(dealt_RS, deployed_RS))
    # A greedy matching has at least half of the largest one's weight.
    assert best / 2 <= found <= best
    if not seed % 2:
        assert found == best == new_RS.size


@SETTINGS
@given(shapes(8, 5), SEEDS)
def test_what_stays_keeps_its_slot(shape: tuple[int, int, int], seed: int) -> None:
    new_RS, deployed_RS = two_placements(shape, seed)
    kept_RS, moves = keep_slots(new_RS, deployed_RS)
    wanted_RS, wanted_moves = slow.keep_slots(new_RS, deployed_RS)
    np.testing.assert_array_equal(kept_RS, wanted_RS)
    assert moves == wanted_moves == np.count_nonzero(kept_RS != deployed_RS)
    np.testing.assert_array_equal(np.sort(kept_RS, axis=1), np.sort(new_RS, axis=1))


@SETTINGS
@given(shapes(8, 5), SEEDS, st.integers(1, 4))
def test_the_nearest_least_busy_holder_sends(shape: tuple[int, int, int], seed: int, nodes: int) -> None:
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
