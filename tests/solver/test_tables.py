"""Tables split tokens as their rules say, and are never worse on the window than the engines' fixed rule."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_service.placement import check_log2phy, default_log2phy
from eplb_service.solver import tables
from eplb_service.solver.objective import expert_heat
from eplb_service.solver.order import descending
from eplb_service.solver.table_rule import fixed_rule, slot_shares, slots_by_expert, tables_par
from eplb_service.solver.tables import solve_tables
from tests.solver.layers_of import Case, cases, shares_of_sources
from tests.solver.placed_layer import PlacedLayer
from tests.solver.slow import tables as slow

SETTINGS = settings(max_examples=100)
SEEDS = st.integers(0, 2**32 - 1)
KINDS = st.sampled_from(("uniform", "uneven", "silent"))
Z = st.sampled_from((0.0, 1.0))


class Sources:
    """A placed layer, the split of its tokens over sources, and the fixed rule."""

    def __init__(self, case: Case, z: float, sources: int, kind: str, seed: int) -> None:
        self.layer = PlacedLayer(case, z, seed)
        self.phy2log_RS = self.layer.phy2log_RS
        self.share_GE = shares_of_sources(sources, case.experts, kind, seed)
        self.first_E1, self.slot_P = slots_by_expert(self.phy2log_RS, case.experts)
        self.rule_GE = fixed_rule(self.first_E1, self.slot_P, sources)

    def par(self, table_GE: np.ndarray) -> float:
        return slow.tables_par(self.phy2log_RS, table_GE, *self.layer.heat, self.share_GE.astype(float))

    def solved(self) -> tuple[np.ndarray, float]:
        layer = self.layer
        return solve_tables(
            self.phy2log_RS, layer.demand, layer.scaled_EN, layer.share_N, self.share_GE, layer.z
        )


@SETTINGS
@given(cases(), st.integers(1, 9), KINDS, SEEDS)
def test_the_rule_takes_replicas_in_turn(case: Case, sources: int, kind: str, seed: int) -> None:
    given_ = Sources(case, 1.0, sources, kind, seed)
    layer, phy2log_RS = given_.layer, given_.phy2log_RS
    for e in range(case.experts):
        holders = given_.slot_P[given_.first_E1[e] : given_.first_E1[e + 1]]
        np.testing.assert_array_equal(holders, slow.holders_of(phy2log_RS, e))
    np.testing.assert_array_equal(given_.rule_GE, slow.fixed_rule(phy2log_RS, sources, case.experts))
    if sources == case.ranks:
        np.testing.assert_array_equal(given_.rule_GE, default_log2phy(phy2log_RS, case.experts))
    found_RS = slot_shares(phy2log_RS, given_.rule_GE, given_.share_GE)
    np.testing.assert_allclose(
        found_RS, slow.slot_shares(phy2log_RS, given_.rule_GE, given_.share_GE.astype(float)), atol=1e-6
    )
    par = tables_par(phy2log_RS, given_.rule_GE, layer.scaled_EN, layer.share_N, given_.share_GE)
    assert par == pytest.approx(given_.par(given_.rule_GE), rel=1e-5)


@SETTINGS
@given(cases(most_ranks=6, most_slots=4), st.integers(1, 6), KINDS, Z, SEEDS)
def test_parts_are_spread_to_where_it_stays_coolest(
    case: Case, sources: int, kind: str, z: float, seed: int
) -> None:
    given_ = Sources(case, z, sources, kind, seed)
    layer = given_.layer
    chosen_GE = given_.rule_GE.copy()
    packing = tables._spread(
        given_.phy2log_RS, chosen_GE, given_.first_E1, given_.slot_P, layer.demand, given_.share_GE, z
    )
    share_RS = slow.slot_shares(given_.phy2log_RS, chosen_GE, given_.share_GE.astype(float))
    np.testing.assert_allclose(
        packing.share_ER[given_.phy2log_RS, np.arange(case.ranks)[:, None]], share_RS, atol=1e-5
    )
    order_E = descending(expert_heat(layer.demand, z))
    wanted_GE, margin = slow.spread(given_.phy2log_RS, order_E, *layer.heat, given_.share_GE.astype(float), z)
    if margin > layer.rounding:
        np.testing.assert_array_equal(chosen_GE, wanted_GE)


@SETTINGS
@given(cases(most_ranks=5, most_slots=3), st.integers(1, 5), KINDS, Z, SEEDS)
def test_parts_leave_the_hottest_rank_while_that_cools_it(
    case: Case, sources: int, kind: str, z: float, seed: int
) -> None:
    given_ = Sources(case, z, sources, kind, seed)
    layer = given_.layer
    arrays = given_.first_E1, given_.slot_P, layer.demand, given_.share_GE, z
    chosen_GE = given_.rule_GE.copy()
    packing = tables._spread(given_.phy2log_RS, chosen_GE, *arrays)
    before_GE = chosen_GE.copy()
    tables._cool(packing, chosen_GE, *arrays)
    wanted_GE, margin = slow.cool(given_.phy2log_RS, before_GE, *layer.heat, given_.share_GE.astype(float), z)
    if margin > layer.rounding:
        np.testing.assert_array_equal(chosen_GE, wanted_GE)


@SETTINGS
@given(cases(), st.integers(1, 9), KINDS, Z, SEEDS)
def test_solved_tables_are_never_worse_than_the_rule(
    case: Case, sources: int, kind: str, z: float, seed: int
) -> None:
    given_ = Sources(case, z, sources, kind, seed)
    chosen_GE, par = given_.solved()
    assert par <= given_.par(given_.rule_GE) * (1 + 1e-5)
    assert par == pytest.approx(given_.par(chosen_GE), rel=1e-5)
    for table_E in chosen_GE:
        check_log2phy(table_E, given_.phy2log_RS)


def test_solved_tables_win_much_where_sources_are_uneven() -> None:
    heat_NE = np.random.default_rng(2).integers(50, 150, (4, 12)).astype(float)
    given_ = Sources(Case(8, 3, heat_NE), 1.0, 8, "uneven", 4)
    assert given_.solved()[1] < given_.par(given_.rule_GE) - 0.1
