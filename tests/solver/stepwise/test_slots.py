"""Tokens of all slots under a step's best split: each expert's on its own replicas, no rank hotter than need be."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_service.solver.stepwise.slots import slots_by_step
from eplb_service.solver.stepwise.split import loads_by_step
from tests.solver.layers_of import Case, cases
from tests.solver.placed_layer import random_placement
from tests.solver.slow import stepwise as slow

SEEDS = st.integers(0, 2**32 - 1)


@settings(max_examples=40)
@given(cases(most_ranks=6, kinds=("even", "skewed", "zero", "sparse")), SEEDS)
def test_whole_tokens_go_to_their_experts_slots_as_well_as_can_be(case: Case, seed: int) -> None:
    phy2log_RS = random_placement(case.ranks, case.slots, case.experts, np.random.default_rng(seed))
    heat_NE = np.floor(case.heat_NE).astype(np.int64)
    tokens_NP = slots_by_step(heat_NE[:, None], phy2log_RS[None], True)[:, 0]
    loads_NR = loads_by_step(heat_NE[:, None], phy2log_RS[None], True)[:, 0]
    for heat_E, tokens_P, load_R in zip(heat_NE, tokens_NP, loads_NR, strict=True):
        assert (tokens_P >= 0).all()
        assert (tokens_P == np.floor(tokens_P)).all()
        np.testing.assert_array_equal(
            np.bincount(phy2log_RS.ravel(), tokens_P, minlength=case.experts), heat_E
        )
        np.testing.assert_array_equal(tokens_P.reshape(phy2log_RS.shape).sum(axis=1), load_R)
        assert load_R.max() == np.ceil(slow.by_sets(phy2log_RS, heat_E) - 1e-9)


@settings(max_examples=30)
@given(cases(most_ranks=6), SEEDS)
def test_cut_tokens_are_the_optimum_and_slots_without_any_have_none(case: Case, seed: int) -> None:
    phy2log_RS = random_placement(case.ranks, case.slots, case.experts, np.random.default_rng(seed))
    for heat_E, tokens_P in zip(
        case.heat_NE, slots_by_step(case.heat_NE[:, None], phy2log_RS[None], False)[:, 0], strict=True
    ):
        scale = max(heat_E.sum(), 1.0)
        split_E = np.bincount(phy2log_RS.ravel(), tokens_P, minlength=case.experts)
        np.testing.assert_allclose(split_E / scale, heat_E / scale, atol=1e-5)
        hottest = tokens_P.reshape(phy2log_RS.shape).sum(axis=1).max()
        assert hottest / scale == pytest.approx(slow.optimum(phy2log_RS, heat_E / scale), abs=1e-5)
        # Nothing in between: what is left of a slot by rounding would wake it.
        assert not ((tokens_P > 0) & (tokens_P <= 1e-7 * scale / case.ranks)).any()
