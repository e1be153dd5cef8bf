"""Copies go to the hottest, none has more than there are ranks, and groups hold about equal numbers of them."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_service.solver.replicas import greedy_copies, hand_out
from eplb_service.solver.tree_search import floor_of, group_bounds
from tests.solver.layers_of import shapes
from tests.solver.slow import copies

SETTINGS = settings(max_examples=80)
HEAT = st.integers(0, 50) | st.floats(0, 2.0**100, width=32)


@SETTINGS
@given(st.lists(HEAT, min_size=1, max_size=12), st.integers(0, 20), st.integers(1, 6), st.data())
def test_copies_are_handed_to_the_hottest(
    heat: list[float], budget: int, ranks: int, data: st.DataObject
) -> None:
    heat_E = np.array(heat, dtype=np.float32)
    start = data.draw(st.lists(st.integers(1, ranks), min_size=len(heat), max_size=len(heat)))
    copies_E = np.array(start, dtype=np.int32)
    left = hand_out(copies_E, heat_E, budget, ranks)
    assert (copies_E.tolist(), left) == copies.hand_out(start, heat_E, budget, ranks)


@SETTINGS
@given(shapes(6, 5), st.data())
def test_greedy_copies_fill_every_slot(shape: tuple[int, int, int], data: st.DataObject) -> None:
    ranks, slots, experts = shape
    heat_E = np.array(data.draw(st.lists(HEAT, min_size=experts, max_size=experts)), dtype=np.float32)
    copies_E = greedy_copies(heat_E, ranks, slots)
    assert copies_E.sum() == ranks * slots
    assert copies_E.min() >= 1
    assert copies_E.max() <= ranks
    assert copies_E.tolist() == copies.hand_out([1] * experts, heat_E, ranks * slots - experts, ranks)[0]


@SETTINGS
@given(st.lists(st.integers(1, 9), min_size=1, max_size=15), st.integers(1, 20), st.randoms())
def test_groups_share_the_copies(counts: list[int], groups: int, random) -> None:
    copies_E = np.array(counts, dtype=np.int32)
    by_heat_E = np.array(random.sample(range(len(counts)), len(counts)), dtype=np.int64)
    found_G = group_bounds(copies_E, by_heat_E, groups)
    assert found_G.tolist() == copies.group_bounds(copies_E, by_heat_E, groups)


@SETTINGS
@given(
    st.lists(st.tuples(st.integers(1, 9), st.floats(0, 100, width=32)), min_size=1, max_size=9), st.randoms()
)
def test_floor_is_the_hottest_copy_fixed(pairs: list[tuple[int, float]], random) -> None:
    copies_E = np.array([pair[0] for pair in pairs], dtype=np.int32)
    heat_E = np.array([pair[1] for pair in pairs], dtype=np.float32)
    fixed = np.array(random.sample(range(len(pairs)), random.randint(0, len(pairs))), dtype=np.int64)
    np.testing.assert_allclose(
        floor_of(copies_E, heat_E, fixed), copies.hottest_copy(copies_E, heat_E, fixed), rtol=1e-6
    )
