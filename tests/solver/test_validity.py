"""The quick checks of a layer say no exactly where the worded checks raise."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_service.placement import PlacementError, check_layer, check_log2phy
from eplb_service.solver.table_rule import fixed_rule, slots_by_expert
from eplb_service.solver.validity import placeable, tables_hold
from tests.solver.layers_of import shapes
from tests.solver.placed_layer import random_placement

SEEDS = st.integers(0, 2**32 - 1)


def raises(check, *arguments) -> bool:
    try:
        check(*arguments)
    except PlacementError:
        return True
    return False


@settings(max_examples=150)
@given(shapes(6, 4), SEEDS, st.integers(0, 2), st.data())
def test_placements(shape: tuple[int, int, int], seed: int, flaws: int, data: st.DataObject) -> None:
    ranks, slots, experts = shape
    phy2log_RS = random_placement(*shape, np.random.default_rng(seed))
    assert placeable(phy2log_RS, experts)
    for _ in range(flaws):
        rank, slot = data.draw(st.integers(0, ranks - 1)), data.draw(st.integers(0, slots - 1))
        phy2log_RS[rank, slot] = data.draw(st.integers(-2, experts + 1))
    assert placeable(phy2log_RS, experts) != raises(check_layer, phy2log_RS, experts)


@settings(max_examples=150)
@given(shapes(6, 4), SEEDS, st.integers(1, 5), st.integers(0, 2), st.data())
def test_tables(
    shape: tuple[int, int, int], seed: int, sources: int, flaws: int, data: st.DataObject
) -> None:
    experts = shape[2]
    phy2log_RS = random_placement(*shape, np.random.default_rng(seed))
    table_GE = fixed_rule(*slots_by_expert(phy2log_RS, experts), sources)
    assert tables_hold(table_GE, phy2log_RS)
    for _ in range(flaws):
        source, expert = data.draw(st.integers(0, sources - 1)), data.draw(st.integers(0, experts - 1))
        table_GE[source, expert] = data.draw(st.integers(-3, phy2log_RS.size + 2))
    wrong = any(raises(check_log2phy, table_E, phy2log_RS) for table_E in table_GE)
    assert tables_hold(table_GE, phy2log_RS) != wrong
