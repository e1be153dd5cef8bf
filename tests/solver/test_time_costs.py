"""Times match the slow twins; tables that lower the time are rated exactly and may leave replicas unused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eplb_core.placement import Placement, check_log2phy
from eplb_core.solver.evaluation import peak_of_two_changed, top_ranks_of
from eplb_core.solver.tables import slots_by_expert
from eplb_core.solver.time_costs import (
    _note_move,
    cool_tables,
    even_tables,
    mean_slowest,
    one_replica_each,
    rank_us,
    replica_counts_to_try,
    split_us,
    with_all_slots_used,
)
from tests.solver.layers_of import Case, cases, shares_of_sources
from tests.solver.slow import time as plain_time
from tests.solver.time_curves import CURVE, CURVES, TIMED_KINDS

TOKENS_ALONE = np.array([0.0, 0.0, 0.0, 1.0])
SHARES = st.tuples(st.integers(1, 5), st.sampled_from(("uniform", "skewed", "silent")), st.integers(0, 99))


def steps_of(heat_NE: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens ``[E, N]`` and step weights; all steps with tokens have equal weight."""
    busy_N = heat_NE.sum(axis=1) > 0
    tokens_EN = np.ascontiguousarray(heat_NE.T, dtype=np.float32)
    return tokens_EN, (busy_N / max(1, busy_N.sum())).astype(np.float32)


def linear(case: Case) -> np.ndarray:
    return Placement.linear(1, case.experts, case.ranks, case.slots).phy2log_LRS[0].copy()


@given(cases(kinds=TIMED_KINDS), CURVES, st.integers(0, 99))
def test_the_time_of_the_slowest_rank_matches_the_slow_twin(case, curve, seed):
    phy2log_RS = linear(case)
    share_RS = np.random.default_rng(seed).random(phy2log_RS.shape).astype(np.float32)
    share_RS[share_RS < 0.2] = 0
    us = mean_slowest(*steps_of(case.heat_NE), phy2log_RS, share_RS, curve)
    twin_us = plain_time.mean_slowest(case.heat_NE, phy2log_RS, share_RS, curve)
    assert us == pytest.approx(twin_us, rel=1e-4)


@given(cases(kinds=TIMED_KINDS), CURVES, st.integers(1, 4))
def test_several_replicas_never_take_less_total_time_than_one(case, curve, replicas):
    tokens_EN, _ = steps_of(case.heat_NE)
    alone = split_us(tokens_EN, np.ones(case.experts, dtype=np.int32), curve)
    shared = split_us(tokens_EN, np.full(case.experts, replicas, dtype=np.int32), curve)
    assert (shared >= alone * (1 - 1e-5)).all()


@given(cases(kinds=TIMED_KINDS), CURVES)
def test_replica_counts_fit_the_slots_and_the_ranks(case, curve):
    steps = steps_of(case.heat_NE)
    candidates = replica_counts_to_try(*steps, curve, case.ranks, case.slots, 1.0)
    assert candidates[0].tolist() == [1] * case.experts
    for replicas_E in candidates:
        assert replicas_E.sum() <= case.ranks * case.slots
        assert replicas_E.max() <= case.ranks
        full_E = with_all_slots_used(*steps, curve, replicas_E, case.ranks, case.slots)
        assert full_E.sum() == case.ranks * case.slots
        assert (full_E >= replicas_E).all()
        assert full_E.max() <= case.ranks


def test_no_expert_has_replicas_if_reading_dominates():
    steps = steps_of(np.full((3, 8), 5.0))
    assert [counts.tolist() for counts in replica_counts_to_try(*steps, CURVE, 4, 3, 1.0)] == [[1] * 8]
    hot = steps_of(np.array([[5000.0, *[5] * 7]]))
    assert replica_counts_to_try(*hot, CURVE, 4, 3, 1.0)[-1][0] == 4
    assert replica_counts_to_try(*hot, np.array([0.0, 9.0, 9.0, 0.0]), 4, 3, 1.0)[-1].sum() == 8


@given(cases(kinds=TIMED_KINDS), CURVES, SHARES)
def test_cooled_tables_are_valid_and_never_slower(case, curve, sources):
    phy2log_RS = linear(case)
    share_GE = shares_of_sources(sources[0], case.experts, *sources[1:])
    chosen_GE = even_tables(*slots_by_expert(phy2log_RS, case.experts), share_GE)
    before = plain_time.through_tables(case.heat_NE, phy2log_RS, chosen_GE, share_GE, curve)
    cool_tables(phy2log_RS, chosen_GE, *steps_of(case.heat_NE), share_GE, curve, 64)
    after = plain_time.through_tables(case.heat_NE, phy2log_RS, chosen_GE, share_GE, curve)
    for table_E in chosen_GE:
        check_log2phy(table_E, phy2log_RS)
    assert after <= before * (1 + 1e-4)


@given(cases(kinds=TIMED_KINDS), CURVES, st.integers(0, 99))
def test_the_time_after_a_move_matches_the_slow_twin(case, curve, seed):
    rng = np.random.default_rng(seed)
    phy2log_RS = linear(case)
    replicas_E = np.bincount(phy2log_RS.ravel(), minlength=case.experts)
    if replicas_E.max() == 1 or not case.heat_NE.any():
        return
    expert = int(replicas_E.argmax())
    slot, target_slot = map(int, rng.permutation(np.flatnonzero(phy2log_RS.ravel() == expert))[:2])
    share_P = rng.random(phy2log_RS.size).astype(np.float32)
    tokens_EN, weight_N = steps_of(case.heat_NE)
    tops = top_ranks_of(rank_us(tokens_EN, phy2log_RS, share_P.reshape(phy2log_RS.shape), curve))
    moved = np.float32(share_P[slot] * rng.choice([0.5, 1.0]))
    remainder = np.float32(share_P[slot] - moved)
    changed_RN = np.empty_like(tops.load_RN)
    _note_move(
        tokens_EN[expert], tops, curve, case.slots, slot, target_slot, share_P, remainder, moved, changed_RN
    )
    rank = slot // case.slots
    target_rank = target_slot // case.slots
    us = peak_of_two_changed(tops, weight_N, rank, target_rank, changed_RN[rank], changed_RN[target_rank])
    share_P[slot], share_P[target_slot] = remainder, share_P[target_slot] + moved
    twin_us = plain_time.mean_slowest(case.heat_NE, phy2log_RS, share_P.reshape(phy2log_RS.shape), curve)
    assert curve[0] + us == pytest.approx(twin_us, rel=1e-4)


def test_second_replicas_stay_unused_if_reading_dominates():
    phy2log_RS = np.array([[0, 1], [2, 0]], dtype=np.int32)
    share_GE = np.full((2, 3), 0.5, dtype=np.float32)
    chosen_GE = np.array([[0, 1, 2], [3, 1, 2]], dtype=np.int32)
    cool_tables(phy2log_RS, chosen_GE, *steps_of(np.array([[4.0, 0, 4]])), share_GE, CURVE, 8)
    assert chosen_GE[0, 0] == chosen_GE[1, 0]
    cool_tables(phy2log_RS, chosen_GE, *steps_of(np.array([[4000.0, 40, 40]])), share_GE, CURVE, 8)
    assert chosen_GE[0, 0] != chosen_GE[1, 0]


def test_single_replicas_go_to_the_rank_with_the_least_load():
    phy2log_RS = np.array([[0, 1], [0, 2]], dtype=np.int32)
    used_RE = one_replica_each(phy2log_RS, 3, np.array([2.0, 9.0, 1.0], dtype=np.float32))
    assert used_RE.tolist() == [[False, True, False], [True, False, True]]


def test_sources_are_split_as_evenly_as_possible():
    placement_RS = Placement.linear(1, 1, 3, 1).phy2log_LRS[0].copy()
    share_GE = np.array([[0.4], [0.1], [0.3], [0.2]], dtype=np.float32)
    tables_GE = even_tables(*slots_by_expert(placement_RS, 1), share_GE)
    received_P = plain_time.shares_of(placement_RS, tables_GE, share_GE)
    assert sorted(received_P.ravel().round(3).tolist()) == [0.3, 0.3, 0.4]


def test_tables_also_lower_the_time_of_a_linear_curve():
    phy2log_RS = np.array([[0, 1], [2, 0]], dtype=np.int32)
    share_GE = np.full((4, 3), 0.25, dtype=np.float32)
    chosen_GE = np.zeros((4, 3), dtype=np.int32) + np.array([0, 1, 2], dtype=np.int32)
    heat_NE = np.array([[100.0, 50, 0]])
    cool_tables(phy2log_RS, chosen_GE, *steps_of(heat_NE), share_GE, TOKENS_ALONE, 8)
    assert plain_time.through_tables(heat_NE, phy2log_RS, chosen_GE, share_GE, TOKENS_ALONE) == 75
