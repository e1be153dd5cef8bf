"""Fits a cost curve to the times of a model's own steps, while it serves: a regression, with its confidence.

A step takes as long as all that has nothing to do with experts, and for each layer its slowest rank: ``step = base +
sum over layers of max over ranks of sum over slots of g(tokens)``. Which rank is slowest depends on the curve and the
curve on which rank is slowest, so both are found by turns, the ranks with most tokens first. Base and floor cannot be
distinguished; the curve's floor is 0. Confidence intervals come from refits to steps drawn in blocks with replacement.

References
----------
H. Künsch, *The Jackknife and the Bootstrap for General Stationary Observations*, 1989 (the block bootstrap).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eplb_service.cost.curve import CostCurve, FitQuality, Float64
from eplb_service.cost.fit import CurveFitError, knees, nonnegative, robust_nonnegative

FEWEST_STEPS = 32
"""Steps below which nothing is said."""
_HELD_OUT_EACH = 4
_TURNS = 5
_DRAWS = 200
_KNEES = 16


@dataclass(frozen=True)
class Interval:
    """A number and its 95 % confidence interval."""

    value: float
    low: float
    high: float

    @property
    def above_zero(self) -> bool:
        """Whether the number is known not to be 0."""
        return self.low > 0

    def __str__(self) -> str:
        return f"{self.value:.4g} ({self.low:.4g} to {self.high:.4g})"


@dataclass(frozen=True)
class OnlineFit:
    """What step times say about tokens.

    Parameters
    ----------
    curve
        With a floor of 0.
    base_us
        Microseconds of a step that do not depend on where tokens are.
    read_us, slope_us
        The curve's, with their intervals.
    """

    curve: CostCurve
    base_us: Interval
    read_us: Interval
    slope_us: Interval

    @property
    def known(self) -> bool:
        """Whether step times depend measurably on tokens or busy slots at all; otherwise the curve says nothing."""
        return self.read_us.above_zero or self.slope_us.above_zero


def fit_online(
    step_us_T: npt.ArrayLike, tokens_TLRS: npt.ArrayLike, phase: str = "any", seed: int = 0
) -> OnlineFit:
    """Fit step times to the tokens in each slot.

    Parameters
    ----------
    step_us_T
        ``[T]``, microseconds of each step.
    tokens_TLRS
        ``[T, L, R, S]``, tokens that each slot received in it.
    phase, seed
        What the steps were, and of the draws.

    Raises
    ------
    CurveFitError
        Where there are too few steps, shapes differ, or no step's tokens differ from another's.
    """
    us_T, tokens = _checked(step_us_T, tokens_TLRS)
    slowest_TL = tokens.sum(axis=3).argmax(axis=2)
    knee, found_3 = 0.0, np.zeros(3)
    for _ in range(_TURNS):
        chosen_TLS = np.take_along_axis(tokens, slowest_TL[:, :, None, None], axis=2)[:, :, 0]
        knee, found_3 = _best_knee(us_T, chosen_TLS)
        us_TLR = found_3[1] * (tokens > 0).sum(axis=3) + found_3[2] * np.maximum(tokens - knee, 0).sum(axis=3)
        before_TL, slowest_TL = slowest_TL, us_TLR.argmax(axis=2)
        if np.array_equal(before_TL, slowest_TL):
            break
    features_T3 = _features(chosen_TLS, knee)
    low_3, high_3 = _intervals(features_T3, us_T, seed)
    base, read, slope = (Interval(*map(float, row)) for row in zip(found_3, low_3, high_3, strict=True))
    if read.value == slope.value == 0:
        raise CurveFitError(
            "step times do not grow with tokens or busy slots: no cost curve can be fitted to them"
        )
    launch = max(0.0, read.value - slope.value * knee)
    error_T = np.abs(features_T3 @ found_3 / us_T - 1)[_held_out(us_T.size)]
    quality = FitQuality(
        samples=int(us_T.size),
        held_out=int(error_T.size),
        median_error=float(np.median(error_T)),
        p90_error=float(np.quantile(error_T, 0.9)),
        worst_error=float(error_T.max()),
    )
    source = f"fitted online to {us_T.size} steps; read {read} us, slope {slope} us per token"
    curve = CostCurve(0.0, read.value, launch, slope.value, phase, source, quality)
    return OnlineFit(curve, base, read, slope)


def _checked(step_us_T: npt.ArrayLike, tokens_TLRS: npt.ArrayLike) -> tuple[Float64, Float64]:
    us_T = np.asarray(step_us_T, dtype=np.float64)
    tokens = np.asarray(tokens_TLRS, dtype=np.float64)
    if us_T.ndim != 1 or tokens.ndim != 4 or len(tokens) != len(us_T):
        raise CurveFitError(
            f"step times [steps] and tokens [steps, layers, ranks, slots] do not fit: {list(us_T.shape)} and "
            f"{list(tokens.shape)}"
        )
    if len(us_T) < FEWEST_STEPS:
        raise CurveFitError(
            f"{len(us_T)} steps are too few to fit a cost curve; {FEWEST_STEPS} or more are needed"
        )
    if not (np.isfinite(us_T) & (us_T > 0)).all() or not (np.isfinite(tokens) & (tokens >= 0)).all():
        raise CurveFitError("step times must be above 0, and tokens 0 or more")
    return us_T, tokens


def _best_knee(us_T: Float64, chosen_TLS: Float64) -> tuple[float, Float64]:
    """The knee with the least error on the steps that are not held out, and base, read and slope with it."""
    kept_T = ~_held_out(us_T.size)
    best = (np.inf, 0.0, np.zeros(3))
    for knee in knees(chosen_TLS)[:: max(1, 64 // _KNEES)]:
        features_T3 = _features(chosen_TLS, knee)
        found_3 = robust_nonnegative(features_T3[kept_T], us_T[kept_T])
        # What is computed cannot be launched in less than no time.
        if found_3[1] < found_3[2] * knee - 1e-9:
            continue
        error = float(np.abs(features_T3[kept_T] @ found_3 / us_T[kept_T] - 1).mean())
        if error < best[0]:
            best = (error, float(knee), found_3)
    return best[1], best[2]


def _features(chosen_TLS: Float64, knee: float) -> Float64:
    """One, busy slots, and tokens past the knee, of the slowest ranks of all layers; float64 ``[T, 3]``."""
    busy_T = (chosen_TLS > 0).sum(axis=(1, 2))
    beyond_T = np.maximum(chosen_TLS - knee, 0).sum(axis=(1, 2))
    return np.stack([np.ones(len(chosen_TLS)), busy_T, beyond_T], axis=1)


def _intervals(features_T3: Float64, us_T: Float64, seed: int) -> tuple[Float64, Float64]:
    """95 % intervals of base, read and slope, from refits to blocks of steps drawn with replacement."""
    rng = np.random.default_rng(seed)
    steps = us_T.size
    block = max(1, round(steps**0.5))
    found_D3 = np.empty((_DRAWS, 3))
    for draw in range(_DRAWS):
        first_B = rng.integers(0, steps - block + 1, -(-steps // block))
        drawn_T = (first_B[:, None] + np.arange(block)).ravel()[:steps]
        weight_T1 = 1.0 / us_T[drawn_T, None]
        found_D3[draw] = nonnegative(features_T3[drawn_T] * weight_T1, np.ones(len(drawn_T)))
    low_3, high_3 = np.quantile(found_D3, [0.025, 0.975], axis=0)
    return low_3, high_3


def _held_out(steps: int) -> npt.NDArray[np.bool_]:
    held_T: npt.NDArray[np.bool_] = np.arange(steps) % _HELD_OUT_EACH == _HELD_OUT_EACH // 2
    return held_T
