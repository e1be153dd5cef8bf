"""The stepwise split is the optimum of the linear program, for whole and fractional tokens, and comes with a proof."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from eplb_core.solver.model import heat_of
from eplb_core.solver.stepwise import (
    level,
    loads_by_step,
    optimal_peaks,
    replicas_in,
    slots_by_step,
    split_evenly,
)
from eplb_service.offline import solve
from tests.solver.layers_of import KNOWN_EXAMPLE, Case, cases
from tests.solver.placed_layer import random_placement
from tests.solver.slow import stepwise as slow

SEEDS = st.integers(0, 2**32 - 1)


def levelled(phy2log_RS, heat_E, whole):
    """Return the optimum, the tokens by slot and by rank, and the tight set."""
    ranks, slots = phy2log_RS.shape
    replicas = replicas_in(phy2log_RS, len(heat_E))
    flow_P = np.zeros(ranks * slots)
    load_R = np.zeros(ranks)
    split_evenly(replicas, heat_E, flow_P, load_R, whole)
    return level(replicas, flow_P, load_R, whole), flow_P, load_R, replicas.tight_R


# In this case, the search must continue after a tight set has raised the level.
@example(Case(3, 3, np.array([[66.0, 22.0, 21.0, 16.0, 94.0]])), 3)
@settings(max_examples=80)
@given(cases(most_ranks=7), SEEDS)
def test_the_level_is_the_optimum_of_the_linear_program(case: Case, seed: int) -> None:
    phy2log_RS = random_placement(case.ranks, case.slots, case.experts, np.random.default_rng(seed))
    heat_E = case.heat_NE[0]
    best_level, flow_P, load_R, tight_R = levelled(phy2log_RS, heat_E, whole=False)
    scale = max(heat_E.sum(), 1.0)
    heat_E = heat_E / scale
    assert best_level / scale == pytest.approx(slow.optimum(phy2log_RS, heat_E), abs=1e-6)
    assert best_level / scale == pytest.approx(slow.by_sets(phy2log_RS, heat_E), abs=1e-6)
    assert load_R.max() / scale == pytest.approx(best_level / scale, abs=1e-6)
    if tight_R.any():
        assert slow.bound_of(phy2log_RS, heat_E, tight_R) == pytest.approx(best_level / scale, abs=1e-6)
    assert flow_P.min() >= -1e-9 * scale
    split_E = np.bincount(phy2log_RS.ravel(), flow_P, minlength=case.experts)
    np.testing.assert_allclose(split_E / scale, heat_E, atol=1e-9)
    np.testing.assert_allclose(flow_P.reshape(phy2log_RS.shape).sum(axis=1), load_R, atol=1e-6 * scale)


def test_the_peak_of_each_episode_is_optimal() -> None:
    generator = np.random.default_rng(0)
    phy2log_RS = random_placement(5, 3, 9, generator)
    heat = heat_of(np.vstack([generator.integers(1, 90, (3, 9)), np.zeros((1, 9))]), 5)
    expected = [slow.optimum(phy2log_RS, heat.scaled_EN[:, n].astype(float)) for n in range(4)]
    np.testing.assert_allclose(optimal_peaks(phy2log_RS, heat.scaled_EN), expected, atol=1e-5)


def test_the_known_example_reaches_the_mean_load() -> None:
    solution = solve(KNOWN_EXAMPLE.astype(np.int64)[None, None], 8, 2, split="step")
    # This is the mean of 1450 whole tokens over 8 ranks, rounded up. The best even split reaches 196.67.
    assert solution.hottest_after_L[0] == 182


@settings(max_examples=40)
@given(cases(most_ranks=6, kinds=("even", "skewed", "zero", "sparse")), SEEDS)
def test_whole_tokens_are_split_optimally(case: Case, seed: int) -> None:
    phy2log_RS = random_placement(case.ranks, case.slots, case.experts, np.random.default_rng(seed))
    heat_NE = np.floor(case.heat_NE).astype(np.int64)
    tokens_NP = slots_by_step(heat_NE[:, None], phy2log_RS[None], True)[:, 0]
    loads_NR = loads_by_step(heat_NE[:, None], phy2log_RS[None], True)[:, 0]
    for heat_E, tokens_P, load_R in zip(heat_NE, tokens_NP, loads_NR, strict=True):
        assert (tokens_P >= 0).all()
        assert (tokens_P == np.floor(tokens_P)).all()
        split_E = np.bincount(phy2log_RS.ravel(), tokens_P, minlength=case.experts)
        np.testing.assert_array_equal(split_E, heat_E)
        np.testing.assert_array_equal(tokens_P.reshape(phy2log_RS.shape).sum(axis=1), load_R)
        assert load_R.max() == np.ceil(slow.by_sets(phy2log_RS, heat_E) - 1e-9)


@settings(max_examples=30)
@given(cases(most_ranks=6), SEEDS)
def test_fractional_tokens_are_split_optimally_and_without_rounding_residues(case: Case, seed: int) -> None:
    phy2log_RS = random_placement(case.ranks, case.slots, case.experts, np.random.default_rng(seed))
    for heat_E, tokens_P in zip(
        case.heat_NE, slots_by_step(case.heat_NE[:, None], phy2log_RS[None], False)[:, 0], strict=True
    ):
        scale = max(heat_E.sum(), 1.0)
        split_E = np.bincount(phy2log_RS.ravel(), tokens_P, minlength=case.experts)
        np.testing.assert_allclose(split_E / scale, heat_E / scale, atol=1e-5)
        hottest = tokens_P.reshape(phy2log_RS.shape).sum(axis=1).max()
        assert hottest / scale == pytest.approx(slow.optimum(phy2log_RS, heat_E / scale), abs=1e-5)
        # A rounding residue would make an idle slot appear busy.
        assert not ((tokens_P > 0) & (tokens_P <= 1e-7 * scale / case.ranks)).any()
