"""Decisions for time: servable, never slower than what serves or balanced tokens, and no replica for its own sake."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_service.heat.synthetic import synthetic_heat
from eplb_service.placement import Placement
from eplb_service.solver.candidates import from_scratch
from eplb_service.solver.decision import Answer, solve_layer
from eplb_service.solver.model import EVEN, KEEP, RULE, SOLVED, Deployed, Layer, SearchParams, heat_of, homes
from eplb_service.solver.time.candidates import timed
from eplb_service.solver.time.decision import WindowHeat, _lasting_way, solve_layer_for_time
from eplb_service.solver.time.evaluation import Curve, even_us, steps_of
from eplb_service.solver.time.replicas import filled, stages
from tests.solver.asked import SEARCH, assert_servable
from tests.solver.layers_of import cases, with_bursts_of
from tests.solver.slow import time as plain_time
from tests.solver.time.test_evaluation import CURVE, CURVES, TIMED_KINDS


def deployed_of(experts: int, ranks: int, slots: int) -> Deployed:
    first = Placement.linear(1, experts, ranks, slots)
    phy2log_RS = first.phy2log_LRS[0].copy()
    log2phy_GE = np.ascontiguousarray(first.default_log2phy()[:, 0])
    share_GE = np.full((ranks, experts), 1 / ranks, dtype=np.float32)
    node = np.zeros(ranks, dtype=np.int32)
    return Deployed(phy2log_RS, log2phy_GE, share_GE, homes(phy2log_RS, experts), node, node)


def realised(heat_NE, answer_RS, log2phy_GE, deployed, tables, curve) -> float:
    if tables == EVEN:
        share_RS = 1 / np.bincount(answer_RS.ravel())[answer_RS]
        return plain_time.mean_slowest(heat_NE, answer_RS, share_RS, curve)
    return plain_time.through_tables(heat_NE, answer_RS, log2phy_GE, deployed.share_GE, curve)


@given(cases(kinds=TIMED_KINDS), CURVES, st.sampled_from((EVEN, RULE, SOLVED)), st.booleans(), st.booleans())
@settings(max_examples=60)
def test_answers_are_servable_and_never_slower(case, curve, tables, unplaced, holdout):
    deployed = deployed_of(case.experts, case.ranks, case.slots)
    params = SEARCH._replace(tables=tables, holdout=holdout, move_price=0.001)
    answer = solve_layer_for_time(
        WindowHeat(case.heat_NE, case.heat_NE), deployed, params, curve, 0.0, unplaced
    )
    assert_servable(answer, deployed.phy2log_RS, case.experts)
    before = realised(case.heat_NE, deployed.phy2log_RS, deployed.log2phy_GE, deployed, tables, curve)
    after = realised(case.heat_NE, answer.found.phy2log_RS, answer.found.log2phy_GE, deployed, tables, curve)
    assert after <= before * (1 + 1e-4)
    if case.heat_NE.any():
        scale = even_us(steps_of(case.heat_NE), curve, case.ranks)
        assert answer.found.par * scale == pytest.approx(after, rel=1e-3)
    if unplaced:
        layer = Layer(heat_of(case.heat_NE, case.ranks), deployed)
        balanced = from_scratch(layer, params)
        by_tokens = realised(case.heat_NE, balanced.phy2log_RS, balanced.log2phy_GE, deployed, tables, curve)
        assert after <= by_tokens * (1 + 1e-4)


@pytest.mark.parametrize("seed", range(4))
def test_where_experts_have_bursts_tokens_are_balanced_as_without_a_curve(seed):
    heat_NE, deployed = with_bursts_of(64, 64, seed), deployed_of(64, 8, 10)
    params = SearchParams(z=1.4, local_search_steps=500, tables=SOLVED)
    by_tokens = solve_layer(heat_NE, deployed, params, np.array([np.inf]), 0.0, True)
    answer = solve_layer_for_time(WindowHeat(heat_NE, heat_NE), deployed, params, CURVE, 0.0, True)
    assert by_tokens.trimmed == answer.trimmed
    us = [
        realised(heat_NE, one.found.phy2log_RS, one.found.log2phy_GE, deployed, SOLVED, CURVE)
        for one in (by_tokens, answer)
    ]
    assert us[1] <= us[0] * (1 + 1e-4)


def answered(
    tokens: int, slots: int, kind: str = "static", tables: int = SOLVED
) -> tuple[np.ndarray, Deployed, Answer]:
    heat_NE = synthetic_heat(kind, 64, 1, 64, tokens=tokens, top_k=4)[:, 0].astype(np.float64)
    deployed = deployed_of(64, 8, slots)
    params = SearchParams(z=1.4, local_search_steps=500, tables=tables)
    return (
        heat_NE,
        deployed,
        solve_layer_for_time(WindowHeat(heat_NE, heat_NE), deployed, params, CURVE, 0.0, True),
    )


def test_a_small_batch_leaves_redundant_slots_unused():
    _, deployed, answer = answered(64, 9)
    busy = plain_time.shares_of(answer.found.phy2log_RS, answer.found.log2phy_GE, deployed.share_GE) > 0
    assert busy.sum() == 64
    without = answered(64, 8)[2]
    assert answer.found.par <= without.found.par * 1.01


def test_a_large_batch_shares_its_hottest_experts_out():
    heat_NE, deployed, answer = answered(16384, 9)
    share_RS = plain_time.shares_of(answer.found.phy2log_RS, answer.found.log2phy_GE, deployed.share_GE)
    hottest = int(heat_NE.sum(axis=0).argmax())
    assert np.count_nonzero(share_RS[answer.found.phy2log_RS == hottest]) > 1
    assert answer.found.par < answered(16384, 8)[2].found.par


def test_a_host_that_splits_evenly_gets_replicas_of_experts_that_cost_least():
    heat_NE, _, answer = answered(64, 9, tables=EVEN)
    replicas_E = np.bincount(answer.found.phy2log_RS.ravel(), minlength=64)
    assert heat_NE[:, replicas_E > 1].mean() < heat_NE[:, replicas_E == 1].mean()


def test_what_serves_well_is_kept():
    heat_NE, deployed, answer = answered(4096, 9)
    now = deployed._replace(
        phy2log_RS=answer.found.phy2log_RS,
        log2phy_GE=answer.found.log2phy_GE,
        home_ER=homes(answer.found.phy2log_RS, 64),
    )
    params = SearchParams(z=1.4, local_search_steps=500, tables=SOLVED, move_price=0.01)
    again = solve_layer_for_time(WindowHeat(heat_NE, heat_NE), now, params, CURVE, 0.01, False)
    assert again.taken == KEEP
    assert again.found.moves == 0


@given(cases(kinds=TIMED_KINDS), CURVES)
def test_replica_counts_fit_the_slots_and_the_ranks(case, curve):
    steps = steps_of(case.heat_NE)
    tried = stages(steps, curve, case.ranks, case.slots, 1.0)
    assert tried[0].tolist() == [1] * case.experts
    for replicas_E in tried:
        assert replicas_E.sum() <= case.ranks * case.slots
        assert replicas_E.max() <= case.ranks
        full_E = filled(steps, curve, replicas_E, case.ranks, case.slots)
        assert full_E.sum() == case.ranks * case.slots
        assert (full_E >= replicas_E).all()
        assert full_E.max() <= case.ranks


def test_where_reading_takes_the_time_no_replica_is_worth_having():
    steps = steps_of(np.full((3, 8), 5.0))
    assert [counts.tolist() for counts in stages(steps, CURVE, 4, 3, 1.0)] == [[1] * 8]
    hot = steps_of(np.array([[5000.0, *[5] * 7]]))
    assert stages(hot, CURVE, 4, 3, 1.0)[-1][0] == 4
    assert stages(hot, Curve(0.0, 9.0, 9.0, 0.0), 4, 3, 1.0)[-1].sum() == 8


def drifting(seed: int) -> np.ndarray:
    return synthetic_heat("drift", 64, 1, 64, tokens=4096, top_k=4, seed=seed)[:, 0].astype(np.float64)


@pytest.mark.parametrize("seed", range(4))
def test_a_way_must_be_clearly_faster_on_either_half(seed):
    heat_NE, deployed = drifting(seed), deployed_of(64, 8, 10)
    older, newer = (
        timed(Layer(heat_of(part_NE, 8), deployed), steps_of(part_NE), CURVE)
        for part_NE in (heat_NE[:32], heat_NE[32:])
    )
    params = SearchParams(z=1.4, local_search_steps=500, tables=SOLVED)
    ways = [_lasting_way(*halves, params) for halves in ((older, newer), (newer, older))]
    assert ways[0] == ways[1]


@pytest.mark.parametrize(("sureness", "kept"), [(0.0, False), (1e6, True)])
def test_what_is_not_sure_to_pay_is_left_alone(sureness, kept):
    heat_NE = drifting(0)
    params = SearchParams(z=1.4, local_search_steps=500, tables=SOLVED, sureness=sureness)
    answer = solve_layer_for_time(
        WindowHeat(heat_NE, heat_NE), deployed_of(64, 8, 9), params, CURVE, 0.0, False
    )
    assert (answer.taken == KEEP) is kept
