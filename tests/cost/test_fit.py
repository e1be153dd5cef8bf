"""A fit finds the curve that made the measurements, and refuses measurements that no curve made."""

from __future__ import annotations

import numpy as np
import pytest

from eplb_service.cost.curve import CostCurve
from eplb_service.cost.fit import CurveFitError, Measurements, _nonnegative, fit_curve
from tests.cost.curves import H200, plain_rank_us


def grid(curve: CostCurve, noise: float = 0.0, seed: int = 0) -> Measurements:
    cells = [(busy, tokens) for busy in (1, 2, 4, 8) for tokens in (1, 8, 32, 64, 128, 256, 1024)]
    us = np.array([plain_rank_us(curve, [tokens] * busy) for busy, tokens in cells])
    busy, tokens = np.array(cells, dtype=float).T
    return Measurements(
        busy, tokens, us * np.exp(noise * np.random.default_rng(seed).standard_normal(us.size))
    )


@pytest.mark.parametrize(
    "curve", [H200, CostCurve(5, 30, 30, 0.5), CostCurve(100, 2, 1, 0.02), CostCurve(10, 0, 0, 0.3)]
)
def test_the_curve_that_made_the_measurements_is_found(curve):
    found = fit_curve(grid(curve))
    assert found.fit is not None
    assert found.fit.median_error < 0.01
    assert found.slope_us == pytest.approx(curve.slope_us, rel=0.05)
    assert found.slot_us(1) == pytest.approx(curve.slot_us(1), abs=0.02 * curve.rank_us([1]))


def test_noise_of_a_few_percent_and_single_outliers_change_little():
    noisy = grid(H200, noise=0.03)
    noisy.us_B[3] *= 5
    found = fit_curve(noisy)
    assert found.read_us == pytest.approx(H200.read_us, rel=0.1)
    assert found.fit is not None
    assert found.fit.held_out == 7
    assert found.fit.samples == 28


def test_errors_are_of_measurements_that_the_fit_did_not_see():
    spoilt = grid(H200)
    found = fit_curve(spoilt)
    assert found.fit is not None
    held = {(residual.busy, residual.tokens) for residual in found.fit.residuals}
    for at, cell in enumerate(zip(spoilt.busy_B, spoilt.tokens_B, strict=True)):
        if cell in held:
            spoilt.us_B[at] *= 1.08
    again = fit_curve(spoilt)
    assert again.rank_us([64] * 8) == pytest.approx(found.rank_us([64] * 8))
    assert again.fit is not None
    assert again.fit.median_error == pytest.approx(1 - 1 / 1.08, abs=0.01)


def test_what_no_curve_fits_is_refused_with_its_residuals():
    with pytest.raises(
        CurveFitError, match=r"no cost curve fits \(median error .*; worst: .* measured"
    ) as refusal:
        fit_curve(grid(H200, noise=0.8), source="noise")
    assert len(refusal.value.residuals) == 7
    assert str(refusal.value).startswith("noise: ")


def test_too_few_or_senseless_measurements_are_refused():
    ones = np.ones(7)
    with pytest.raises(CurveFitError, match="7 measurements are too few"):
        fit_curve(Measurements(ones, ones, ones))
    with pytest.raises(CurveFitError, match="not above 0"):
        Measurements(ones, ones * 0, ones)
    with pytest.raises(CurveFitError, match="as long as the times"):
        Measurements(ones, np.ones(6), ones)


@pytest.mark.parametrize("seed", range(5))
def test_least_squares_without_negative_coefficients_is_that_of_scipy(seed):
    from scipy.optimize import nnls

    rng = np.random.default_rng(seed)
    features_BTF, target_BT = rng.standard_normal((8, 12, 3)), rng.standard_normal((8, 12))
    gram_BFF = np.einsum("btf,btg->bfg", features_BTF, features_BTF)
    found_BF, lowered_B = _nonnegative(gram_BFF, np.einsum("btf,bt->bf", features_BTF, target_BT))
    for features, target, found_F, lowered in zip(features_BTF, target_BT, found_BF, lowered_B, strict=True):
        truth_F, residual = nnls(features, target)
        np.testing.assert_allclose(found_F, truth_F, atol=1e-7)
        assert lowered == pytest.approx((target**2).sum() - residual**2)


def test_features_that_are_one_and_the_same_or_nothing_are_solved_for() -> None:
    features_TF = np.array([[1.0, 1.0, 0.0], [2.0, 2.0, 0.0]])
    found_BF, _ = _nonnegative((features_TF.T @ features_TF)[None], (features_TF.T @ [3.0, 6.0])[None])
    assert features_TF @ found_BF[0] == pytest.approx([3.0, 6.0])
    assert (found_BF >= 0).all()
