"""Tokens stay on their node where that costs no balance: no ratio rises, and each step is the best of all."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from eplb_service.placement import check_log2phy
from eplb_service.solver.evaluation import loads_in_episodes
from eplb_service.solver.model import EVEN, RULE, SOLVED, Candidate, Layer, SearchParams, heat_of
from eplb_service.solver.tables import fixed_rule, slot_shares, slots_by_expert
from eplb_service.solver.topology import (
    _best_local_move,
    _crossing,
    _hottest_of_others,
    _localise_tables,
    _Parts,
    crossing_share,
    localised,
)
from tests.solver.layers_of import Case, cases, shares_of_sources
from tests.solver.placed_layer import PlacedLayer, deployed_on
from tests.solver.slow import topology as slow
from tests.solver.slow.heat import rank_series

SETTINGS = settings(max_examples=50)
SEEDS = st.integers(0, 2**32 - 1)
KINDS = st.sampled_from(("uniform", "uneven", "silent"))
SMALLEST_GAIN = 1e-5


class OnNodes:
    """A placed layer whose ranks and sources are on nodes, some sources on several; the engines' tables."""

    def __init__(self, case: Case, sources: int, nodes: int, kind: str, seed: int) -> None:
        self.layer = PlacedLayer(case, 1.0, seed)
        self.case, self.phy2log_RS = case, self.layer.phy2log_RS
        generator = np.random.default_rng(seed)
        self.node_R = generator.integers(0, nodes, case.ranks).astype(np.int32)
        self.node_G = generator.integers(-1, nodes, sources).astype(np.int32)
        self.share_GE = shares_of_sources(sources, case.experts, kind, seed)
        self.first_E1, self.slot_P = slots_by_expert(self.phy2log_RS, case.experts)
        self.rule_GE = fixed_rule(self.first_E1, self.slot_P, sources)

    def near(self) -> tuple[np.ndarray, float]:
        layer = self.layer
        return _localise_tables(
            self.phy2log_RS,
            self.rule_GE,
            layer.heat32,
            self.share_GE,
            self.node_G,
            self.node_R,
            1,
        )

    def crossing(self, table_GE: np.ndarray) -> float:
        arrays = table_GE, self.share_GE, self.layer.heat32.mean_E, self.node_G, self.node_R, self.case.slots
        found = _crossing(*arrays)
        assert found == pytest.approx(slow.crossing(*arrays), abs=1e-5)
        return found

    def peak(self, table_GE: np.ndarray) -> float:
        return slow.peak_of(self.phy2log_RS, table_GE, *self.layer.heat, self.share_GE.astype(float))

    def parts(self, expert: int) -> _Parts:
        layer = self.layer
        share_RS = slot_shares(self.phy2log_RS, self.rule_GE, self.share_GE)
        load_RN = loads_in_episodes(self.phy2log_RS, share_RS, layer.scaled_EN)
        np.testing.assert_allclose(
            load_RN, rank_series(self.phy2log_RS, share_RS, layer.heat[0]), rtol=1e-4, atol=1e-4
        )
        replica_K = self.slot_P[self.first_E1[expert] : self.first_E1[expert + 1]]
        holds_R = (self.phy2log_RS == expert).any(axis=1)
        others_N = _hottest_of_others(load_RN, np.flatnonzero(holds_R), 1)
        np.testing.assert_array_equal(others_N, load_RN[~holds_R].max(axis=0, initial=0))
        return _Parts(
            self.rule_GE[:, expert].copy(),
            self.share_GE[:, expert].copy(),
            self.node_G,
            np.repeat(self.node_R, self.case.slots),
            replica_K,
            layer.heat32.mean_E[expert],
            layer.scaled_EN[expert],
            layer.share_N,
            load_RN,
            others_N,
            1,
        )


@SETTINGS
@given(cases(), st.integers(1, 9), st.integers(1, 3), KINDS, SEEDS)
def test_tokens_come_home_and_no_peak_rises(
    case: Case, sources: int, nodes: int, kind: str, seed: int
) -> None:
    given_ = OnNodes(case, sources, nodes, kind, seed)
    found_GE, par = given_.near()
    for table_E in found_GE:
        check_log2phy(table_E, given_.phy2log_RS)
    rounding = 1e-5 * case.ranks
    assert given_.peak(found_GE) <= given_.peak(given_.rule_GE) + rounding
    if case.heat_NE.any():
        assert par == pytest.approx(given_.peak(found_GE), abs=rounding)
    assert given_.crossing(found_GE) <= given_.crossing(given_.rule_GE) + 1e-6
    if nodes == 1:
        np.testing.assert_array_equal(found_GE, given_.rule_GE)


@SETTINGS
@given(cases(most_ranks=6, most_slots=4), st.integers(1, 6), KINDS, st.sampled_from((0.0, 0.05)), SEEDS)
@example(Case(3, 1, np.array([[85.0]])), 3, "uniform", 0.0, 155)
def test_a_part_gets_home_the_best_of_all_ways(
    case: Case, sources: int, kind: str, room: float, seed: int
) -> None:
    given_ = OnNodes(case, sources, 2, kind, seed)
    peak = given_.peak(given_.rule_GE)
    limit, rounding = peak + room, 1e-5 * case.ranks
    share_GE = given_.share_GE.astype(float)
    for expert in range(case.experts):
        parts = given_.parts(expert)
        for source in range(sources):
            to, back, found = _best_local_move(parts, source, peak, limit)
            ways = list(
                slow.ways_home(
                    given_.phy2log_RS, given_.rule_GE, share_GE, source, expert, given_.node_G, given_.node_R
                )
            )
            peaks = {
                (target, other): given_.peak(tried_GE)
                for tried_GE, target, other, won in ways
                if won * parts.mean > SMALLEST_GAIN * 1.01
            }
            lowest = min(peaks.values(), default=np.inf)
            if to < 0:
                assert lowest > limit - rounding
                continue
            assert (to, back) in [(target, other) for _, target, other, _ in ways]
            if peaks:
                assert found <= limit + rounding
                assert found == pytest.approx(lowest, abs=rounding)
                assert peaks.get((to, back), lowest) == pytest.approx(lowest, abs=rounding)


def test_equal_sources_trade_replicas_so_that_both_are_at_home() -> None:
    phy2log_RS = np.array([[0, 1], [2, 3], [0, 4], [5, 6]], dtype=np.int32)
    heat = heat_of(np.ones((2, 7)), 4)
    log2phy_GE = np.array([[4, 1, 2, 3, 5, 6, 7], [0, 1, 2, 3, 5, 6, 7]], dtype=np.int32)
    share_GE = np.full((2, 7), 0.5, dtype=np.float32)
    node_R = np.array([0, 0, 1, 1], dtype=np.int32)
    serving = deployed_on(phy2log_RS, share_GE, log2phy_GE, node_R, np.array([0, 1], dtype=np.int32))
    candidate = Candidate(phy2log_RS, log2phy_GE, 1.5, 0)
    near = localised(candidate, Layer(heat, serving), SearchParams(tables=SOLVED))
    assert near.log2phy_GE[:, 0].tolist() == [0, 4]
    assert crossing_share(candidate, Layer(heat, serving), SOLVED) == pytest.approx(4 / 7)
    assert crossing_share(near, Layer(heat, serving), SOLVED) == pytest.approx(3 / 7)
    assert crossing_share(candidate, Layer(heat, serving), EVEN) == 0.0
    for tables in (EVEN, RULE):
        assert localised(candidate, Layer(heat, serving), SearchParams(tables=tables)) is candidate
    flat = serving._replace(node_R=np.zeros(4, dtype=np.int32), node_G=np.zeros(2, dtype=np.int32))
    assert localised(candidate, Layer(heat, flat), SearchParams(tables=SOLVED)) is candidate
    assert crossing_share(candidate, Layer(heat, flat), SOLVED) == 0.0
