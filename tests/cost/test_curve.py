"""A cost curve gives the time of a rank and rejects invalid numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eplb_core.cost.curve import CostCurve, CurveError
from tests.cost.curves import H200, plain_rank_us

_us = st.floats(0, 1e3)


@given(_us, _us, _us, st.floats(1e-3, 10), st.lists(st.floats(0, 1e5), min_size=1, max_size=9))
def test_times_follow_the_definition(floor, read, launch, slope, tokens):
    curve = CostCurve(floor, read, launch, slope, batch_us=slope / 8)
    assert float(curve.rank_us(tokens)) == pytest.approx(plain_rank_us(curve, tokens))
    ranks = [tokens, tokens[::-1], [n / 2 for n in tokens]]
    slowest = max(plain_rank_us(curve, rank, 2.5 * sum(tokens)) for rank in ranks)
    assert float(curve.slowest_us(np.array(ranks))) == pytest.approx(slowest)


def test_a_curve_without_read_and_launch_is_linear():
    assert CostCurve(20, 0, 0, 0.1).linear
    assert not CostCurve(20, 0, 1, 0.1).linear
    assert not H200.linear


@pytest.mark.parametrize(
    "values",
    [
        (-1, 1, 1, 1),
        (1, 1, 1, 1, "any", "", None, -0.1),
        (0, math.nan, 1, 1),
        (0, 1, math.inf, 1),
        (0, 1, 1, -0.1),
    ],
)
def test_invalid_times_are_rejected(values):
    with pytest.raises(CurveError, match="expected a finite number"):
        CostCurve(*values)


def test_free_tokens_and_unknown_phases_are_rejected():
    with pytest.raises(CurveError, match="tokens cost nothing"):
        CostCurve(20, 0, 0, 0)
    with pytest.raises(CurveError, match="choose one of any, decode, prefill"):
        CostCurve(20, 1, 1, 1, "training")
