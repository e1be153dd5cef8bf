"""The search for stepwise splits never raises the cost and charges for its moves.

Its placements beat those made for even splits. Its relaxed splits are valid, equal those of a slow twin, and approach
the optimum.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from eplb_core.placement import Placement, check_layer, par
from eplb_core.planner.score import split_loads
from eplb_core.solver.model import heat_of, homes
from eplb_core.solver.step_search import (
    _FIRST_SWEEPS,
    _apply_change,
    _draw_change,
    _list_shared,
    _ratio_of,
    _relax,
    _replicas_in,
    _scenarios_of,
    _split_evenly,
    _step_search,
    _undo_change,
)
from eplb_service.offline import solve
from tests.solver.layers_of import Case, cases
from tests.solver.placed_layer import random_placement
from tests.solver.slow import relaxed
from tests.solver.slow import stepwise as slow

SEEDS = st.integers(0, 2**32 - 1)


def relaxed_split(phy2log_RS, scaled_EN, sweeps):
    """Return the replicas, and the even split after some sweeps."""
    replicas = _replicas_in(phy2log_RS, len(scaled_EN))
    tokens = _split_evenly(phy2log_RS, replicas, scaled_EN)
    shared_E = np.zeros(len(scaled_EN), dtype=np.int32)
    shared = _list_shared(replicas, shared_E)
    for _ in range(sweeps):
        _relax(replicas, shared_E, shared, tokens, phy2log_RS.shape[1])
    return replicas, tokens


def check_split(phy2log_RS, scaled_EN, replicas, tokens):
    """Check that every token is on a slot of its expert, and that the records of slots and loads are right."""
    for e in range(len(scaled_EN)):
        slot_K = replicas.slot_EK[e, : replicas.count_E[e]]
        assert sorted(slot_K.tolist()) == np.flatnonzero(phy2log_RS.ravel() == e).tolist()
        np.testing.assert_allclose(tokens.flow_PN[slot_K].sum(axis=0), scaled_EN[e], atol=1e-5)
    assert tokens.flow_PN.min(initial=0.0) >= 0.0
    load_RN = tokens.flow_PN.reshape(*phy2log_RS.shape, -1).sum(axis=1)
    np.testing.assert_allclose(tokens.load_RN, load_RN, atol=1e-5)


@settings(max_examples=60)
@given(cases(most_ranks=6, most_slots=4), SEEDS, st.sampled_from((0, 1, 4)))
def test_relaxed_splits_match_the_slow_twin_and_bound_the_optimum(case: Case, seed: int, sweeps: int) -> None:
    phy2log_RS = random_placement(case.ranks, case.slots, case.experts, np.random.default_rng(seed))
    heat = heat_of(case.heat_NE, case.ranks)
    replicas, tokens = relaxed_split(phy2log_RS, heat.scaled_EN, sweeps)
    check_split(phy2log_RS, heat.scaled_EN, replicas, tokens)
    np.testing.assert_allclose(
        tokens.load_RN, relaxed.loads(phy2log_RS, heat.scaled_EN, sweeps), atol=1e-4 * case.ranks
    )
    ratio = _ratio_of(tokens.load_RN, heat.share_N)
    assert ratio == pytest.approx(float(heat.share_N @ tokens.load_RN.max(axis=0)), abs=1e-5)
    if heat.share_N.any():
        assert ratio >= mean_optimum(phy2log_RS, heat.scaled_EN, heat.share_N) - 1e-5


def test_relaxed_splits_converge_to_the_optimum() -> None:
    """With up to three replicas per expert, all pairs of its ranks exchange tokens."""
    compared = 0
    for seed in range(30):
        generator = np.random.default_rng(seed)
        phy2log_RS = random_placement(6, 3, 13, generator)
        if np.bincount(phy2log_RS.ravel()).max() > 3:
            continue
        heat = heat_of(generator.integers(1, 90, (4, 13)).astype(float), 6)
        _, tokens = relaxed_split(phy2log_RS, heat.scaled_EN, 500)
        optimum = [slow.optimum(phy2log_RS, heat.scaled_EN[:, n].astype(float)) for n in range(4)]
        np.testing.assert_allclose(tokens.load_RN.max(axis=0), optimum, atol=1e-3)
        compared += 1
    assert compared > 10


@settings(max_examples=60)
@given(cases(most_ranks=6, most_slots=4), SEEDS)
def test_changes_keep_splits_valid_and_can_be_undone(case: Case, seed: int) -> None:
    generator = np.random.default_rng(seed)
    phy2log_RS = random_placement(case.ranks, case.slots, case.experts, generator)
    scaled_EN = heat_of(case.heat_NE, case.ranks).scaled_EN
    replicas, tokens = relaxed_split(phy2log_RS, scaled_EN, 2)
    state_1 = np.full(1, np.uint64(seed), dtype=np.uint64)
    for _ in range(20):
        change = _draw_change(phy2log_RS, replicas, tokens.load_RN, state_1)
        if change.target < 0:
            continue
        after_RS = phy2log_RS.copy()
        assert after_RS.flat[change.target] == change.outgoing
        after_RS.flat[change.target] = change.incoming
        if change.origin >= 0:
            assert after_RS.flat[change.origin] == change.incoming
            after_RS.flat[change.origin] = change.outgoing
        check_layer(after_RS, case.experts)
        before = type(tokens)(tokens.flow_PN.copy(), tokens.load_RN.copy())
        _apply_change(replicas, tokens, change, case.slots)
        check_split(after_RS, scaled_EN, replicas, tokens)
        if generator.random() < 0.5:
            phy2log_RS = after_RS
        else:
            _undo_change(replicas, change)
            tokens = before
        check_split(phy2log_RS, scaled_EN, replicas, tokens)


def mean_optimum(phy2log_RS, scaled_EN, share_N):
    levels = [slow.by_sets(phy2log_RS, scaled_EN[:, n].astype(float)) for n in range(len(share_N))]
    return float(np.dot(share_N, levels))


@example(Case(1, 1, np.zeros((1, 1))), 0, 0.0)
@settings(max_examples=40)
@given(cases(most_ranks=6, most_slots=4), SEEDS, st.sampled_from((0.0, 0.002, 0.05)))
def test_a_search_never_raises_the_cost(case: Case, seed: int, price: float) -> None:
    start_RS = random_placement(case.ranks, case.slots, case.experts, np.random.default_rng(seed))
    home_ER = homes(start_RS, case.experts)
    heat = heat_of(case.heat_NE, case.ranks)
    price_K = np.array([4 * price, price])
    result_KRS = _step_search(start_RS, heat.scaled_EN, heat.share_N, home_ER, price_K, 300, seed)
    start_RN = relaxed.loads(start_RS, heat.scaled_EN, _FIRST_SWEEPS)
    before = float(heat.share_N @ start_RN.max(axis=0))
    for result_RS, slot_price in zip(result_KRS, price_K, strict=True):
        check_layer(result_RS, case.experts)
        moves = sum(not home_ER[e, r] for r, row in enumerate(result_RS) for e in row)
        if heat.share_N.any():
            # Optimal splits cost no more than the relaxed ones that the search compares.
            assert mean_optimum(result_RS, heat.scaled_EN, heat.share_N) + slot_price * moves <= before + 1e-4


def test_the_same_seed_gives_the_same_placement() -> None:
    generator = np.random.default_rng(3)
    start_RS = random_placement(8, 4, 24, generator)
    heat = heat_of(generator.integers(0, 60, (6, 24)).astype(float), 8)
    home_ER = homes(start_RS, 24)
    searches = [
        _step_search(start_RS, heat.scaled_EN, heat.share_N, home_ER, np.zeros(1), 400, seed)
        for seed in (1, 1, 2)
    ]
    np.testing.assert_array_equal(searches[0], searches[1])
    assert (searches[0] != searches[2]).any()


def test_scenarios_keep_each_steps_total_and_differ_from_the_mean() -> None:
    generator = np.random.default_rng(5)
    heat = heat_of(generator.integers(1, 60, (100, 12)).astype(float), 4)
    scaled_EN, share_N = _scenarios_of(heat)
    assert scaled_EN.shape == (12, 64)
    assert share_N.sum() == pytest.approx(1.0)
    np.testing.assert_allclose(scaled_EN.sum(axis=0), 4.0, rtol=1e-5)
    assert scaled_EN.std(axis=1).mean() > 1.2 * heat.scaled_EN.std(axis=1).mean()
    no_heat = heat_of(np.zeros((3, 12)), 4)
    scaled_EN, share_N = _scenarios_of(no_heat)
    assert not scaled_EN.any()
    assert not share_N.any()


def test_the_next_window_is_split_better_than_under_a_placement_made_for_even_splits() -> None:
    generator = np.random.default_rng(7)
    share_LE = np.exp(generator.normal(0, 0.8, (3, 32)))
    share_LE /= share_LE.sum(axis=1, keepdims=True)
    heat_TLE = np.stack([generator.multinomial(1024, share_LE[layer], 48) for layer in range(3)], axis=1)
    window_TLE = heat_TLE[:24]
    next_TLE = heat_TLE[24:]

    def realised(**options):
        solution = solve(window_TLE, 8, 5, **options)
        placement = Placement(solution.phy2log, 32)
        return par(split_loads(next_TLE, placement, solution.log2phy, None, "step")).mean()

    par_for_steps = realised(split="step")
    assert par_for_steps < 1.02
    assert par_for_steps - 1 < 0.5 * (realised(split="even") - 1)
    assert par_for_steps - 1 < 0.5 * (realised(split="step", policy="deepseek") - 1)


def test_moves_must_pay_for_themselves() -> None:
    generator = np.random.default_rng(11)
    heat_TLE = generator.poisson(np.exp(generator.normal(3, 0.9, 32)), (32, 1, 32))
    first = solve(heat_TLE[:16], 8, 5, split="step")
    options = {"placement": first.phy2log, "split": "step"}
    assert solve(heat_TLE[16:], 8, 5, **options, move_price=10.0).moves == 0
    reversed_TLE = np.ascontiguousarray(heat_TLE[:, :, ::-1])
    changed = solve(reversed_TLE, 8, 5, **options)
    assert 0 < changed.moves < 40
    assert changed.par_after < changed.par_before - 0.05
