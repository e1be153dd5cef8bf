"""Layers are solved independently and within the time budget, and expert groups stay on one node."""

from __future__ import annotations

import itertools
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_core.placement import Placement
from eplb_core.solver import engine
from eplb_core.solver.engine import (
    LayerBatch,
    Limits,
    OutOfTimeError,
    SearchRules,
    SolverError,
    _nodes_of_groups,
    _pack_groups,
    _solve_by_node,
    solve_many,
)
from eplb_core.solver.layer import LayerResult
from eplb_core.solver.model import EVEN, FRESH, KEEP, RULE, SOLVED, LayerLayout, homes
from eplb_core.solver.tables import fixed_rule, slots_by_expert
from tests.solver.layers_of import heat_of_kind, shares_of_sources
from tests.solver.placed_layer import deployed_on
from tests.solver.solved_layers import SEARCH, assert_servable

LAYERS = 5
EXPERTS = 32
RANKS = 8
SLOTS = 5
HEAT_LNE = np.random.default_rng(3).gamma(0.6, 100, (LAYERS, 6, EXPERTS))


def solved(
    heat_LNE: np.ndarray, threads: int | None = 1, budget_ms: float | None = None
) -> list[LayerResult | SolverError]:
    layers = len(heat_LNE)
    deployed = Placement.linear(layers, EXPERTS, RANKS, SLOTS)
    batch = LayerBatch(
        heat_LNE,
        deployed.phy2log_LRS,
        deployed.default_log2phy().transpose(1, 0, 2),
        np.full((layers, RANKS, EXPERTS), 1 / RANKS),
        np.arange(layers) % 2 == 0,
    )
    rules = SearchRules(SEARCH._replace(annealing_tries=100), np.array([np.inf, 1.0]), 0.0)
    return solve_many(batch, rules, limits=Limits(threads, budget_ms))


def assert_same(first: LayerResult, second: LayerResult) -> None:
    for name in ("taken", "half_life", "par_before"):
        assert getattr(first, name) == getattr(second, name)
    for first_value, second_value in zip(first.candidate, second.candidate, strict=True):
        np.testing.assert_array_equal(first_value, second_value)


def test_the_thread_count_is_limited_to_the_cores_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    thread_counts = []
    original = engine.ThreadPoolExecutor

    def pool(workers: int, **options: object) -> object:
        thread_counts.append(workers)
        return original(workers, **options)

    monkeypatch.setattr(engine, "ThreadPoolExecutor", pool)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    solved(HEAT_LNE, threads=100_000)
    assert thread_counts == [3]


def test_a_failing_layer_leaves_the_other_layers_unaffected(monkeypatch: pytest.MonkeyPatch) -> None:
    original = engine.solve_layer

    def failing(heat_NE: np.ndarray, *arguments: object) -> LayerResult:
        if np.array_equal(heat_NE, HEAT_LNE[1]):
            raise ZeroDivisionError("no ranks")
        return original(heat_NE, *arguments)

    whole = solved(HEAT_LNE)
    monkeypatch.setattr(engine, "solve_layer", failing)
    broken = solved(HEAT_LNE, threads=2)
    assert isinstance(broken[1], SolverError)
    assert not isinstance(broken[1], OutOfTimeError)
    assert str(broken[1]) == "ZeroDivisionError: no ranks"
    for layer in (0, 2, 3, 4):
        assert_same(whole[layer], broken[layer])


def test_layers_beyond_the_time_budget_fail_with_that_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    now = itertools.chain([0.0, 0.0, 0.001], itertools.repeat(0.003))
    monkeypatch.setattr(engine.time, "monotonic", lambda: next(now))
    answers = solved(HEAT_LNE, budget_ms=2.5)
    assert [isinstance(answer, OutOfTimeError) for answer in answers] == [False, False, True, True, True]
    assert str(answers[2]) == "the time budget (budget_ms) of 2.5 ms ran out before this layer was started"


SETTINGS = settings(max_examples=60)
SEEDS = st.integers(0, 2**32 - 1)


@st.composite
def grouped(draw: st.DrawFn) -> tuple[LayerLayout, int, np.random.Generator]:
    """Draw a linear layout on possibly interleaved nodes, a number of groups that fits it, and a generator."""
    generator = np.random.default_rng(draw(SEEDS))
    nodes = draw(st.integers(1, 3))
    ranks_each = draw(st.integers(1, 3))
    groups = nodes * draw(st.integers(1, 3))
    experts = groups * draw(st.integers(1, 4))
    least = -(-experts // (nodes * ranks_each))
    slots = draw(st.integers(least, experts // nodes))
    node_R = np.repeat(np.arange(nodes, dtype=np.int32), ranks_each)
    if draw(st.booleans()):
        node_R = generator.permutation(node_R)
    return serving(experts, node_R, slots), groups, generator


def serving(experts: int, node_R: np.ndarray, slots: int) -> LayerLayout:
    ranks = node_R.size
    phy2log_RS = Placement.linear(1, experts, ranks, slots).phy2log_LRS[0].copy()
    share_GE = shares_of_sources(ranks, experts, "uneven", 3)
    return deployed_on(phy2log_RS, share_GE, node_R=node_R, node_G=node_R.copy())


def solve_grouped(deployed, heat_NE, groups, *, unplaced=False, tables=SOLVED, move_price=0.0):
    search = SEARCH._replace(tables=tables, move_price=move_price * deployed.phy2log_RS.size)
    return _solve_by_node(heat_NE, deployed, search, np.array([np.inf, 1.0]), 0.0, unplaced, groups)


def installed(deployed: LayerLayout, answer) -> LayerLayout:
    layout = answer.candidate
    home_ER = homes(layout.phy2log_RS, deployed.share_GE.shape[1])
    return deployed._replace(phy2log_RS=layout.phy2log_RS, log2phy_GE=layout.log2phy_GE, home_ER=home_ER)


def homes_of_groups(deployed: LayerLayout, groups: int) -> list[set[int]]:
    """Return the nodes that hold each group's experts."""
    experts = deployed.share_GE.shape[1]
    nodes: list[set[int]] = [set() for _ in range(groups)]
    for (rank, _), expert in np.ndenumerate(deployed.phy2log_RS):
        nodes[expert // (experts // groups)].add(int(deployed.node_R[rank]))
    return nodes


@SETTINGS
@given(
    grouped(), st.sampled_from((EVEN, RULE, SOLVED)), st.sampled_from(("even", "skewed", "zero", "one hot"))
)
def test_a_placement_from_scratch_keeps_each_group_on_one_node(group_case, tables: int, kind: str) -> None:
    deployed, groups, generator = group_case
    experts = deployed.share_GE.shape[1]
    answer = solve_grouped(
        deployed, heat_of_kind(kind, 5, experts, generator), groups, unplaced=True, tables=tables
    )
    assert_servable(answer, deployed.phy2log_RS, experts)
    after = installed(deployed, answer)
    nodes_of_groups = homes_of_groups(after, groups)
    nodes = len(set(deployed.node_R.tolist()))
    assert all(len(node_set) == 1 for node_set in nodes_of_groups)
    assert sorted(next(iter(node_set)) for node_set in nodes_of_groups) == sorted(
        list(range(nodes)) * (groups // nodes)
    )
    assert _nodes_of_groups(after, groups) is not None
    assert answer.taken == FRESH
    if tables == RULE:
        rule_GE = fixed_rule(*slots_by_expert(after.phy2log_RS, experts), deployed.node_R.size)
        np.testing.assert_array_equal(after.log2phy_GE, rule_GE)


@SETTINGS
@given(grouped(), st.sampled_from((EVEN, RULE, SOLVED)), st.sampled_from((0.0, 0.01)))
def test_groups_stay_together_and_change_nodes_only_for_a_gain(given_, tables: int, price: float) -> None:
    deployed, groups, generator = given_
    experts = deployed.share_GE.shape[1]
    first_NE, then_NE = (heat_of_kind("skewed", 6, experts, generator) for _ in range(2))
    placed = installed(deployed, solve_grouped(deployed, first_NE, groups, unplaced=True, tables=tables))
    answer = solve_grouped(placed, then_NE, groups, tables=tables, move_price=price)
    after = installed(placed, answer)
    assert all(len(homes) == 1 for homes in homes_of_groups(after, groups))
    if homes_of_groups(after, groups) != homes_of_groups(placed, groups):
        assert answer.taken == FRESH
        assert (
            answer.candidate.par + price / placed.phy2log_RS.size * answer.candidate.moves < answer.par_before
        )
    assert answer.candidate.par <= answer.par_before
    assert_servable(answer, placed.phy2log_RS, experts)
    if answer.taken == KEEP:
        np.testing.assert_array_equal(after.log2phy_GE, placed.log2phy_GE)


def test_hot_groups_that_meet_on_one_node_are_separated_again() -> None:
    node_R = np.repeat(np.arange(2, dtype=np.int32), 4)
    popularity_2E = np.full((2, 32), 1.0)
    # Each group has eight experts. Groups 0 and 1 are on node 0. First groups 0 and 3 are hot, then groups 0 and 1.
    popularity_2E[0, :8] = popularity_2E[0, 24:] = 4.0
    popularity_2E[1, :16] = 4.0
    generator = np.random.default_rng(3)
    first_NE, then_NE = (
        generator.multinomial(50_000, row_E / row_E.sum(), size=8).astype(float) for row_E in popularity_2E
    )
    deployed = serving(32, node_R, 5)
    placed = installed(deployed, solve_grouped(deployed, first_NE, 4, unplaced=True))
    together = homes_of_groups(placed, 4)[0] == homes_of_groups(placed, 4)[1]
    answer = solve_grouped(placed, then_NE, 4)
    after = installed(placed, answer)
    assert together
    assert homes_of_groups(after, 4)[0] != homes_of_groups(after, 4)[1]
    assert answer.candidate.par < 1.1 < answer.par_before


def test_groups_spread_over_nodes_are_placed_from_scratch() -> None:
    deployed = serving(8, np.array([0, 0, 1, 1], dtype=np.int32), 3)
    assert _nodes_of_groups(deployed, 4) is None
    heat_NE = heat_of_kind("skewed", 6, 8, np.random.default_rng(1))
    assert solve_grouped(deployed, heat_NE, 4).taken == FRESH


def test_hot_groups_are_packed_to_different_nodes() -> None:
    deployed = serving(8, np.array([0, 0, 1, 1], dtype=np.int32), 2)
    mean_E = np.array([9, 0, 1, 0, 8, 0, 2, 1], dtype=np.float32)
    # Groups with heat 9, 1, 8 and 3 are packed as 9 + 1 and 8 + 3.
    assert _pack_groups(mean_E, deployed, 4).tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    swapped = deployed._replace(phy2log_RS=deployed.phy2log_RS[[2, 3, 0, 1]].copy())
    assert _pack_groups(mean_E, swapped, 4).tolist() == [1, 1, 1, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("moved_price", [0.0, 0.05])
def test_a_cool_node_is_not_changed_without_a_gain(moved_price: float) -> None:
    deployed = serving(8, np.array([0, 0, 1, 1], dtype=np.int32), 2)
    even_NE = np.ones((6, 8))
    placed = installed(deployed, solve_grouped(deployed, even_NE, 2, unplaced=True))
    # On node 0, one hot expert fills a whole rank, which no move can improve. Node 1 is uneven but far cooler.
    heat_NE = np.tile([100.0, 1, 1, 1, 4, 4, 1, 1], (6, 1))
    answer = solve_grouped(placed, heat_NE, 2, move_price=moved_price)
    np.testing.assert_array_equal(answer.candidate.phy2log_RS[2:], placed.phy2log_RS[2:])
