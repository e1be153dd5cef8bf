"""Tokens and weights stay on their node if balance allows, and expert groups stay together if required."""

from __future__ import annotations

import numpy as np
import pytest

from eplb_core.heat.window import Window
from eplb_core.placement import Placement, apply_layers, par
from eplb_core.planner.decide import plan
from eplb_core.planner.plan import Plan
from eplb_core.planner.request import with_options
from eplb_core.planner.settings import PlannerSettings
from eplb_core.planner.topology import Topology
from eplb_core.solver import layer as decision_module
from tests.planner.drawn import still_heat, whole_loads
from tests.solver.slow.topology import crossing

LAYERS = 3
EXPERTS = 32
RANKS = 8
SLOTS = 5
GROUPS = 8
EACH = np.arange(RANKS)
TWO_NODES = Topology(EACH // 4, EACH)


def window_of(seed: int, spread: float = 0.3) -> Window:
    """Return stationary heat from sources that differ by ``spread``. With 0, all sources are equal."""
    source_RLE = np.random.default_rng(seed).lognormal(0, spread, (RANKS, LAYERS, EXPERTS))
    return Window(still_heat(48, LAYERS, EXPERTS, 8000, seed, skew=0.8), source_RLE)


LINEAR = Placement.linear(LAYERS, EXPERTS, RANKS, SLOTS)


def decided(
    topology: Topology,
    window: Window | None = None,
    start: tuple[Placement, np.ndarray] | None = None,
    **settings,
) -> tuple[Plan, tuple[Placement, np.ndarray]]:
    """Return the plan and the layout after its commit."""
    after, table_RLE = start or (LINEAR, LINEAR.default_log2phy())
    switched, search = with_options(PlannerSettings(), settings)
    decision = plan(window or window_of(5), after, table_RLE, topology, switched, search=search)
    after, table_RLE = apply_layers(after, table_RLE, decision.changes())
    after.check_log2phy(table_RLE)
    return decision, (after, table_RLE)


def crossed(table_RLE: np.ndarray, nodes_R: np.ndarray, window: Window) -> list[float]:
    share_RLE = window.source_RLE / window.source_RLE.sum(axis=0)
    mean_LE = window.heat_TLE.mean(axis=0)
    return [
        crossing(table_RLE[:, layer], share_RLE[:, layer], mean_LE[layer], nodes_R, nodes_R, SLOTS)
        for layer in range(LAYERS)
    ]


def nodes_of_experts(placement: Placement, layer: int) -> list[set[int]]:
    held_RS = placement.phy2log_LRS[layer]
    return [set((np.argwhere(held_RS == expert)[:, 0] // 4).tolist()) for expert in range(EXPERTS)]


@pytest.mark.parametrize(("spread", "fewer"), [(0.0, 0.02), (0.3, 0.005)])
def test_fewer_tokens_cross_nodes_and_the_ratio_does_not_rise(
    spread: float, fewer: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    window = window_of(5, spread)
    near, (after, table_RLE) = decided(TWO_NODES, window)
    near_L = crossed(table_RLE, TWO_NODES.nodes_R, window)
    realised_L = par(whole_loads(window.heat_TLE, after, table_RLE, window.source_RLE))
    expected_L = np.maximum(realised_L, [verdict.noise_floor for verdict in near.verdicts])
    np.testing.assert_allclose(expected_L, [verdict.par_planned for verdict in near.verdicts], atol=1e-4)
    monkeypatch.setattr(decision_module, "localised", lambda change, *_: change)
    far, (same, far_RLE) = decided(TWO_NODES, window)
    np.testing.assert_array_equal(after.phy2log_LRS, same.phy2log_LRS)
    assert np.mean(near_L) < np.mean(crossed(far_RLE, TWO_NODES.nodes_R, window)) - fewer
    for near_verdict, far_verdict, fraction in zip(near.verdicts, far.verdicts, near_L, strict=True):
        # Whole tokens are sampled differently for different tables.
        assert near_verdict.par_planned <= far_verdict.par_planned + 1e-3
        assert f"{fraction:.0%} of its tokens leave their node" in near_verdict.reason


def test_a_single_node_has_no_crossings_and_unsolved_tables_follow_the_fixed_rule() -> None:
    flat, _ = decided(Topology.flat(RANKS))
    assert not any("leave their node" in verdict.reason for verdict in flat.verdicts)
    _, (after, table_RLE) = decided(TWO_NODES, solve_tables=False)
    np.testing.assert_array_equal(table_RLE, after.default_log2phy())


def test_ranks_that_share_tokens_keep_one_table() -> None:
    topology = Topology(EACH // 4, np.array([0, 0, 1, 2, 2, 3, 3, 4]))
    node_R, node_G = topology.nodes()
    assert node_R.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert node_G.tolist() == [0, 0, -1, 1, 1]
    decision, _ = decided(topology)
    assert decision.layers
    for changed in decision.layers:
        for group in range(5):
            table_XE = changed.log2phy_RE[topology.token_groups_R == group]
            assert (table_XE == table_XE[0]).all()


def test_gaps_in_node_numbers_are_closed() -> None:
    node_R, node_G = Topology(np.array([70000, 3, 70000, 9]), np.array([5, 1, 5, 1])).nodes()
    assert node_R.tolist() == [2, 0, 2, 1]
    assert node_G.tolist() == [-1, 2]


@pytest.mark.parametrize("policy", ["deepseek", "flashlb"])
def test_groups_of_experts_stay_on_one_node(policy: str) -> None:
    decision, (after, table_RLE) = decided(TWO_NODES, policy=policy, expert_groups=GROUPS)
    assert len(decision.layers) == LAYERS
    assert decision.par_planned < decision.par_seen - 0.1
    for layer in range(LAYERS):
        where = nodes_of_experts(after, layer)
        for group in range(GROUPS):
            assert len(set.union(*where[group * 4 : group * 4 + 4])) == 1
        assert sum(node == {0} for node in where) == EXPERTS // 2
    if policy == "deepseek":
        np.testing.assert_array_equal(table_RLE, after.default_log2phy())


def test_warm_decisions_keep_each_group_on_one_node() -> None:
    _, placed = decided(TWO_NODES, expert_groups=GROUPS)
    decision, (after, _) = decided(TWO_NODES, window_of(6), placed, expert_groups=GROUPS, move_price=0.0)
    assert decision.moves > 0
    for layer in range(LAYERS):
        where = nodes_of_experts(after, layer)
        for group in range(GROUPS):
            assert len(set.union(*where[group * 4 : group * 4 + 4])) == 1
        assert sum(node == {0} for node in where) == EXPERTS // 2


@pytest.mark.parametrize(
    ("nodes", "groups", "why"),
    [
        (EACH // 4, 5, "32 experts in 5 groups cannot be spread evenly over 2 nodes"),
        (EACH // 3, 8, "32 experts in 8 groups cannot be spread evenly over 3 nodes"),
        (np.array([0, 0, 0, 1, 1, 1, 1, 1]), 8, "over 2 nodes (ranks per node: 3 to 5, slots per rank: 5)"),
        (EACH, 8, "over 8 nodes (ranks per node: 1, slots per rank: 5)"),
    ],
)
def test_groups_that_cannot_stay_together_are_reported(nodes: np.ndarray, groups: int, why: str) -> None:
    topology = Topology(nodes, EACH)
    grouped, grouped_plan = decided(topology, expert_groups=groups)
    _, unasked = decided(topology)
    assert grouped.layers
    assert all(why in grouped.verdicts[changed.layer].reason for changed in grouped.layers)
    np.testing.assert_array_equal(grouped_plan[0].phy2log_LRS, unasked[0].phy2log_LRS)
    one_node, _ = decided(Topology.flat(RANKS), expert_groups=5)
    assert not any("any node" in verdict.reason for verdict in one_node.verdicts)
