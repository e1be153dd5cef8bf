"""Tables that take least time: never slower than they began, judged exactly, and free to leave replicas unused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eplb_service.placement import Placement, check_log2phy
from eplb_service.solver.search.top_ranks import top_ranks_of
from eplb_service.solver.time.evaluation import Curve, rank_us, steps_of
from eplb_service.solver.time.tables import (
    _time_of_move,
    cool_tables,
    even_tables,
    one_replica_each,
    used_slots,
)
from tests.solver.layers_of import cases, shares_of_sources
from tests.solver.slow import time as plain_time
from tests.solver.time.test_evaluation import CURVE, CURVES, TIMED_KINDS, linear

SHARES = st.tuples(st.integers(1, 5), st.sampled_from(("uniform", "skewed", "silent")), st.integers(0, 99))


@given(cases(kinds=TIMED_KINDS), CURVES, SHARES)
def test_cooled_tables_are_valid_and_never_slower(case, curve, sources):
    phy2log_RS = linear(case)
    share_GE = shares_of_sources(sources[0], case.experts, *sources[1:])
    used_RE = np.zeros((case.ranks, case.experts), dtype=bool)
    used_RE[np.arange(case.ranks)[:, None], phy2log_RS] = True
    chosen_GE = even_tables(*used_slots(phy2log_RS, used_RE), share_GE)
    before = plain_time.through_tables(case.heat_NE, phy2log_RS, chosen_GE, share_GE, curve)
    cool_tables(phy2log_RS, chosen_GE, steps_of(case.heat_NE), share_GE, curve, 64)
    after = plain_time.through_tables(case.heat_NE, phy2log_RS, chosen_GE, share_GE, curve)
    for table_E in chosen_GE:
        check_log2phy(table_E, phy2log_RS)
    assert after <= before * (1 + 1e-4)


@given(cases(kinds=TIMED_KINDS), CURVES, st.integers(0, 99))
def test_a_move_is_judged_as_the_plain_definition_does(case, curve, seed):
    rng = np.random.default_rng(seed)
    phy2log_RS = linear(case)
    replicas_E = np.bincount(phy2log_RS.ravel(), minlength=case.experts)
    if replicas_E.max() == 1 or not case.heat_NE.any():
        return
    expert = int(replicas_E.argmax())
    own, other = map(int, rng.permutation(np.flatnonzero(phy2log_RS.ravel() == expert))[:2])
    share_P = rng.random(phy2log_RS.size).astype(np.float32)
    steps = steps_of(case.heat_NE)
    tops = top_ranks_of(rank_us(steps, phy2log_RS, share_P.reshape(phy2log_RS.shape), curve))
    moved = np.float32(share_P[own] * rng.choice([0.5, 1.0]))
    left = np.float32(share_P[own] - moved)
    found = _time_of_move(steps, tops, curve, expert, own, other, share_P, left, moved, case.slots)
    share_P[own], share_P[other] = left, share_P[other] + moved
    plain = plain_time.mean_slowest(case.heat_NE, phy2log_RS, share_P.reshape(phy2log_RS.shape), curve)
    assert curve.floor + found == pytest.approx(plain, rel=1e-4)


def test_where_reading_takes_the_time_a_second_replica_is_left_unused():
    phy2log_RS = np.array([[0, 1], [2, 0]], dtype=np.int32)
    share_GE = np.full((2, 3), 0.5, dtype=np.float32)
    chosen_GE = np.array([[0, 1, 2], [3, 1, 2]], dtype=np.int32)
    cool_tables(phy2log_RS, chosen_GE, steps_of(np.array([[4.0, 0, 4]])), share_GE, CURVE, 8)
    assert chosen_GE[0, 0] == chosen_GE[1, 0]
    hot = steps_of(np.array([[4000.0, 40, 40]]))
    cool_tables(phy2log_RS, chosen_GE, hot, share_GE, CURVE, 8)
    assert chosen_GE[0, 0] != chosen_GE[1, 0]


def test_single_replicas_go_to_the_rank_that_has_least():
    phy2log_RS = np.array([[0, 1], [0, 2]], dtype=np.int32)
    used_RE = one_replica_each(phy2log_RS, 3, np.array([2.0, 9.0, 1.0], dtype=np.float32))
    assert used_RE.tolist() == [[False, True, False], [True, False, True]]


def test_sources_are_split_as_evenly_as_they_go():
    placement = Placement.linear(1, 1, 3, 1).phy2log_LRS[0].copy()
    share_GE = np.array([[0.4], [0.1], [0.3], [0.2]], dtype=np.float32)
    first_E1, slot_P = used_slots(placement, np.ones((3, 1), dtype=bool))
    received_P = plain_time.shares_of(placement, even_tables(first_E1, slot_P, share_GE), share_GE)
    assert sorted(received_P.ravel().round(3).tolist()) == [0.3, 0.3, 0.4]


def test_a_curve_of_tokens_alone_is_lowered_too():
    phy2log_RS = np.array([[0, 1], [2, 0]], dtype=np.int32)
    share_GE = np.full((4, 3), 0.25, dtype=np.float32)
    chosen_GE = np.zeros((4, 3), dtype=np.int32) + np.array([0, 1, 2], dtype=np.int32)
    heat_NE = np.array([[100.0, 50, 0]])
    cool_tables(phy2log_RS, chosen_GE, steps_of(heat_NE), share_GE, Curve(0.0, 0.0, 0.0, 1.0), 8)
    assert (
        plain_time.through_tables(heat_NE, phy2log_RS, chosen_GE, share_GE, Curve(0.0, 0.0, 0.0, 1.0)) == 75
    )
