"""A fit recovers the curve behind the measurements and rejects measurements without one."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import nnls

from eplb_core.cost.curve import CostCurve
from eplb_core.cost.fit import CurveFitError, fit_curve, nonnegative_least_squares
from tests.cost.curves import H200, plain_rank_us

CELLS = [(busy, tokens) for busy in (1, 2, 4, 8) for tokens in (1, 8, 32, 64, 128, 256, 1024)]
BUSY, TOKENS = np.array(CELLS, dtype=float).T


def times(curve: CostCurve, noise: float = 0.0, seed: int = 0) -> np.ndarray:
    us_B = np.array([plain_rank_us(curve, [tokens] * busy) for busy, tokens in CELLS])
    return us_B * np.exp(noise * np.random.default_rng(seed).standard_normal(us_B.size))


@pytest.mark.parametrize(
    "curve", [H200, CostCurve(5, 30, 30, 0.5), CostCurve(100, 2, 1, 0.02), CostCurve(10, 0, 0, 0.3)]
)
def test_the_curve_behind_the_measurements_is_recovered(curve):
    fitted = fit_curve(BUSY, TOKENS, times(curve))
    assert fitted.fit.median_error < 0.01
    assert fitted.slope_us == pytest.approx(curve.slope_us, rel=0.05)
    assert fitted.slot_us(1) == pytest.approx(curve.slot_us(1), abs=0.02 * curve.rank_us([1]))


def test_additional_tokens_are_free_if_only_reading_takes_time():
    fitted = fit_curve(BUSY, TOKENS, times(CostCurve(20, 50, 0, 1e-9)))
    assert fitted.rank_us([1e6] * 8) == pytest.approx(420, rel=0.01)


def test_small_noise_and_single_outliers_change_little():
    noisy_B = times(H200, noise=0.03)
    noisy_B[3] *= 5
    fitted = fit_curve(BUSY, TOKENS, noisy_B)
    assert fitted.read_us == pytest.approx(H200.read_us, rel=0.1)
    assert (fitted.fit.held_out, fitted.fit.samples) == (7, 28)


def test_errors_are_measured_on_held_out_measurements():
    fitted = fit_curve(BUSY, TOKENS, times(H200))
    perturbed_B = times(H200)
    perturbed_B[np.lexsort((BUSY, TOKENS))[2::4]] *= 1.08
    refitted = fit_curve(BUSY, TOKENS, perturbed_B)
    assert refitted.rank_us([64] * 8) == pytest.approx(fitted.rank_us([64] * 8))
    assert refitted.fit.median_error == pytest.approx(1 - 1 / 1.08, abs=0.01)


def test_measurements_that_no_curve_fits_are_rejected():
    with pytest.raises(
        CurveFitError,
        match=r"^noise: no cost curve fits \(median error .*; the median error must be at most 10% and",
    ):
        fit_curve(BUSY, TOKENS, times(H200, noise=0.8), source="noise")


def test_too_few_or_invalid_measurements_are_rejected():
    ones = np.ones(7)
    with pytest.raises(CurveFitError, match="7 measurements are too few"):
        fit_curve(ones, ones, ones)
    for us_B in (TOKENS * 0, TOKENS * np.nan):
        with pytest.raises(CurveFitError, match="must be finite and above 0, but one measurement has"):
            fit_curve(BUSY, TOKENS, us_B)


def columns_of_kind(kind: str, generator: np.random.Generator) -> np.ndarray:
    """Return columns of very different lengths; ``kind`` makes some zero or nearly equal."""
    matrix_TF = generator.random((40, 4)) * 10.0 ** generator.integers(-3, 5, 4)
    if kind == "zero":
        matrix_TF[:, 1] = 0
    elif kind == "equal":
        matrix_TF[:, 3] = 2 * matrix_TF[:, 2]
    elif kind == "nearly equal":
        matrix_TF[:, 3] = 2 * matrix_TF[:, 2] + 1e-9 * generator.random(40)
    return matrix_TF


@pytest.mark.parametrize("kind", ["any", "zero", "equal", "nearly equal"])
def test_nonnegative_coefficients_fit_as_well_as_scipys(kind):
    generator = np.random.default_rng(0)
    for offset in (0.0, 0.5, 1.0) * 20:
        matrix_TF = columns_of_kind(kind, generator)
        target_T = generator.random(40) - offset
        coefficients_F = nonnegative_least_squares(matrix_TF, target_T)
        _, least = nnls(matrix_TF, target_T)
        assert (coefficients_F >= 0).all()
        assert np.linalg.norm(matrix_TF @ coefficients_F - target_T) <= least * (1 + 1e-8) + 1e-12
