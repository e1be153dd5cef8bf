"""Step times give back the curve that made them, with intervals that hold it, and nothing where they say nothing."""

from __future__ import annotations

import numpy as np
import pytest

from eplb_service.cost.curve import CostCurve
from eplb_service.cost.fit import CurveFitError, Interval, fit_online
from tests.cost.curves import H200


def steps(curve: CostCurve, noise: float, seed: int = 0, count: int = 160, each: float = 0.05):
    """Batches that vary, of experts whose skew varies: what makes base, each, read and slope distinguishable."""
    rng = np.random.default_rng(seed)
    popularity = rng.dirichlet(np.full(24, 0.5), (count, 3)).reshape(count, 3, 4, 6)
    batch_T = np.exp(rng.uniform(np.log(16), np.log(8192), count))
    tokens = rng.poisson(batch_T[:, None, None, None] * popularity)
    us_T = (
        900
        + each * tokens.sum(axis=(1, 2, 3)) / 4
        + curve.slot_us(tokens).sum(axis=3).max(axis=2).sum(axis=1)
    )
    return us_T * np.exp(noise * rng.standard_normal(count)), tokens


def test_the_curve_that_made_the_steps_is_found():
    found = fit_online(*steps(H200, noise=0.0))
    assert found.known
    assert found.curve.slope_us == pytest.approx(H200.slope_us, rel=0.1)
    assert found.curve.read_us == pytest.approx(H200.read_us, rel=0.1)
    assert found.base_us.value == pytest.approx(900, rel=0.03)
    assert found.curve.fit.median_error < 0.01


def test_intervals_hold_the_truth_under_noise_and_widen_with_it():
    quiet, loud = (fit_online(*steps(H200, noise)) for noise in (0.01, 0.05))
    for found in (quiet, loud):
        assert found.slope_us.low * 0.97 <= H200.slope_us <= found.slope_us.high * 1.03
        assert found.known
    width = [found.slope_us.high - found.slope_us.low for found in (quiet, loud)]
    assert width[0] < width[1]


def test_what_grows_with_the_batch_alone_is_not_put_down_to_the_slowest_ranks():
    found = fit_online(*steps(H200, noise=0.0, each=0.2))
    assert found.each_us.value == pytest.approx(0.2, rel=0.1)
    assert found.curve.slope_us == pytest.approx(H200.slope_us, rel=0.1)
    _, tokens = steps(H200, noise=0.0)
    batch_T = tokens.sum(axis=(1, 2, 3))
    us_T = (900 + 0.1 * batch_T) * np.exp(0.02 * np.random.default_rng(2).standard_normal(len(batch_T)))
    with pytest.raises(CurveFitError, match="do not grow with the slowest ranks"):
        fit_online(us_T, tokens)


def test_slots_that_are_always_busy_cannot_be_separated_from_the_base():
    rng = np.random.default_rng(3)
    tokens = 100 + rng.poisson(50, (64, 2, 4, 6))
    with pytest.raises(CurveFitError, match="do not grow"):
        fit_online(np.full(64, 2e4), tokens)


def test_where_tokens_do_not_matter_nothing_is_known():
    us_T, tokens = steps(H200, noise=0.0)
    flat = np.random.default_rng(1).normal(1000, 30, len(us_T))
    assert not fit_online(flat, tokens).known


def test_the_same_steps_give_the_same_intervals():
    assert fit_online(*steps(H200, 0.02)) == fit_online(*steps(H200, 0.02))


def test_what_cannot_be_fitted_is_refused():
    us_T, tokens = steps(H200, 0.0)
    with pytest.raises(CurveFitError, match="31 steps are too few"):
        fit_online(us_T[:31], tokens[:31])
    with pytest.raises(CurveFitError, match="do not fit"):
        fit_online(us_T[:-1], tokens)
    with pytest.raises(CurveFitError, match="above 0"):
        fit_online(us_T * 0, tokens)


def test_an_interval_says_whether_it_leaves_zero_out():
    assert Interval(2.0, 1.0, 3.0).above_zero
    assert not Interval(2.0, 0.0, 3.0).above_zero
    assert str(Interval(2.0, 1.0, 3.0)) == "2 (95 %: 1 to 3)"
