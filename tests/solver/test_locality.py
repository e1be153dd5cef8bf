"""Tables keep tokens on their node without raising the PAR, and each redirection is the best one."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from eplb_core.placement import check_log2phy
from eplb_core.solver.model import EVEN, RULE, SOLVED, Candidate, Layer, SearchParams, episodes_of
from eplb_core.solver.topology import (
    _best_home_slot,
    _list_sources,
    _routed_loads,
    crossing_share,
    localised,
)
from tests.solver.layers_of import Case, cases, shares_of_sources
from tests.solver.placed_layer import PlacedLayer, deployed_on
from tests.solver.slow import topology as slow

SETTINGS = settings(max_examples=50)
SEEDS = st.integers(0, 2**32 - 1)
KINDS = st.sampled_from(("uniform", "uneven", "silent"))


class OnNodes:
    """A placed layer on several nodes, with the engines' tables. Some sources span several nodes."""

    def __init__(self, case: Case, sources: int, nodes: int, kind: str, seed: int) -> None:
        self.placed = PlacedLayer(case, 1.0, seed)
        self.phy2log_RS = self.placed.phy2log_RS
        generator = np.random.default_rng(seed)
        node_R = generator.integers(0, nodes, case.ranks).astype(np.int32)
        node_G = generator.integers(-1, nodes, sources).astype(np.int32)
        share_GE = shares_of_sources(sources, case.experts, kind, seed)
        deployed = deployed_on(self.phy2log_RS, share_GE, None, node_R, node_G)
        self.layer = Layer(self.placed.heat32, deployed)
        self.rule = Candidate(self.phy2log_RS, deployed.log2phy_GE, 0.0, 0)

    def crossing(self, candidate: Candidate) -> float:
        heat, deployed = self.layer
        crossing = crossing_share(candidate, heat.episodes, deployed, SOLVED)
        if deployed.node_R.any():
            arrays = deployed.share_GE, heat.mean_E, deployed.node_G, deployed.node_R
            expected = slow.crossing(candidate.log2phy_GE, *arrays, self.phy2log_RS.shape[1])
            assert crossing == pytest.approx(expected, abs=1e-5)
        return crossing

    def peak(self, table_GE: np.ndarray) -> float:
        share_GE = self.layer.deployed.share_GE.astype(float)
        return slow.peak_of(self.phy2log_RS, table_GE, *self.placed.heat, share_GE)


@SETTINGS
@given(cases(), st.integers(1, 9), st.integers(1, 3), KINDS, SEEDS)
def test_fewer_tokens_cross_nodes_and_the_peak_does_not_rise(
    case: Case, sources: int, nodes: int, kind: str, seed: int
) -> None:
    scene = OnNodes(case, sources, nodes, kind, seed)
    result = localised(
        scene.rule, scene.layer.heat.episodes, scene.layer.deployed, SearchParams(tables=SOLVED)
    )
    for table_E in result.log2phy_GE:
        check_log2phy(table_E, scene.phy2log_RS)
    rounding = 1e-5 * case.ranks
    assert scene.peak(result.log2phy_GE) <= scene.peak(scene.rule.log2phy_GE) + rounding
    assert scene.crossing(result) <= scene.crossing(scene.rule) + 1e-6
    if not scene.layer.deployed.node_R.any():
        assert result is scene.rule
    elif case.heat_NE.any():
        assert result.par == pytest.approx(scene.peak(result.log2phy_GE), abs=rounding)


@SETTINGS
@given(cases(most_ranks=6, most_slots=4), st.integers(1, 6), KINDS, st.sampled_from((0.0, 0.05)), SEEDS)
@example(Case(3, 1, np.array([[85.0]])), 3, "uniform", 0.0, 155)
def test_a_share_reaches_its_home_node_by_the_best_redirection(
    case: Case, sources: int, kind: str, room: float, seed: int
) -> None:
    scene = OnNodes(case, sources, 2, kind, seed)
    heat, deployed = scene.layer
    table_GE = scene.rule.log2phy_GE
    limit = scene.peak(table_GE) + room
    rounding = 1e-5 * case.ranks
    routed = _routed_loads(scene.phy2log_RS, table_GE, heat.episodes, deployed)
    for expert, source in itertools.product(range(case.experts), range(sources)):
        home = deployed.node_G[source]
        if home < 0 or deployed.node_R[table_GE[source, expert] // case.slots] == home:
            continue
        _list_sources(routed.tables.chosen_EG[expert], routed.first_P, routed.next_G)
        new_slot, partner = _best_home_slot(routed, deployed, expert, source, limit)
        redirections = slow.redirections(
            scene.phy2log_RS, table_GE, source, expert, deployed.node_G, deployed.node_R
        )
        peaks = {choice: scene.peak(trial_GE) for choice, trial_GE in redirections}
        lowest = min(peaks.values(), default=np.inf)
        if new_slot < 0:
            assert lowest > limit - rounding
        else:
            assert peaks[new_slot, partner] == pytest.approx(lowest, abs=rounding)
            assert peaks[new_slot, partner] <= limit + rounding


def test_sources_with_equal_shares_swap_replicas_so_that_both_use_their_home_node() -> None:
    phy2log_RS = np.array([[0, 1], [2, 3], [0, 4], [5, 6]], dtype=np.int32)
    heat = episodes_of(np.ones((2, 7)), 4)
    log2phy_GE = np.array([[4, 1, 2, 3, 5, 6, 7], [0, 1, 2, 3, 5, 6, 7]], dtype=np.int32)
    share_GE = np.full((2, 7), 0.5, dtype=np.float32)
    node_R = np.array([0, 0, 1, 1], dtype=np.int32)
    current = deployed_on(phy2log_RS, share_GE, log2phy_GE, node_R, np.array([0, 1], dtype=np.int32))
    candidate = Candidate(phy2log_RS, log2phy_GE, 1.5, 0)
    near = localised(candidate, heat, current, SearchParams(tables=SOLVED))
    assert near.log2phy_GE[:, 0].tolist() == [0, 4]
    assert crossing_share(candidate, heat, current, SOLVED) == pytest.approx(4 / 7)
    assert crossing_share(near, heat, current, SOLVED) == pytest.approx(3 / 7)
    assert crossing_share(candidate, heat, current, EVEN) == 0.0
    for tables in (EVEN, RULE):
        assert localised(candidate, heat, current, SearchParams(tables=tables)) is candidate
    flat = current._replace(node_R=np.zeros(4, dtype=np.int32), node_G=np.zeros(2, dtype=np.int32))
    assert localised(candidate, heat, flat, SearchParams(tables=SOLVED)) is candidate
    assert crossing_share(candidate, heat, flat, SOLVED) == 0.0
