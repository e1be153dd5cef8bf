"""Shares are as good as linear programming finds, and entries make them come true; never worse than dealing round."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from eplb_service.placement import check_log2phy
from eplb_service.solver import dealing
from eplb_service.solver.construction import assignment_of, hottest_rank
from eplb_service.solver.layer import _TRUSTS, _choose_trust
from eplb_service.solver.model import DEALT, Layer, SearchParams
from eplb_service.solver.tables import slot_shares, slots_by_expert
from eplb_service.solver.window import halves_of
from tests.solver.layers_of import Case, cases, shares_of_sources
from tests.solver.placed_layer import PlacedLayer, deployed_on
from tests.solver.slow import tables as slow
from tests.solver.slow.heat import rank_risks

SETTINGS = settings(max_examples=60)
SEEDS = st.integers(0, 2**32 - 1)
KINDS = st.sampled_from(("uniform", "uneven", "silent"))
SMALL = cases(most_ranks=5, most_slots=3, kinds=("even", "skewed", "one hot", "sparse"))


class Dealt:
    """A placed layer and entries that are each a source."""

    def __init__(self, case: Case, z: float, sources: int, width: int, kind: str, seed: int) -> None:
        self.layer = PlacedLayer(case, z, seed)
        self.phy2log_RS = self.layer.phy2log_RS
        self.width = width
        share_GE = shares_of_sources(sources, case.experts, kind, seed)
        self.share_VE = np.repeat(share_GE / np.float32(width), width, axis=0)
        self.first_E1, self.slot_P = slots_by_expert(self.phy2log_RS, case.experts)
        self.rule_VE = slow.fixed_rule(self.phy2log_RS, sources * width, case.experts, width)

    def solver_layer(self) -> Layer:
        deployed = deployed_on(self.phy2log_RS, self.share_VE, self.rule_VE.astype(np.int32))
        return Layer(self.layer.heat32, deployed)

    def par(self, chosen_VE: np.ndarray) -> float:
        return slow.tables_par(self.phy2log_RS, chosen_VE, *self.layer.heat, self.share_VE.astype(float))

    def risks(self, chosen_VE: np.ndarray) -> np.ndarray:
        share_RS = slow.slot_shares(self.phy2log_RS, chosen_VE, self.share_VE.astype(float))
        return rank_risks(self.phy2log_RS, share_RS, *self.layer.heat, self.layer.z)


def least_peak(phy2log_RS: np.ndarray, mean_E: np.ndarray) -> float:
    """The lowest load of the hottest rank that any shares give, by linear programming."""
    ranks, slots = phy2log_RS.shape
    expert_P, rank_P = phy2log_RS.ravel(), np.repeat(np.arange(ranks), slots)
    objective = np.append(np.zeros(expert_P.size), 1.0)
    loads = np.hstack([(rank_P == np.arange(ranks)[:, None]) * mean_E[expert_P], -np.ones((ranks, 1))])
    whole = np.hstack([expert_P == np.arange(mean_E.size)[:, None], np.zeros((mean_E.size, 1))])
    found = linprog(
        objective, A_ub=loads, b_ub=np.zeros(ranks), A_eq=whole, b_eq=np.ones(mean_E.size), method="highs"
    )
    return float(found.fun)


@SETTINGS
@given(cases(most_ranks=7, most_slots=4), SEEDS)
def test_shares_are_as_good_as_linear_programming_finds(case: Case, seed: int) -> None:
    layer = PlacedLayer(case, 0.0, seed)
    first_E1, slot_P = slots_by_expert(layer.phy2log_RS, case.experts)
    assignment = layer.assignment()
    dealing._cool_shares(assignment, layer.heat32, first_E1, slot_P, 0.0)
    share_RS = assignment.share_ER[layer.phy2log_RS, np.arange(case.ranks)[:, None]]
    assert share_RS.min() >= -1e-5
    np.testing.assert_allclose(
        np.bincount(layer.phy2log_RS.ravel(), share_RS.ravel(), minlength=case.experts), 1.0, atol=1e-4
    )
    found = rank_risks(layer.phy2log_RS, share_RS, *layer.heat, 0.0).max()
    assert found <= least_peak(layer.phy2log_RS, layer.heat32.mean_E.astype(float)) * 1.01 + 1e-4


@SETTINGS
@given(SMALL, SEEDS)
def test_shares_that_weigh_deviations_lift_no_peak(case: Case, seed: int) -> None:
    layer = PlacedLayer(case, 1.0, seed)
    assignment = layer.assignment()
    before = layer.risks().max()
    first_E1, slot_P = slots_by_expert(layer.phy2log_RS, case.experts)
    dealing._cool_shares(assignment, layer.heat32, first_E1, slot_P, 1.0)
    share_RS = assignment.share_ER[layer.phy2log_RS, np.arange(case.ranks)[:, None]].astype(float)
    assert rank_risks(layer.phy2log_RS, share_RS, *layer.heat, 1.0).max() <= before + layer.rounding


@SETTINGS
@given(SMALL, st.integers(1, 4), st.sampled_from((2, 4, 8)), KINDS, SEEDS)
def test_entries_make_shares_come_true(case: Case, sources: int, width: int, kind: str, seed: int) -> None:
    given_ = Dealt(case, 0.0, sources, width, kind, seed)
    generator = np.random.default_rng(seed)
    share_P = generator.random(case.ranks * case.slots)
    total_E = np.bincount(given_.phy2log_RS.ravel(), share_P, minlength=case.experts)
    share_P = (share_P / total_E[given_.phy2log_RS.ravel()]).astype(np.float32)
    chosen_VE = dealing._deal_out(share_P, given_.share_VE, given_.first_E1, given_.slot_P, width)
    check_log2phy(chosen_VE, given_.phy2log_RS)
    realised_P = slow.slot_shares(given_.phy2log_RS, chosen_VE, given_.share_VE).ravel()
    most_E = given_.share_VE.max(axis=0)
    replicas_P = np.bincount(given_.phy2log_RS.ravel())[given_.phy2log_RS.ravel()]
    assert (np.abs(realised_P - share_P) <= replicas_P * most_E[given_.phy2log_RS.ravel()] + 1e-4).all()
    if kind == "uniform":
        # Each source deals as all do, to within an entry for each other replica.
        for g in range(sources):
            entries_P = np.bincount(
                chosen_VE[g * width : (g + 1) * width].ravel(), minlength=case.ranks * case.slots
            )
            assert (np.abs(entries_P - share_P * width) <= replicas_P + 1e-3).all()


def test_entries_alternate_and_begin_elsewhere_on_each_source() -> None:
    phy2log_RS = np.array([[0, 1], [0, 2]], dtype=np.int32)
    first_E1, slot_P = slots_by_expert(phy2log_RS, 3)
    share_VE = np.full((8, 3), 1 / 8, dtype=np.float32)
    even_P = np.array([0.5, 1, 0.5, 1], dtype=np.float32)
    chosen_VE = dealing._deal_out(even_P, share_VE, first_E1, slot_P, 4)
    assert chosen_VE[:4, 0].tolist() == [0, 2, 0, 2]
    assert chosen_VE[4:, 0].tolist() == [2, 0, 2, 0]
    assert set(chosen_VE[:, 1]) == {1}
    one_sided_P = np.array([1, 1, 0, 1], dtype=np.float32)
    assert set(dealing._deal_out(one_sided_P, share_VE, first_E1, slot_P, 4)[:, 0]) == {0}


@settings(max_examples=25)
@given(cases(most_ranks=4, most_slots=2, kinds=("even", "skewed")), st.sampled_from((2, 3)), SEEDS)
def test_two_moves_are_the_best_of_all_that_follow_each_other(case: Case, width: int, seed: int) -> None:
    given_ = Dealt(case, 0.0, 2, width, "uniform", seed)
    share_VE = (given_.share_VE * np.linspace(0.8, 1.2, len(given_.share_VE))[:, None]).astype(np.float32)
    given_.share_VE = share_VE
    chosen_VE = given_.rule_VE.astype(np.int32)
    layer = given_.layer
    shares_RS = slot_shares(given_.phy2log_RS, chosen_VE, share_VE)
    assignment = assignment_of(given_.phy2log_RS, shares_RS, layer.heat32)
    hot, hottest = hottest_rank(assignment, 0.0)
    arrays = chosen_VE, given_.first_E1, given_.slot_P, layer.heat32, share_VE, 0.0
    moves = dealing._best_two(assignment, *arrays, hot, hottest)
    lowest = lowest_by_two(given_, chosen_VE, hot)
    if moves[0][0] < 0:
        assert lowest >= hottest - dealing.SMALLEST_GAIN - layer.rounding
        return
    after_VE = chosen_VE.copy()
    ranks = {hot}
    for entry, expert, to in moves:
        after_VE[entry, expert] = to
        ranks.add(to // case.slots)
    assert given_.risks(after_VE)[sorted(ranks)].max() == pytest.approx(lowest, abs=layer.rounding)
    dealing._cool_by_two(assignment, *arrays)
    assert given_.risks(chosen_VE).max() < hottest + layer.rounding
    check_log2phy(chosen_VE, given_.phy2log_RS)


def lowest_by_two(given_: Dealt, chosen_VE: np.ndarray, hot: int) -> float:
    """The coolest that the ranks of two moves get, the second from where the first has gone; tried one by one."""
    slots = given_.phy2log_RS.shape[1]
    lowest = np.inf
    entries = list(itertools.product(range(chosen_VE.shape[0]), range(chosen_VE.shape[1])))
    for v, a in entries:
        if chosen_VE[v, a] // slots != hot:
            continue
        for there in slow.holders_of(given_.phy2log_RS, a):
            rank = there // slots
            for w, b in entries:
                if rank == hot or chosen_VE[w, b] // slots != rank:
                    continue
                for last in slow.holders_of(given_.phy2log_RS, b):
                    if last // slots == rank:
                        continue
                    tried_VE = chosen_VE.copy()
                    tried_VE[v, a], tried_VE[w, b] = there, last
                    risk_R = given_.risks(tried_VE)
                    lowest = min(lowest, max(risk_R[hot], risk_R[rank], risk_R[last // slots]))
    return lowest


@SETTINGS
@given(SMALL, st.integers(1, 5), st.sampled_from((2, 4)), KINDS, st.sampled_from(_TRUSTS), SEEDS)
def test_dealing_is_never_worse_than_round_the_replicas(
    case: Case, sources: int, width: int, kind: str, trust: float, seed: int
) -> None:
    given_ = Dealt(case, 1.0, sources, width, kind, seed)
    params = SearchParams(z=1.0, tables=DEALT, width=width, trust=trust)
    chosen_VE, par = dealing.solve_dealing(given_.phy2log_RS, given_.solver_layer(), params)
    check_log2phy(chosen_VE, given_.phy2log_RS)
    assert par == pytest.approx(given_.par(chosen_VE), rel=1e-4, abs=1e-5)
    assert par <= given_.par(given_.rule_VE) * (1 + 1e-5) + 1e-6
    if trust == 0:
        np.testing.assert_array_equal(chosen_VE, given_.rule_VE)


@pytest.mark.parametrize("lasting", [True, False])
def test_shares_are_trusted_where_the_heat_keeps_them_up(lasting: bool) -> None:
    # One expert is on both ranks, another on each: whose own is hotter decides which way the shared one should lean.
    phy2log_RS = np.array([[0, 1], [0, 2]], dtype=np.int32)
    heat_NE = np.full((16, 3), 50.0)
    heat_NE[:, 1] = 80.0
    if not lasting:
        heat_NE[8:, 1] = 20.0
    tables_VE = np.array([[0, 1, 3]] * 8, dtype=np.int32)
    deployed = deployed_on(phy2log_RS, np.full((8, 3), 1 / 8, dtype=np.float32), tables_VE)
    params = SearchParams(z=0.0, tables=DEALT, width=4)
    trust = _choose_trust(*halves_of(heat_NE, 2), phy2log_RS, deployed, params)
    assert trust == (1.0 if lasting else 0.0)
