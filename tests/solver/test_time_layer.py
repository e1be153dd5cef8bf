"""Placements for time are valid, never slower than the current or token-balanced layout, and have no idle replicas."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_core.placement import Placement
from eplb_core.solver.candidates import from_scratch
from eplb_core.solver.layer import LayerResult, solve_layer
from eplb_core.solver.model import (
    EVEN,
    KEEP,
    RULE,
    SOLVED,
    Layer,
    LayerLayout,
    SearchOptions,
    SearchParams,
    heat_of,
    homes,
)
from eplb_core.solver.tables import slots_by_expert
from eplb_core.solver.time_costs import split_us
from eplb_core.solver.time_layer import _heat_in_time, _lasts, _slots_in_use, _timed, solve_layer_for_time
from eplb_core.solver.window import Forecast
from eplb_service.io.synthetic import synthetic_heat
from tests.solver.layers_of import cases, with_bursts_of
from tests.solver.placed_layer import deployed_on, random_placement
from tests.solver.slow import time as plain_time
from tests.solver.solved_layers import SEARCH, assert_servable
from tests.solver.time_curves import CURVE, CURVES, TIMED_KINDS

PARAMS = SearchParams(z=1.4, local_search_steps=500, tables=SOLVED, options=SearchOptions(sureness=0.0))
STAYS = Forecast(np.inf, 0.0)


def deployed_of(experts: int, ranks: int, slots: int) -> LayerLayout:
    phy2log_RS = Placement.linear(1, experts, ranks, slots).phy2log_LRS[0].copy()
    return deployed_on(phy2log_RS, np.full((ranks, experts), 1 / ranks, dtype=np.float32))


def realised(heat_NE, answer_RS, log2phy_GE, deployed, tables, curve) -> float:
    if tables == EVEN:
        share_RS = 1 / np.bincount(answer_RS.ravel())[answer_RS]
        return plain_time.mean_slowest(heat_NE, answer_RS, share_RS, curve)
    return plain_time.through_tables(heat_NE, answer_RS, log2phy_GE, deployed.share_GE, curve)


@given(cases(kinds=TIMED_KINDS), CURVES, st.sampled_from((EVEN, RULE, SOLVED)), st.booleans(), st.booleans())
@settings(max_examples=60)
def test_results_are_valid_and_never_slower(case, curve, tables, unplaced, holdout):
    deployed = deployed_of(case.experts, case.ranks, case.slots)
    options = SearchOptions(holdout=holdout, sureness=0.0)
    params = SEARCH._replace(tables=tables, options=options, move_price=0.001 * deployed.phy2log_RS.size)
    answer = solve_layer_for_time(case.heat_NE, case.heat_NE, deployed, params, curve, 0.0, unplaced)
    assert_servable(answer, deployed.phy2log_RS, case.experts)
    before = realised(case.heat_NE, deployed.phy2log_RS, deployed.log2phy_GE, deployed, tables, curve)
    after = realised(case.heat_NE, answer.found.phy2log_RS, answer.found.log2phy_GE, deployed, tables, curve)
    assert after <= before * (1 + 1e-4)
    if case.heat_NE.any():
        scale = _timed(case.heat_NE, case.heat_NE, deployed, curve, STAYS).even_us
        assert answer.found.par * scale == pytest.approx(after, rel=1e-3)
        assert after >= scale * (1 - 1e-4)
    if unplaced:
        layer = Layer(heat_of(case.heat_NE, case.ranks), deployed)
        balanced = from_scratch(layer, params, 0.001)
        by_tokens = realised(case.heat_NE, balanced.phy2log_RS, balanced.log2phy_GE, deployed, tables, curve)
        assert after <= by_tokens * (1 + 1e-4)


@pytest.mark.parametrize("seed", range(4))
def test_bursty_experts_are_balanced_by_tokens(seed):
    heat_NE = with_bursts_of(64, 64, seed)
    deployed = deployed_of(64, 8, 10)
    by_tokens = solve_layer(heat_NE, deployed, PARAMS, np.array([np.inf]), 0.0, True)
    answer = solve_layer_for_time(heat_NE, heat_NE, deployed, PARAMS, CURVE, 0.0, True)
    assert by_tokens.trimmed == answer.trimmed
    us = [
        realised(heat_NE, result.found.phy2log_RS, result.found.log2phy_GE, deployed, SOLVED, CURVE)
        for result in (by_tokens, answer)
    ]
    assert us[1] <= us[0] * (1 + 1e-4)


def answered(
    tokens: int, slots: int, kind: str = "static", tables: int = SOLVED
) -> tuple[np.ndarray, LayerLayout, LayerResult]:
    heat_NE = synthetic_heat(kind, 64, 1, 64, tokens=tokens, top_k=4)[:, 0].astype(np.float64)
    deployed = deployed_of(64, 8, slots)
    params = PARAMS._replace(tables=tables)
    return heat_NE, deployed, solve_layer_for_time(heat_NE, heat_NE, deployed, params, CURVE, 0.0, True)


def test_a_small_batch_leaves_redundant_slots_unused():
    _, deployed, answer = answered(64, 9)
    busy = plain_time.shares_of(answer.found.phy2log_RS, answer.found.log2phy_GE, deployed.share_GE) > 0
    assert busy.sum() == 64
    without = answered(64, 8)[2]
    assert answer.found.par <= without.found.par * 1.01


def test_a_large_batch_replicates_its_hottest_experts():
    heat_NE, deployed, answer = answered(16384, 9)
    share_RS = plain_time.shares_of(answer.found.phy2log_RS, answer.found.log2phy_GE, deployed.share_GE)
    hottest = int(heat_NE.sum(axis=0).argmax())
    assert np.count_nonzero(share_RS[answer.found.phy2log_RS == hottest]) > 1
    assert answer.found.par < answered(16384, 8)[2].found.par


def test_an_evenly_splitting_host_replicates_the_cheapest_experts():
    heat_NE, _, answer = answered(64, 9, tables=EVEN)
    replicas_E = np.bincount(answer.found.phy2log_RS.ravel(), minlength=64)
    assert heat_NE[:, replicas_E > 1].mean() < heat_NE[:, replicas_E == 1].mean()


def test_a_good_layout_is_kept():
    heat_NE, deployed, answer = answered(4096, 9)
    now = deployed._replace(
        phy2log_RS=answer.found.phy2log_RS,
        log2phy_GE=answer.found.log2phy_GE,
        home_ER=homes(answer.found.phy2log_RS, 64),
    )
    params = PARAMS._replace(move_price=0.72)
    again = solve_layer_for_time(heat_NE, heat_NE, now, params, CURVE, 0.01, False)
    assert again.taken == KEEP
    assert again.found.moves == 0


def drifting(seed: int) -> np.ndarray:
    return synthetic_heat("drift", 64, 1, 64, tokens=4096, top_k=4, seed=seed)[:, 0].astype(np.float64)


@pytest.mark.parametrize("seed", range(4))
def test_placements_for_time_must_be_clearly_faster_on_both_halves(seed):
    heat_NE = drifting(seed)
    deployed = deployed_of(64, 8, 10)
    older, newer = (
        _timed(part_NE, part_NE, deployed, CURVE, STAYS) for part_NE in (heat_NE[:32], heat_NE[32:])
    )
    assert _lasts(older, newer, PARAMS) == _lasts(newer, older, PARAMS)


@pytest.mark.parametrize(("sureness", "kept"), [(0.0, False), (1e6, True)])
def test_a_layer_stays_if_the_gain_is_uncertain(sureness, kept):
    heat_NE = drifting(0)
    params = PARAMS._replace(options=SearchOptions(sureness=sureness))
    answer = solve_layer_for_time(heat_NE, heat_NE, deployed_of(64, 8, 9), params, CURVE, 0.0, False)
    assert (answer.taken == KEEP) is kept


@pytest.mark.parametrize("unused", [0, 3])
def test_time_is_scaled_to_a_mean_rank_of_one_and_unused_slots_add_none(unused: int) -> None:
    experts = 12
    ranks = 4
    slots = 5
    heat_NE = synthetic_heat("drift", 32, 1, experts, tokens=512, top_k=2)[:, 0].astype(np.float64)
    replicas_E = np.ones(experts, dtype=np.int32)
    replicas_E[: ranks * slots - experts - unused] += 1
    seen = _timed(heat_NE, heat_NE, deployed_of(experts, ranks, slots), CURVE, STAYS)
    heat, idle_slots = _heat_in_time(seen, replicas_E)
    assert idle_slots == unused
    assert heat.mean_E.sum() == pytest.approx(ranks, rel=1e-4)
    us_E = split_us(seen.tokens_EN, replicas_E, CURVE) @ seen.weight_N
    assert heat.mean_E[:experts] == pytest.approx(us_E * ranks / us_E.sum(), rel=1e-4)
    assert heat.mean_E[experts:].tolist() == [0.0] * unused


@given(cases(), st.integers(0, 99))
def test_slots_in_use_are_laid_out_by_expert(case, seed):
    rng = np.random.default_rng(seed)
    phy2log_RS = random_placement(case.ranks, case.slots, case.experts, rng)
    every_RE = np.ones((case.ranks, case.experts), dtype=bool)
    for slots, expected in zip(
        _slots_in_use(phy2log_RS, every_RE), slots_by_expert(phy2log_RS, case.experts), strict=True
    ):
        np.testing.assert_array_equal(slots, expected)
    used_RE = rng.random((case.ranks, case.experts)) < 0.5
    first_E1, slot_U = _slots_in_use(phy2log_RS, used_RE)
    for e in range(case.experts):
        expected = [p for p in np.flatnonzero(phy2log_RS.ravel() == e) if used_RE[p // case.slots, e]]
        assert slot_U[first_E1[e] : first_E1[e + 1]].tolist() == expected
