"""Cost curves fitted to measured times: of kernel runs, of a table of them, and of a model's own steps while it serves.

For a given knee the model is linear in its coefficients: of kernel runs floor, read and slope, ``t = floor + read *
busy + slope * beyond``, where ``busy`` counts the slots with tokens and ``beyond`` sums their tokens past the knee. So
knees are tried one by one and the numbers, none of them negative, follow by least squares; errors count as parts of the
time, and large ones less (iteratively reweighted least squares, which nears the least absolute error). Curves are
judged by measurements that the fit did not see.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_service.cost.curve import (
    MOST_MEDIAN_ERROR,
    MOST_P90_ERROR,
    CostCurve,
    CurveError,
    FitQuality,
    Residual,
)
from eplb_service.placement import Float64

_HELD_OUT_EACH = 4
"""Of so many measurements, by size or in order, one is held out."""
_FEWEST, _FEWEST_STEPS = 8, 32
"""Measurements, and steps, below which nothing can be fitted and judged."""
_KNEES, _KNEES_ONLINE = 64, 16
"""Places of a curve's knee that are tried, spaced geometrically; fewer online, where each sample tries all."""
_ROUNDS = 8
"""Rounds of reweighting by least absolute error; chosen by hand."""
_LEAST_ERROR = 0.01
"""Relative error below which a measurement weighs no more."""
_TURNS = 5
"""Fits of a curve to the ranks that the last one takes for the slowest, at most; chosen by hand."""
_DRAWS = 200
"""Bootstrap samples of blocks of steps that the intervals are taken from."""
_RIDGE = 1e-10
"""Part of a feature's own square that is added to it, so that features that are one and the same can be solved for."""


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


def fit_curve(measured: Measurements, *, phase: str = "any", source: str = "measured") -> CostCurve:
    """The curve that fits best, judged on measurements that it did not see; every fourth by size is held out.

    Raises
    ------
    CurveFitError
        Where there are too few measurements, or the curve does not fit those held out; see ``FitQuality.fits``.
    """
    busy_B, tokens_B, us_B = measured.busy_B, measured.tokens_B, measured.us_B
    if us_B.size < _FEWEST:
        raise CurveFitError(
            f"{source}: {us_B.size} measurements are too few to fit a cost curve; {_FEWEST} or more are needed"
        )
    held_B = np.zeros(us_B.size, dtype=bool)
    held_B[np.lexsort((busy_B, tokens_B))[_HELD_OUT_EACH // 2 :: _HELD_OUT_EACH]] = True
    kept_B = ~held_B
    knee_K = _knees(tokens_B[kept_B], _KNEES)
    beyond_KB = busy_B * np.maximum(tokens_B - knee_K[:, None], 0.0)
    features_KB3 = np.stack(np.broadcast_arrays(1.0, busy_B, beyond_KB), axis=2)
    knee, (floor, read, slope) = _best_knee(features_KB3[:, kept_B], us_B[kept_B], knee_K)
    launch = max(read - slope * knee, 0.0)
    curve = CostCurve(floor, read, launch, slope, phase, source)
    fitted_B = floor + busy_B * curve.slot_us(tokens_B)
    columns = (values[held_B].tolist() for values in (busy_B, tokens_B, us_B, fitted_B))
    residuals = tuple(Residual(*row) for row in zip(*columns, strict=True))
    fit = FitQuality.of(us_B.size, np.abs([residual.error for residual in residuals]), residuals)
    if not fit.fits:
        worst = sorted(residuals, key=lambda residual: -abs(residual.error))[:3]
        raise CurveFitError(
            f"{source}: no cost curve fits ({fit}; at most "
            f"{MOST_MEDIAN_ERROR:.0%} and {MOST_P90_ERROR:.0%} are accepted); "
            f"worst: {'; '.join(map(str, worst))}",
            residuals,
        )
    return CostCurve(floor, read, launch, slope, phase, source, fit)


@dataclass(frozen=True)
class Interval:
    """A number and its 95 % confidence interval."""

    value: float
    low: float
    high: float

    @property
    def above_zero(self) -> bool:
        """True where the number is known not to be 0."""
        return self.low > 0

    def __str__(self) -> str:
        return f"{self.value:.4g} (95 %: {self.low:.4g} to {self.high:.4g})"


@dataclass(frozen=True)
class OnlineFit:
    """Findings of step times about tokens.

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
        """True where step times depend measurably on tokens or busy slots; otherwise the curve says nothing."""
        return self.read_us.above_zero or self.slope_us.above_zero


def fit_online(
    step_us_T: npt.ArrayLike, tokens_TLRS: npt.ArrayLike, phase: str = "any", seed: int = 0
) -> OnlineFit:
    """Fit step times to the tokens in each slot.

    A step takes as long as all that has nothing to do with experts, part of which grows with the batch, and for each
    layer its slowest rank: ``step = base + each * tokens + sum over layers of max over ranks of sum over slots of
    g(tokens)``, where ``tokens`` are those of the mean rank. Without that term, attention that takes longer in a larger
    batch would be put down to the slowest ranks, and balancing would seem to save it; with it, only steps that differ
    in balance, not in size alone, say what balance is worth. The slowest rank depends on the curve and the curve on the
    slowest rank, so both are found by turns, the ranks with most tokens first. Base and floor cannot be distinguished;
    the curve's floor is 0. Confidence intervals come from refits to steps drawn in blocks with replacement.

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

    References
    ----------
    H. Künsch, *The Jackknife and the Bootstrap for General Stationary Observations*, 1989 (the block bootstrap).
    """
    us_T, tokens = _checked(step_us_T, tokens_TLRS)
    steps = us_T.size
    held_T = np.arange(steps) % _HELD_OUT_EACH == _HELD_OUT_EACH // 2
    slowest_TL = tokens.sum(axis=3).argmax(axis=2)
    mean_T = tokens.sum(axis=(1, 2, 3)) / tokens.shape[2]
    for _ in range(_TURNS):
        chosen_TLS = np.take_along_axis(tokens, slowest_TL[:, :, None, None], axis=2)[:, :, 0]
        knee_K = _knees(chosen_TLS, _KNEES)[:: max(1, _KNEES // _KNEES_ONLINE)]
        features_KT4 = _features(chosen_TLS, mean_T, knee_K)
        knee, found_4 = _best_knee(features_KT4[:, ~held_T], us_T[~held_T], knee_K)
        us_TLR = found_4[2] * (tokens > 0).sum(axis=3) + found_4[3] * np.maximum(tokens - knee, 0).sum(axis=3)
        before_TL, slowest_TL = slowest_TL, us_TLR.argmax(axis=2)
        if np.array_equal(before_TL, slowest_TL):
            break
    low_4, high_4 = _intervals(features_KT4 / us_T[:, None], knee_K, np.array(found_4), seed)
    base, each, read, slope = (Interval(*map(float, row)) for row in zip(found_4, low_4, high_4, strict=True))
    if read.value == slope.value == 0:
        raise CurveFitError(
            "step times do not grow with the slowest ranks' tokens or busy slots: no cost curve can be fitted to them"
        )
    launch = max(0.0, read.value - slope.value * knee)
    features_T4 = features_KT4[int(np.flatnonzero(knee_K == knee)[0])]
    quality = FitQuality.of(steps, np.abs(features_T4 @ found_4 / us_T - 1)[held_T])
    source = f"fitted online to {steps} steps; read {read} us, slope {slope} us per token"
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
    if len(us_T) < _FEWEST_STEPS:
        raise CurveFitError(
            f"{len(us_T)} steps are too few to fit a cost curve; {_FEWEST_STEPS} or more are needed"
        )
    if not (np.isfinite(us_T) & (us_T > 0)).all() or not (np.isfinite(tokens) & (tokens >= 0)).all():
        raise CurveFitError("step times must be above 0, and tokens 0 or more")
    return us_T, tokens


def _knees(tokens: Float64, count: int) -> Float64:
    """Knees worth trying for slots with so many tokens: 0, and from one token to the most, evenly by factors."""
    return np.concatenate([[0.0], np.geomspace(1.0, max(2.0, float(tokens.max())), count)])


def _best_knee(features_KTF: Float64, us_T: Float64, knee_K: Float64) -> tuple[float, tuple[float, ...]]:
    """The knee with the least sum of relative errors, and its coefficients, the last two of them read and slope."""
    relative_KTF = features_KTF / us_T[:, None]
    weight_KT = np.ones(relative_KTF.shape[:2])
    for _ in range(_ROUNDS):
        weighted_KTF = relative_KTF * weight_KT[..., None] ** 2
        gram_KFF = np.einsum("ktf,ktg->kfg", weighted_KTF, relative_KTF)
        found_KF, _ = _nonnegative(gram_KFF, weighted_KTF.sum(axis=1))
        error_KT = np.abs(np.einsum("ktf,kf->kt", relative_KTF, found_KF) - 1)
        weight_KT = np.maximum(error_KT, _LEAST_ERROR) ** -0.5
    error_K = np.where(_possible(found_KF, knee_K), error_KT.mean(axis=1), np.inf)
    best = int(error_K.argmin())
    return float(knee_K[best]), tuple(found_KF[best].tolist())


def _possible(found_XF: Float64, knee_X: Float64) -> npt.NDArray[np.bool_]:
    """True where computing is launched in no less than no time."""
    possible_X: npt.NDArray[np.bool_] = found_XF[..., -2] >= found_XF[..., -1] * knee_X - 1e-9
    return possible_X


def _nonnegative(gram_BFF: Float64, moment_BF: Float64) -> tuple[Float64, Float64]:
    """Coefficients, none negative, that minimise each problem's squares: each set of positive ones is tried.

    Of sums over the rows of features times features, float64 ``[B, F, F]``, and of features times the target, ``[B,
    F]``; with them comes by how much each lowers the sum of squares, float64 ``[B]``.
    """
    problems, features = moment_BF.shape
    scale_BF = np.sqrt(np.einsum("bff->bf", gram_BFF))
    scale_BF[scale_BF == 0] = 1.0
    gram = gram_BFF / (scale_BF[:, :, None] * scale_BF[:, None, :])
    gram[:, np.arange(features), np.arange(features)] += _RIDGE
    moment = moment_BF / scale_BF
    best_BF, lowered_B = np.zeros((problems, features)), np.zeros(problems)
    for count in range(1, features + 1):
        for chosen in map(list, combinations(range(features), count)):
            found = np.linalg.solve(gram[:, chosen][:, :, chosen], moment[:, chosen][..., None])[..., 0]
            lowered = (found * moment[:, chosen]).sum(axis=1)
            better_B = (found >= 0).all(axis=1) & (lowered > lowered_B)
            best_BF[better_B] = 0.0
            best_BF[np.ix_(better_B, chosen)] = found[better_B]
            lowered_B = np.where(better_B, lowered, lowered_B)
    return best_BF / scale_BF, lowered_B


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
    relative_KT4: Float64, knee_K: Float64, found_4: Float64, seed: int
) -> tuple[Float64, Float64]:
    """95 % intervals of base, each, read and slope, from refits, knee included, to blocks of steps drawn again."""
    rng = np.random.default_rng(seed)
    steps = relative_KT4.shape[1]
    block = max(1, round(steps**0.5))
    drawn_DT = np.zeros((_DRAWS, steps))
    for count_T in drawn_DT:
        first_B = rng.integers(0, steps - block + 1, -(-steps // block))
        count_T += np.bincount((first_B[:, None] + np.arange(block)).ravel()[:steps], minlength=steps)
    pairs_KTX = np.einsum("ktf,ktg->ktfg", relative_KT4, relative_KT4).reshape(len(knee_K), steps, 16)
    gram_DK = np.moveaxis(drawn_DT @ pairs_KTX, 0, 1).reshape(-1, 4, 4)
    moment_DK = np.moveaxis(drawn_DT @ relative_KT4, 0, 1).reshape(-1, 4)
    found, lowered = _nonnegative(gram_DK, moment_DK)
    found_DK4, lowered_DK = found.reshape(_DRAWS, -1, 4), lowered.reshape(_DRAWS, -1)
    lowered_DK = np.where(_possible(found_DK4, knee_K), lowered_DK, -1.0)
    found_D4 = np.take_along_axis(found_DK4, lowered_DK.argmax(axis=1)[:, None, None], axis=1)[:, 0]
    low_4, high_4 = np.quantile(found_D4, [0.025, 0.975], axis=0)
    return np.minimum(low_4, found_4), np.maximum(high_4, found_4)


_EVEN = ("uniform", "balanced")
_MEASURED = ("num_tokens", "moe_ep_size", "latency")
_SHOWN = 8
_KERNEL_COLUMNS = ("hidden_size", "inter_size", "num_experts", "topk", "moe_dtype", "kernel_source")


def curve_from_table(path: Path, phase: str = "any", **kernel: Any) -> CostCurve:
    """Fit the curve of one kernel of a measured table, as the package ``aiconfigurator-core`` ships them (parquet).

    A row is one call on one rank: tokens of the whole expert-parallel group, the group's size, and milliseconds. Only
    rows whose tokens are spread evenly over the experts (``uniform`` or ``balanced``) are read: of the others nobody
    knows how many tokens each slot had.

    Parameters
    ----------
    path
        The table.
    phase
        Phase that it was measured for.
    kernel
        Which of its kernels is meant: ``hidden_size`` and ``inter_size`` of an expert, ``num_experts`` and ``topk`` of
        a layer, ``moe_dtype`` and ``kernel_source`` as the table names them, such as ``fp8_block`` and ``deepepmoe``.
        What is ``None`` or left out must follow from the rest.

    Raises
    ------
    CurveError
        Where the table cannot be read, has no such kernel or several, or no curve fits it (``CurveFitError``).
    """
    columns = _read_table(path)
    chosen_B = np.isin(columns["distribution"], _EVEN)
    if "moe_tp_size" in columns:
        chosen_B &= columns["moe_tp_size"] == 1
    for name in _KERNEL_COLUMNS:
        wanted = kernel.get(name)
        if wanted is not None:
            chosen_B &= columns[name] == wanted
    if not chosen_B.any():
        raise CurveError(f"{path}: has no rows of evenly spread tokens for {_text(kernel) or 'any kernel'}")
    found = sorted(
        {tuple(row) for row in zip(*(columns[name][chosen_B] for name in _KERNEL_COLUMNS), strict=True)}
    )
    if len(found) > 1:
        listed = "; ".join(_text(dict(zip(_KERNEL_COLUMNS, row, strict=True))) for row in found[:_SHOWN])
        more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise CurveError(f"{path}: has {len(found)} such kernels, name one: {listed}{more}")
    one = _text(dict(zip(_KERNEL_COLUMNS, found[0], strict=True)))
    device = ", ".join(sorted({str(name) for name in columns.get("device", np.array([""]))[:1]}))
    source = f"{path.name}: {device}, {one}".replace(": ,", ":")
    return fit_curve(
        _measurements({name: columns[name][chosen_B] for name in columns}), phase=phase, source=source
    )


def _read_table(path: Path) -> dict[str, Any]:
    """Columns of a measured table by name; raises ``CurveError``."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise CurveError(
            f"measured tables need pyarrow: pip install 'eplb-service[tables]' ({error})"
        ) from error
    try:
        table = parquet.read_table(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise CurveError(
            f"{path}: is no table in parquet that can be read ({' '.join(str(error).split())[:200]})"
        ) from error
    needed = (*_MEASURED, *_KERNEL_COLUMNS, "distribution")
    lacking = [name for name in needed if name not in table.schema.names]
    if lacking:
        raise CurveError(f"{path}: is no table of MoE kernels; it lacks the columns {', '.join(lacking)}")
    if any(table[name].null_count for name in needed):
        raise CurveError(f"{path}: has rows with values missing")
    return {name: np.asarray(table[name].to_pylist()) for name in table.schema.names}


def _measurements(columns: Mapping[str, Any]) -> Measurements:
    """Evenly spread choices: each slot of a rank gets as many, or, where there are fewer than slots, some get one."""
    slots_B = columns["num_experts"] / columns["moe_ep_size"]
    choices_B = columns["num_tokens"] * columns["topk"] / columns["moe_ep_size"]
    busy_B = np.minimum(slots_B, np.maximum(choices_B, 1.0))
    return Measurements(busy_B, np.maximum(choices_B / busy_B, 1.0), columns["latency"] * 1e3)


def _text(kernel: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in kernel.items() if value is not None)
