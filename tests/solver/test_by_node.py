"""Groups of experts stay whole on one node, nodes get equally many, and once placed nothing crosses them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_service.placement import Placement, check_layer, check_log2phy
from eplb_service.solver.by_node import nodes_of_groups, pack_groups, solve_by_node
from eplb_service.solver.model import EVEN, FRESH, KEEP, RULE, SOLVED, Deployed, homes
from eplb_service.solver.tables.log2phy import fixed_rule, slots_by_expert
from tests.solver.asked import SEARCH
from tests.solver.layers_of import heat_of_kind, shares_of_sources

SETTINGS = settings(max_examples=60)
SEEDS = st.integers(0, 2**32 - 1)


@st.composite
def grouped(draw: st.DrawFn) -> tuple[Deployed, int, np.random.Generator]:
    """The linear layout on nodes that may interleave, a number of groups that fits, and a generator."""
    generator = np.random.default_rng(draw(SEEDS))
    nodes, ranks_each = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    groups = nodes * draw(st.integers(1, 3))
    experts = groups * draw(st.integers(1, 4))
    least = -(-experts // (nodes * ranks_each))
    slots = draw(st.integers(least, experts // nodes))
    node_R = np.repeat(np.arange(nodes, dtype=np.int32), ranks_each)
    if draw(st.booleans()):
        node_R = generator.permutation(node_R)
    return serving(experts, node_R, slots), groups, generator


def serving(experts: int, node_R: np.ndarray, slots: int) -> Deployed:
    ranks = node_R.size
    phy2log_RS = Placement.linear(1, experts, ranks, slots).phy2log_LRS[0].copy()
    share_GE = shares_of_sources(ranks, experts, "uneven", 3)
    rule_GE = fixed_rule(*slots_by_expert(phy2log_RS, experts), ranks)
    return Deployed(phy2log_RS, rule_GE, share_GE, homes(phy2log_RS, experts), node_R, node_R.copy())


def solve(deployed, heat_NE, groups, *, unplaced=False, tables=SOLVED, move_price=0.0):
    search = SEARCH._replace(tables=tables, move_price=move_price)
    return solve_by_node(heat_NE, deployed, search, np.array([np.inf, 1.0]), 0.0, unplaced, groups)


def installed(deployed: Deployed, answer) -> Deployed:
    found = answer.found
    home_ER = homes(found.phy2log_RS, deployed.share_GE.shape[1])
    return deployed._replace(phy2log_RS=found.phy2log_RS, log2phy_GE=found.log2phy_GE, home_ER=home_ER)


def homes_of_groups(deployed: Deployed, groups: int) -> list[set[int]]:
    """Nodes on which each group has experts."""
    experts = deployed.share_GE.shape[1]
    found: list[set[int]] = [set() for _ in range(groups)]
    for (rank, _), expert in np.ndenumerate(deployed.phy2log_RS):
        found[expert // (experts // groups)].add(int(deployed.node_R[rank]))
    return found


@SETTINGS
@given(
    grouped(), st.sampled_from((EVEN, RULE, SOLVED)), st.sampled_from(("even", "skewed", "zero", "one hot"))
)
def test_placed_from_scratch_each_group_is_on_one_node(given_, tables: int, kind: str) -> None:
    deployed, groups, generator = given_
    experts = deployed.share_GE.shape[1]
    answer = solve(deployed, heat_of_kind(kind, 5, experts, generator), groups, unplaced=True, tables=tables)
    after = installed(deployed, answer)
    check_layer(after.phy2log_RS, experts)
    for table_E in after.log2phy_GE:
        check_log2phy(table_E, after.phy2log_RS)
    at = homes_of_groups(after, groups)
    nodes = len(set(deployed.node_R.tolist()))
    assert all(len(node) == 1 for node in at)
    assert sorted(next(iter(node)) for node in at) == sorted(list(range(nodes)) * (groups // nodes))
    assert nodes_of_groups(after, groups) is not None
    assert answer.taken == FRESH
    assert answer.found.moves == np.count_nonzero(after.phy2log_RS != deployed.phy2log_RS)
    for was, now in zip(deployed.phy2log_RS.tolist(), after.phy2log_RS.tolist(), strict=True):
        assert all(now[was.index(expert)] == expert for expert in set(was) & set(now))
    if tables == RULE:
        rule_GE = fixed_rule(*slots_by_expert(after.phy2log_RS, experts), deployed.node_R.size)
        np.testing.assert_array_equal(after.log2phy_GE, rule_GE)


@SETTINGS
@given(grouped(), st.sampled_from((EVEN, RULE, SOLVED)), st.sampled_from((0.0, 0.01)))
def test_once_placed_groups_stay_on_their_nodes(given_, tables: int, price: float) -> None:
    deployed, groups, generator = given_
    experts = deployed.share_GE.shape[1]
    first_NE, then_NE = (heat_of_kind("skewed", 6, experts, generator) for _ in range(2))
    placed = installed(deployed, solve(deployed, first_NE, groups, unplaced=True, tables=tables))
    answer = solve(placed, then_NE, groups, tables=tables, move_price=price)
    after = installed(placed, answer)
    assert homes_of_groups(after, groups) == homes_of_groups(placed, groups)
    assert answer.found.par <= answer.par_before
    assert answer.found.moves == np.count_nonzero(after.phy2log_RS != placed.phy2log_RS)
    check_layer(after.phy2log_RS, experts)
    for table_E in after.log2phy_GE:
        check_log2phy(table_E, after.phy2log_RS)
    if answer.taken == KEEP:
        np.testing.assert_array_equal(after.phy2log_RS, placed.phy2log_RS)
        np.testing.assert_array_equal(after.log2phy_GE, placed.log2phy_GE)


def test_groups_that_are_apart_are_placed_from_scratch() -> None:
    deployed = serving(8, np.array([0, 0, 1, 1], dtype=np.int32), 3)
    assert nodes_of_groups(deployed, 4) is None
    heat_NE = heat_of_kind("skewed", 6, 8, np.random.default_rng(1))
    assert solve(deployed, heat_NE, 4).taken == FRESH


def test_hot_groups_are_packed_to_different_nodes() -> None:
    deployed = serving(8, np.array([0, 0, 1, 1], dtype=np.int32), 2)
    mean_E = np.array([9, 0, 1, 0, 8, 0, 2, 1], dtype=np.float32)
    # Groups carry 9, 1, 8 and 3: 9 with 1 beside 8 with 3.
    assert pack_groups(mean_E, deployed, 4).tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    swapped = deployed._replace(phy2log_RS=deployed.phy2log_RS[[2, 3, 0, 1]].copy())
    assert pack_groups(mean_E, swapped, 4).tolist() == [1, 1, 1, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("moved_price", [0.0, 0.05])
def test_a_node_is_not_cooled_in_vain(moved_price: float) -> None:
    deployed = serving(8, np.array([0, 0, 1, 1], dtype=np.int32), 2)
    even_NE = np.ones((6, 8))
    placed = installed(deployed, solve(deployed, even_NE, 2, unplaced=True))
    # Node 0's hot expert fills a rank by itself and cannot be helped; node 1 is uneven, but far cooler.
    heat_NE = np.tile([100.0, 1, 1, 1, 4, 4, 1, 1], (6, 1))
    answer = solve(placed, heat_NE, 2, move_price=moved_price)
    np.testing.assert_array_equal(answer.found.phy2log_RS[2:], placed.phy2log_RS[2:])
    assert answer.hindsight <= answer.par_before
