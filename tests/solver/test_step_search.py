"""The search for stepwise splits never raises the cost, charges for its moves, and beats placements for even splits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from eplb_core.placement import Placement, check_layer, par
from eplb_core.planner.score import split_loads
from eplb_core.solver.model import heat_of, homes
from eplb_core.solver.step_search import _scenarios_of, _step_search
from eplb_service.offline import solve
from tests.solver.layers_of import Case, cases
from tests.solver.placed_layer import random_placement
from tests.solver.slow import stepwise as slow

SEEDS = st.integers(0, 2**32 - 1)


def mean_optimum(phy2log_RS, scaled_EN, share_N):
    levels = [slow.by_sets(phy2log_RS, scaled_EN[:, n].astype(float)) for n in range(len(share_N))]
    return float(np.dot(share_N, levels)) if share_N.sum() > 0 else None


@example(Case(1, 1, np.zeros((1, 1))), 0, 0.0)
@settings(max_examples=40)
@given(cases(most_ranks=6, most_slots=4), SEEDS, st.sampled_from((0.0, 0.002, 0.05)))
def test_a_search_never_raises_the_cost(case: Case, seed: int, price: float) -> None:
    start_RS = random_placement(case.ranks, case.slots, case.experts, np.random.default_rng(seed))
    home_ER = homes(start_RS, case.experts)
    heat = heat_of(case.heat_NE, case.ranks)
    price_K = np.array([4 * price, price])
    result_KRS = _step_search(start_RS, heat.scaled_EN, heat.share_N, home_ER, price_K, 300, seed)
    before = mean_optimum(start_RS, heat.scaled_EN, heat.share_N)
    for result_RS, slot_price in zip(result_KRS, price_K, strict=True):
        check_layer(result_RS, case.experts)
        moves = sum(not home_ER[e, r] for r, row in enumerate(result_RS) for e in row)
        if before is not None:
            assert mean_optimum(result_RS, heat.scaled_EN, heat.share_N) + slot_price * moves <= before + 2e-5


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
    assert scaled_EN.shape == (12, 32)
    assert share_N.sum() == pytest.approx(1.0)
    np.testing.assert_allclose(scaled_EN.sum(axis=0), 4.0, rtol=1e-5)
    assert scaled_EN.std(axis=1).mean() > 1.2 * heat.scaled_EN.std(axis=1).mean()
    no_heat = heat_of(np.zeros((3, 12)), 4)
    scaled_EN, share_N = _scenarios_of(no_heat)
    assert not scaled_EN.any()
    assert not share_N.any()


def test_the_next_window_splits_better_than_under_a_placement_for_even_splits() -> None:
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
