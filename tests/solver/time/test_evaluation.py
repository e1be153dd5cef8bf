"""Times of placements are those of the plain definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eplb_service.placement import Placement
from eplb_service.solver.time.evaluation import (
    Curve,
    even_us,
    mean_slowest,
    slowest_in_steps,
    split_us,
    steps_of,
)
from tests.solver.layers_of import Case, cases
from tests.solver.slow import time as plain_time

CURVE = Curve(20.0, 11.6, 5.0, 0.0615)
CURVES = st.sampled_from(
    (CURVE, Curve(0.0, 3.0, 3.0, 1.0), Curve(5.0, 0.0, 0.0, 0.5), Curve(1.0, 9.0, 0.0, 0.0))
)
TIMED_KINDS = ("even", "skewed", "zero", "one hot", "sparse", "bursty", "alternating")


def linear(case: Case) -> np.ndarray:
    return Placement.linear(1, case.experts, case.ranks, case.slots).phy2log_LRS[0].copy()


@given(cases(kinds=TIMED_KINDS), CURVES, st.integers(0, 99))
def test_the_slowest_ranks_time_is_that_of_the_plain_definition(case, curve, seed):
    phy2log_RS = linear(case)
    share_RS = np.random.default_rng(seed).random(phy2log_RS.shape).astype(np.float32)
    share_RS[share_RS < 0.2] = 0
    found = mean_slowest(steps_of(case.heat_NE), phy2log_RS, share_RS, curve)
    assert found == pytest.approx(
        plain_time.mean_slowest(case.heat_NE, phy2log_RS, share_RS, curve), rel=1e-4
    )


@given(cases(kinds=TIMED_KINDS), CURVES)
def test_each_step_and_layer_is_timed_by_itself(case, curve):
    phy2log_RS = linear(case)
    share_RS = np.full(phy2log_RS.shape, 0.5)
    found_NL = slowest_in_steps(case.heat_NE[:, None], phy2log_RS[None], share_RS.reshape(1, -1), curve)
    for us, tokens_E in zip(found_NL[:, 0], case.heat_NE, strict=True):
        if tokens_E.sum() == 0:
            assert np.isnan(us)
        else:
            plain = plain_time.mean_slowest(tokens_E[None], phy2log_RS, share_RS, curve)
            assert us == pytest.approx(plain)


@given(cases(kinds=TIMED_KINDS), CURVES, st.integers(1, 4))
def test_no_placement_is_faster_than_even_ranks_without_replicas(case, curve, replicas):
    steps = steps_of(case.heat_NE)
    assert mean_slowest(steps, *_even(case), curve) >= even_us(steps, curve, case.ranks) * (1 - 1e-5)
    alone = split_us(steps, np.ones(case.experts, dtype=np.int32), curve)
    shared = split_us(steps, np.full(case.experts, replicas, dtype=np.int32), curve)
    assert (shared >= alone * (1 - 1e-5)).all()


def _even(case: Case) -> tuple[np.ndarray, np.ndarray]:
    phy2log_RS = linear(case)
    replicas_E = np.bincount(phy2log_RS.ravel(), minlength=case.experts)
    return phy2log_RS, (1 / replicas_E[phy2log_RS]).astype(np.float32)
