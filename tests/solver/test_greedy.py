"""Greedy placing takes the coolest rank each time, makes room where none is left, and always ends complete."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_service.placement import check_layer
from eplb_service.solver.objective import expert_heat
from eplb_service.solver.order import descending
from eplb_service.solver.replicas import greedy_copies
from eplb_service.solver.tree_search import heat_per_copy, place
from tests.solver.layers_of import Case, cases
from tests.solver.placed_layer import PlacedLayer
from tests.solver.slow import placing
from tests.solver.test_packing import assert_sums_hold

SEEDS = st.integers(0, 2**32 - 1)


@settings(max_examples=120)
@given(cases(most_ranks=6, most_slots=4), st.sampled_from((0.0, 1.0, 3.0)), SEEDS, st.booleans())
def test_each_copy_goes_to_the_coolest_rank(case: Case, z: float, seed: int, greedy: bool) -> None:
    layer = PlacedLayer(case, z, seed)
    # Random legal counts bring the shapes in which room must be made.
    copies_E = np.bincount(layer.phy2log_RS.ravel(), minlength=case.experts).astype(np.int32)
    if greedy:
        copies_E = greedy_copies(expert_heat(layer.demand, z), case.ranks, case.slots)
    packing = place(copies_E, layer.demand, case.ranks, case.slots, z)
    check_layer(packing.phy2log_RS, case.experts)
    np.testing.assert_array_equal(np.bincount(packing.phy2log_RS.ravel(), minlength=case.experts), copies_E)
    assert_sums_hold(packing, layer)
    order_E = descending(heat_per_copy(layer.demand, copies_E, z))
    if placing.in_order(packing.phy2log_RS, order_E):
        assert placing.regret(packing.phy2log_RS, copies_E, order_E, *layer.heat, z) <= 2 * layer.rounding
    wanted_RS, margin = placing.place(copies_E, order_E, *layer.heat, case.ranks, case.slots, z)
    if margin > layer.rounding:
        np.testing.assert_array_equal(packing.phy2log_RS, wanted_RS)


@settings(max_examples=40)
@given(cases(), st.sampled_from((0.0, 1.0)), SEEDS)
def test_order_is_that_of_heat_per_copy(case: Case, z: float, seed: int) -> None:
    layer = PlacedLayer(case, z, seed)
    copies_E = np.bincount(layer.phy2log_RS.ravel(), minlength=case.experts).astype(np.int32)
    np.testing.assert_allclose(
        heat_per_copy(layer.demand, copies_E, z), expert_heat(layer.demand, z) / copies_E, rtol=1e-6
    )


def test_room_is_made_where_every_rank_with_room_holds_the_expert() -> None:
    # Cold experts 2, 3 and 4 fill rank 2; of expert 5's three copies the last finds only ranks that hold it.
    layer = PlacedLayer(Case(3, 3, np.array([[100.0, 90.0, 3.3, 3.2, 3.1, 3.0, 0.5]])), 0.0)
    packing = place(np.array([1, 1, 1, 1, 1, 3, 1], dtype=np.int32), layer.demand, 3, 3, 0.0)
    assert packing.phy2log_RS.tolist() == [[0, 5, 2], [1, 5, 6], [4, 3, 5]]
    assert_sums_hold(packing, layer)
