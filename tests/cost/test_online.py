"""A fit to step times recovers the underlying curve with valid bounds, and yields no curve if the times follow none."""

from __future__ import annotations

import numpy as np
import pytest

from eplb_core.cost.curve import CostCurve
from eplb_core.cost.fit import CurveFitError, fit_online
from tests.cost.curves import H200


def steps(curve: CostCurve, noise: float, seed: int = 0, count: int = 160, each: float = 0.05):
    """Return steps with varying batch sizes and skew, which make base, each, read and slope distinguishable."""
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


@pytest.mark.parametrize("each", [0.05, 0.2])
def test_the_curve_is_recovered_despite_other_work_that_grows_with_the_batch(each):
    fitted = fit_online(*steps(H200, noise=0.0, each=each))
    assert fitted.curve.slope_us == pytest.approx(H200.slope_us, rel=0.1)
    assert fitted.curve.read_us == pytest.approx(H200.read_us, rel=0.1)
    assert fitted.curve.fit.median_error < 0.01
    assert fitted == fit_online(*steps(H200, noise=0.0, each=each))


def test_bounds_contain_the_true_curve_and_widen_with_noise():
    quiet, loud = (fit_online(*steps(H200, noise)) for noise in (0.01, 0.05))
    for fitted in (quiet, loud):
        assert fitted.least * fitted.curve.slope_us * 0.97 <= H200.slope_us
        assert H200.slope_us <= fitted.most * fitted.curve.slope_us * 1.03
        assert fitted.least <= 1 <= fitted.most
    assert quiet.most - quiet.least < loud.most - loud.least


def test_step_times_that_do_not_depend_on_the_token_distribution_give_no_curve():
    us_T, tokens = steps(H200, noise=0.0)
    batch_T = tokens.sum(axis=(1, 2, 3))
    scatter_T = np.random.default_rng(2).standard_normal(len(us_T))
    for flat_T in ((900 + 0.1 * batch_T) * np.exp(0.02 * scatter_T), 1000 + 30 * scatter_T, 0 * us_T + 2e4):
        with pytest.raises(CurveFitError, match=r"do not (grow with|measurably depend)"):
            fit_online(flat_T, tokens)


@pytest.mark.parametrize("seed", range(8))
def test_slots_that_are_always_busy_cannot_be_separated_from_the_base(seed):
    rng = np.random.default_rng(seed)
    tokens = 100 + rng.poisson(50, (64, 2, 4, 6))
    rounding_T = rng.uniform(-1e-14, 1e-14, 64)
    with pytest.raises(CurveFitError, match="do not grow"):
        fit_online(2e4 * (1 + rounding_T), tokens)


def test_a_curve_that_misses_the_held_out_steps_is_rejected():
    us_T, tokens = steps(H200, noise=0.0)
    us_T[2::4] *= 1.5
    with pytest.raises(CurveFitError, match="does not fit the held-out steps"):
        fit_online(us_T, tokens)


def test_too_few_steps_are_rejected():
    us_T, tokens = steps(H200, 0.0)
    with pytest.raises(CurveFitError, match="31 steps are too few"):
        fit_online(us_T[:31], tokens[:31])
