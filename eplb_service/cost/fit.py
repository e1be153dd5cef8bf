"""Fits a cost curve to measured times, on some of them, and judges it by the others.

For a given knee the model is linear in floor, read and slope: ``t = floor + read * busy + slope * beyond``, where
``busy`` counts the slots with tokens and ``beyond`` sums their tokens past the knee. So knees are tried one by one and
the three numbers, none of them negative, follow by least squares; errors count as parts of the time, and large ones
less (iteratively reweighted least squares, which nears the least absolute error).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from eplb_service.cost.curve import CostCurve, CurveError, FitQuality, Residual
from eplb_service.placement import Float64

MOST_MEDIAN_ERROR = 0.10
"""Median error, on held-out measurements, above which a curve does not fit and is refused."""
MOST_P90_ERROR = 0.25
"""The same of the 90th percentile: a curve that misses every tenth time by more has the wrong form."""
_HELD_OUT_EACH = 4
"""Of so many measurements, by size, one is held out."""
_FEWEST = 8
"""Measurements below which nothing can be fitted and judged."""
_KNEES = 64
"""Places of a curve's knee that are tried, spaced geometrically; chosen by hand."""
_ROUNDS = 8
"""Of reweighting by least absolute error; chosen by hand."""
_LEAST_ERROR = 0.01
"""Relative error below which a measurement weighs no more."""


class CurveFitError(CurveError):
    """Measurements that no cost curve fits; ``residuals`` are those held out."""

    def __init__(self, message: str, residuals: tuple[Residual, ...] = ()) -> None:
        super().__init__(message)
        self.residuals = residuals


@dataclass(frozen=True)
class Measurements:
    """Times of a rank whose busy slots all have the same tokens.

    Parameters
    ----------
    busy_B, tokens_B
        float64 ``[B]``, slots with tokens, and tokens in each of them.
    us_B
        float64 ``[B]``, microseconds.

    Raises
    ------
    CurveFitError
        On shapes that differ, or a value that is not positive.
    """

    busy_B: Float64
    tokens_B: Float64
    us_B: Float64

    def __post_init__(self) -> None:
        for name in ("busy_B", "tokens_B", "us_B"):
            values = np.asarray(getattr(self, name), dtype=np.float64)
            if values.ndim != 1 or values.shape != np.shape(self.us_B):
                raise CurveFitError(f"{name} of measurements is no list as long as the times")
            if not (np.isfinite(values) & (values > 0)).all():
                raise CurveFitError(f"{name} of measurements holds a value that is not above 0")
            object.__setattr__(self, name, values)

    def at(self, chosen: npt.NDArray[np.bool_]) -> Measurements:
        """Those chosen, bool ``[B]``."""
        return Measurements(self.busy_B[chosen], self.tokens_B[chosen], self.us_B[chosen])


def fit_curve(measured: Measurements, *, phase: str = "any", source: str = "measured") -> CostCurve:
    """The curve that fits best, judged on measurements that it did not see; every fourth by size is held out.

    Raises
    ------
    CurveFitError
        Where there are too few measurements, or the curve does not fit those held out; see ``fits``.
    """
    if measured.us_B.size < _FEWEST:
        raise CurveFitError(
            f"{source}: {measured.us_B.size} measurements are too few to fit a cost curve; {_FEWEST} or more are needed"
        )
    by_size = np.lexsort((measured.busy_B, measured.tokens_B))
    held = np.zeros(measured.us_B.size, dtype=bool)
    held[by_size[_HELD_OUT_EACH // 2 :: _HELD_OUT_EACH]] = True
    floor, read, launch, slope = _fitted(measured.at(~held))
    curve = CostCurve(floor, read, launch, slope, phase, source)
    residuals = residuals_of(curve, measured.at(held))
    error_B = np.abs([residual.error for residual in residuals])
    fit = FitQuality(
        samples=int(measured.us_B.size),
        held_out=len(residuals),
        median_error=float(np.median(error_B)),
        p90_error=float(np.quantile(error_B, 0.9)),
        worst_error=float(error_B.max()),
        residuals=residuals,
    )
    if not fits(fit):
        worst = sorted(residuals, key=lambda residual: -abs(residual.error))[:3]
        raise CurveFitError(
            f"{source}: no cost curve fits ({fit}; at most "
            f"{MOST_MEDIAN_ERROR:.0%} and {MOST_P90_ERROR:.0%} are accepted); "
            f"worst: {'; '.join(map(str, worst))}",
            residuals,
        )
    return CostCurve(floor, read, launch, slope, phase, source, fit)


def fits(fit: FitQuality) -> bool:
    """Whether a curve may be used: its median error is at most a tenth, and nine of ten are at most a quarter."""
    return fit.median_error <= MOST_MEDIAN_ERROR and fit.p90_error <= MOST_P90_ERROR


def residuals_of(curve: CostCurve, measured: Measurements) -> tuple[Residual, ...]:
    """Each measurement beside what the curve says."""
    fitted_B = curve.floor_us + measured.busy_B * curve.slot_us(measured.tokens_B)
    columns = (measured.busy_B, measured.tokens_B, measured.us_B, fitted_B)
    return tuple(Residual(*map(float, row)) for row in zip(*columns, strict=True))


def _fitted(measured: Measurements) -> tuple[float, float, float, float]:
    """Floor, read, launch and slope of the best knee."""
    busy_B, tokens_B, us_B = measured.busy_B, measured.tokens_B, measured.us_B
    best: tuple[float, tuple[float, float, float, float]] | None = None
    for knee in knees(tokens_B):
        features_B3 = np.stack(
            [np.ones_like(us_B), busy_B, busy_B * np.maximum(tokens_B - knee, 0.0)], axis=1
        )
        found_3 = robust_nonnegative(features_B3, us_B)
        floor, read, slope = found_3
        launch = read - slope * knee
        if launch < -1e-9:
            continue
        error = float(np.abs(features_B3 @ found_3 / us_B - 1).mean())
        if best is None or error < best[0]:
            best = error, (float(floor), float(read), max(float(launch), 0.0), float(slope))
    assert best is not None, "the knee 0 leaves launch = read"
    return best[1]


def knees(tokens: Float64) -> Float64:
    """Knees worth trying for slots with so many tokens: 0, and from one token to the most, evenly by factors."""
    return np.concatenate([[0.0], np.geomspace(1.0, max(2.0, float(tokens.max())), _KNEES)])


def robust_nonnegative(features_BF: Float64, us_B: Float64) -> Float64:
    """Coefficients, none negative, with a small sum of relative errors; float64 ``[F]``."""
    weight_B = 1.0 / us_B
    found_F = np.zeros(features_BF.shape[1])
    for _ in range(_ROUNDS):
        found_F = nonnegative(features_BF * weight_B[:, None], us_B * weight_B)
        error_B = np.abs(features_BF @ found_F / us_B - 1)
        weight_B = 1.0 / (us_B * np.sqrt(np.maximum(error_B, _LEAST_ERROR)))
    return found_F


def nonnegative(features_BF: Float64, target_B: Float64) -> Float64:
    """Least squares with coefficients of zero or more, for few features: each set of positive ones is tried."""
    best_F = np.zeros(features_BF.shape[1])
    least = float((target_B**2).sum())
    for count in range(1, features_BF.shape[1] + 1):
        for chosen in map(list, combinations(range(features_BF.shape[1]), count)):
            found, *_ = np.linalg.lstsq(features_BF[:, chosen], target_B, rcond=None)
            squared = float(((features_BF[:, chosen] @ found - target_B) ** 2).sum())
            if (found >= 0).all() and squared < least:
                best_F = np.zeros(features_BF.shape[1])
                best_F[chosen] = found
                least = squared
    return best_F
