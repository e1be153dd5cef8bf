"""Fits a cost curve to the times of a model's own steps, while it serves: a regression, with its confidence.

A step takes as long as all that has nothing to do with experts, part of which grows with the batch, and for each layer
its slowest rank: ``step = base + each * tokens + sum over layers of max over ranks of sum over slots of g(tokens)``,
where ``tokens`` are those of the mean rank. Without that term, attention that takes longer in a larger batch would be
put down to the slowest ranks, and balancing would seem to save it; with it, only steps that differ in balance, not in
size alone, say what balance is worth. Which rank is slowest depends on the curve and the curve on which rank is
slowest, so both are found by turns, the ranks with most tokens first. Base and floor cannot be distinguished; the
curve's floor is 0. Confidence intervals come from refits to steps drawn in blocks with replacement.

References
----------
H. Künsch, *The Jackknife and the Bootstrap for General Stationary Observations*, 1989 (the block bootstrap).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eplb_service.cost.curve import CostCurve, FitQuality
from eplb_service.cost.fit import CurveFitError, knees
from eplb_service.cost.nonnegative import nonnegative_many
from eplb_service.placement import Float64

FEWEST_STEPS = 32
"""Steps below which nothing is said."""
_HELD_OUT_EACH = 4
"""Of so many steps one is held out."""
_TURNS = 5
"""Of fitting a curve to the ranks that the last one takes for the slowest, at most; chosen by hand."""
_DRAWS = 200
"""Bootstrap samples of blocks of steps that the intervals are taken from."""
_KNEES = 16
"""Places of the knee that are tried: fewer than offline, since each bootstrap sample tries all."""
_ROUNDS = 8
"""Of reweighting by least absolute error; as in ``cost.fit``."""
_LEAST_ERROR = 0.01
"""Relative error below which a step weighs no more; as in ``cost.fit``."""


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
        return f"{self.value:.4g} (95 %: {self.low:.4g} to {self.high:.4g})"


@dataclass(frozen=True)
class OnlineFit:
    """What step times say about tokens.

    Parameters
    ----------
    curve
        With a floor of 0.
    base_us
        Microseconds of a step that do not depend on where tokens are.
    each_us
        Microseconds for each token of the mean rank, whichever rank it is on.
    read_us, slope_us
        The curve's, with their intervals.
    """

    curve: CostCurve
    base_us: Interval
    each_us: Interval
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
    mean_T = tokens.sum(axis=(1, 2, 3)) / tokens.shape[2]
    knee, found_4 = 0.0, np.zeros(4)
    for _ in range(_TURNS):
        chosen_TLS = np.take_along_axis(tokens, slowest_TL[:, :, None, None], axis=2)[:, :, 0]
        knee, found_4 = _best_knee(us_T, chosen_TLS, mean_T)
        us_TLR = found_4[2] * (tokens > 0).sum(axis=3) + found_4[3] * np.maximum(tokens - knee, 0).sum(axis=3)
        before_TL, slowest_TL = slowest_TL, us_TLR.argmax(axis=2)
        if np.array_equal(before_TL, slowest_TL):
            break
    low_4, high_4 = _intervals(us_T, chosen_TLS, mean_T, found_4, seed)
    base, each, read, slope = (Interval(*map(float, row)) for row in zip(found_4, low_4, high_4, strict=True))
    if read.value == slope.value == 0:
        raise CurveFitError(
            "step times do not grow with the slowest ranks' tokens or busy slots: no cost curve can be fitted to them"
        )
    launch = max(0.0, read.value - slope.value * knee)
    features_T4 = _features(chosen_TLS, mean_T, np.array([knee]))[0]
    error_T = np.abs(features_T4 @ found_4 / us_T - 1)[_held_out(us_T.size)]
    quality = FitQuality(
        samples=int(us_T.size),
        held_out=int(error_T.size),
        median_error=float(np.median(error_T)),
        p90_error=float(np.quantile(error_T, 0.9)),
        worst_error=float(error_T.max()),
    )
    source = f"fitted online to {us_T.size} steps; read {read} us, slope {slope} us per token"
    curve = CostCurve(0.0, read.value, launch, slope.value, phase, source, quality)
    return OnlineFit(curve, base, each, read, slope)


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


def _best_knee(us_T: Float64, chosen_TLS: Float64, mean_T: Float64) -> tuple[float, Float64]:
    """The knee with the least error on the steps that are not held out; base, each, read and slope with it."""
    kept_T = ~_held_out(us_T.size)
    knee_K = _knees(chosen_TLS)
    features_KT4 = _features(chosen_TLS, mean_T, knee_K)[:, kept_T] / us_T[kept_T, None]
    weight_KT = np.ones(features_KT4.shape[:2])
    found_K4 = np.zeros((len(knee_K), 4))
    for _ in range(_ROUNDS):
        weighted_KT4 = features_KT4 * weight_KT[..., None] ** 2
        gram_K44 = np.einsum("ktf,ktg->kfg", weighted_KT4, features_KT4)
        found_K4, _ = nonnegative_many(gram_K44, weighted_KT4.sum(axis=1))
        error_KT = np.abs(np.einsum("ktf,kf->kt", features_KT4, found_K4) - 1)
        weight_KT = np.maximum(error_KT, _LEAST_ERROR) ** -0.5
    error_K = np.where(_possible(found_K4, knee_K), error_KT.mean(axis=1), np.inf)
    best = int(error_K.argmin())
    return float(knee_K[best]), found_K4[best]


def _possible(found_X4: Float64, knee_X: Float64) -> npt.NDArray[np.bool_]:
    """Whether what is computed is launched in no less than no time."""
    possible_X: npt.NDArray[np.bool_] = found_X4[..., 2] >= found_X4[..., 3] * knee_X - 1e-9
    return possible_X


def _knees(chosen_TLS: Float64) -> Float64:
    knee_K: Float64 = knees(chosen_TLS)[:: max(1, 64 // _KNEES)]
    return knee_K


def _features(chosen_TLS: Float64, mean_T: Float64, knee_K: Float64) -> Float64:
    """One, the mean rank's tokens, and of the slowest ranks busy slots and tokens past each knee, ``[K, T, 4]``.

    What is the same in all steps cannot be distinguished from the base, and is 0.
    """
    busy_T = (chosen_TLS > 0).sum(axis=(1, 2))
    features_KT4 = np.ones((len(knee_K), len(mean_T), 4))
    for features_T4, knee in zip(features_KT4, knee_K, strict=True):
        beyond_T = np.maximum(chosen_TLS - knee, 0).sum(axis=(1, 2))
        for column, values_T in enumerate((mean_T, busy_T, beyond_T), start=1):
            features_T4[:, column] = values_T if np.ptp(values_T) > 0 else 0.0
    return features_KT4


def _intervals(
    us_T: Float64, chosen_TLS: Float64, mean_T: Float64, found_4: Float64, seed: int
) -> tuple[Float64, Float64]:
    """95 % intervals of base, each, read and slope, from refits, knee included, to blocks of steps drawn again."""
    rng = np.random.default_rng(seed)
    steps = us_T.size
    block = max(1, round(steps**0.5))
    drawn_DT = np.zeros((_DRAWS, steps))
    for count_T in drawn_DT:
        first_B = rng.integers(0, steps - block + 1, -(-steps // block))
        count_T += np.bincount((first_B[:, None] + np.arange(block)).ravel()[:steps], minlength=steps)
    knee_K = _knees(chosen_TLS)
    features_KT4 = _features(chosen_TLS, mean_T, knee_K) / us_T[:, None]
    pairs_KTX = np.einsum("ktf,ktg->ktfg", features_KT4, features_KT4).reshape(len(knee_K), steps, 16)
    gram_DK = np.moveaxis(drawn_DT @ pairs_KTX, 0, 1).reshape(-1, 4, 4)
    moment_DK = np.moveaxis(drawn_DT @ features_KT4, 0, 1).reshape(-1, 4)
    found, lowered = nonnegative_many(gram_DK, moment_DK)
    found_DK4, lowered_DK = found.reshape(_DRAWS, -1, 4), lowered.reshape(_DRAWS, -1)
    lowered_DK = np.where(_possible(found_DK4, knee_K), lowered_DK, -1.0)
    found_D4 = np.take_along_axis(found_DK4, lowered_DK.argmax(axis=1)[:, None, None], axis=1)[:, 0]
    low_4, high_4 = np.quantile(found_D4, [0.025, 0.975], axis=0)
    return np.minimum(low_4, found_4), np.maximum(high_4, found_4)


def _held_out(steps: int) -> npt.NDArray[np.bool_]:
    held_T: npt.NDArray[np.bool_] = np.arange(steps) % _HELD_OUT_EACH == _HELD_OUT_EACH // 2
    return held_T
