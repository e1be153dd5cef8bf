"""What was won is given with an interval, and an interval that holds zero has not paid."""

from __future__ import annotations

import math

import numpy as np
import pytest

from eplb_service.planner.worth import gain_of


def test_a_gain_lies_in_its_interval() -> None:
    generator = np.random.default_rng(0)
    before_TL = 1.5 + 0.1 * generator.normal(size=(500, 4))
    inside = 0
    for seed in range(40):
        after_TL = before_TL - 0.05 + 0.1 * np.random.default_rng(seed).normal(size=(500, 4))
        found = gain_of(before_TL, after_TL)
        assert found.low < found.mean < found.high
        inside += found.low <= 0.05 <= found.high
        assert found.paid
    assert inside >= 34


def test_nothing_won_has_not_paid() -> None:
    par_TL = 1.5 + 0.1 * np.random.default_rng(0).normal(size=(100, 2))
    assert gain_of(par_TL, par_TL).paid is False
    assert gain_of(par_TL, par_TL + 0.1).paid is False


def test_steps_and_layers_without_tokens_say_nothing() -> None:
    before_TL = np.array([[1.5, np.nan], [np.nan, np.nan], [1.7, 2.0]])
    after_TL = np.array([[1.2, 1.0], [1.0, 1.0], [1.2, 1.7]])
    assert gain_of(before_TL, after_TL).mean == pytest.approx((0.3 + 0.4) / 2)
    empty = gain_of(before_TL[1:2], after_TL[1:2])
    assert math.isnan(empty.mean)
    assert (empty.known, empty.paid) == (False, None)
