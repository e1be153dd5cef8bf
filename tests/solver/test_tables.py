"""Tables are never worse on the window than the engines' rule, and win much where source traffic is uneven."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_service.placement import check_log2phy, default_log2phy
from eplb_service.solver.objective import demand_of, normalise
from eplb_service.solver.tables import fixed_rule, slots_by_expert, solve_tables, tables_par
from eplb_service.solver.tree_search import place, tree_search
from tests.solver.layers_of import Case, cases


@settings(deadline=None, max_examples=100)
@given(cases(), st.integers(0, 2**32 - 1))
def test_never_worse_than_the_fixed_rule(case: Case, seed: int) -> None:
    share_GE = (
        np.random.default_rng(seed).dirichlet(np.full(case.ranks, 0.7), case.experts).T.astype(np.float32)
    )
    share_GE = np.ascontiguousarray(share_GE)
    scaled_EN, share_N = normalise(case.heat_NE, np.ones(len(case.heat_NE)), case.ranks)
    layer = demand_of(scaled_EN, share_N)
    counts_KE, _ = tree_search(layer, case.ranks, case.slots, 1.0, 0, 0, 0, 1)
    phy2log_RS = place(counts_KE[0], layer, case.ranks, case.slots, 1.0).phy2log_RS
    chosen_GE, found = solve_tables(phy2log_RS, layer, scaled_EN, share_N, share_GE, 1.0)
    first_E1, slot_P = slots_by_expert(phy2log_RS, case.experts)
    rule_GE = fixed_rule(first_E1, slot_P, case.ranks)
    np.testing.assert_array_equal(rule_GE, default_log2phy(phy2log_RS, case.experts))
    assert found <= tables_par(phy2log_RS, rule_GE, scaled_EN, share_N, share_GE)
    for table_E in chosen_GE:
        check_log2phy(table_E, phy2log_RS)
