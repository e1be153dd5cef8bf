"""Fit cost curves to the measured times of individual kernel runs, kernel tables, or a model's own steps.

For a given knee, the time is linear in the coefficients:

``t = floor + launch * busy + slope * reached + batch_us * batch``

``busy`` is the number of slots with tokens. ``reached`` is the sum of their tokens, where each slot counts as at least
``knee`` tokens. ``batch`` is the total number of tokens on all ranks.

The fit tries a series of knees and solves for nonnegative coefficients by least squares on the relative errors. Larger
errors get smaller weights (iteratively reweighted least squares), which approximates a least-absolute-error fit. The
result is judged on held-out measurements.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from eplb_core.cost.curve import MAX_MEDIAN_ERROR, MAX_P90_ERROR, CostCurve, CurveError, FitQuality
from eplb_core.extras import install_command
from eplb_core.placement import Float64

_HELD_OUT_EACH = 4
"""One in this many measurements is held out, after sorting by size (kernel runs) or time (steps)."""
_MIN_MEASUREMENTS = 8
"""Minimum number of kernel runs for fitting and judging a curve."""
_MIN_STEPS = 32
"""Minimum number of steps for fitting and judging a curve."""
_KNEES = 64
"""Number of knees to try, spaced geometrically."""
_KNEES_ONLINE = 16
"""Number of knees to try when fitting a curve to steps. It is smaller than ``_KNEES``, because every decision fits a
curve."""
_ROUNDS = 8
"""Number of reweighting rounds; chosen by hand."""
_MIN_ERROR = 0.01
"""Lower bound on the relative error that determines a measurement's weight."""
_CLEARLY_BETTER = 0.8
"""The batch term is used only if it reduces the error to less than this fraction of the error without it.

If a rank's tokens grow in proportion to the batch, the batch term could absorb part of the slope. Of 176 measured
kernels, 142 fit if the term is always used, 141 with a threshold of 0.8 or 0.9, and 135 with 0.7.
"""
_ROUNDING = 1e-9
"""Coefficients that contribute less than this fraction of the time are set to 0, because rounding errors vary between
machines."""
_RIDGE = 1e-13
"""Ridge penalty for unit-length columns, so that the solution is unique even if columns are equal."""
_MAX_ALTERNATIONS = 5
"""Maximum number of alternations between the curve and the slowest ranks; chosen by hand."""
_DRAWS = 200
"""Number of bootstrap samples for the confidence intervals."""

_EVEN = ("uniform", "balanced")
"""Values of the ``distribution`` column for tokens that are spread evenly over the experts."""
_BALANCED = "_eplb"
"""Suffix in the ``distribution`` column for tokens that are balanced over the ranks."""
_MAX_SHOWN = 8
"""Maximum number of kernels that an error message lists."""
_KERNEL_COLUMNS = ("hidden_size", "inter_size", "num_experts", "topk", "moe_dtype", "kernel_source")
"""Columns that identify a kernel."""


class CurveFitError(CurveError):
    """No cost curve can be fitted to the measurements."""


class _BestFit(NamedTuple):
    """Best fit over all knees."""

    error: float
    """Mean relative error."""
    knee_index: int
    """Index of the knee."""
    coefficients_F: Float64
    """Nonnegative coefficients, float64 ``[F]``."""


def fit_curve(
    busy: npt.ArrayLike,
    tokens: npt.ArrayLike,
    us: npt.ArrayLike,
    batch: npt.ArrayLike = 0.0,
    *,
    phase: str = "any",
    source: str = "measured",
) -> CostCurve:
    """Fit a curve to kernel runs and judge it on held-out runs: every fourth one in order of size.

    Parameters
    ----------
    busy
        ``[B]``, number of the rank's slots with tokens.
    tokens
        ``[B]``, tokens in each of these slots.
    us
        ``[B]``, the rank's time in microseconds.
    batch
        ``[B]``, tokens of all ranks; 0 if unknown, which leaves the batch term at 0.
    phase
        Phase of the curve.
    source
        Origin of the measurements, as shown to operators.

    Raises
    ------
    CurveFitError
        If a value is not positive, if there are too few measurements, or if the curve does not fit the held-out runs
        (``FitQuality.fits``).
    """
    measured_B4 = np.stack(np.broadcast_arrays(busy, tokens, us, batch), axis=1).astype(np.float64)
    if len(measured_B4) < _MIN_MEASUREMENTS:
        raise CurveFitError(
            f"{source}: {len(measured_B4)} measurements are too few to fit a cost curve; "
            f"at least {_MIN_MEASUREMENTS} are needed"
        )
    valid_B = (np.isfinite(measured_B4) & (measured_B4 > [0, 0, 0, -1])).all(axis=1)
    if not valid_B.all():
        first = measured_B4[~valid_B][0].tolist()
        raise CurveFitError(
            f"{source}: busy slots, tokens and microseconds must be finite and above 0, "
            f"but one measurement has {first[:3]}"
        )
    busy_B, tokens_B, us_B, batch_B = measured_B4.T
    held_out_B = np.zeros(us_B.size, dtype=bool)
    held_out_B[np.lexsort((busy_B, tokens_B))[_HELD_OUT_EACH // 2 :: _HELD_OUT_EACH]] = True
    knee_K = _knees(tokens_B[~held_out_B], _KNEES)
    reached_KB = busy_B * np.maximum(tokens_B, knee_K[:, None])
    without_batch_KB4 = _kernel_features(busy_B, reached_KB, np.zeros_like(batch_B))
    with_batch_KB4 = _kernel_features(busy_B, reached_KB, batch_B)
    best = _best_fit(without_batch_KB4[:, ~held_out_B], us_B[~held_out_B])
    with_batch = _best_fit(with_batch_KB4[:, ~held_out_B], us_B[~held_out_B])
    if with_batch.error < _CLEARLY_BETTER * best.error:
        best = with_batch
    fitted_B = with_batch_KB4[best.knee_index] @ best.coefficients_F
    floor, launch, slope, batch_us = best.coefficients_F.tolist()
    fit = FitQuality.of(us_B.size, np.abs(fitted_B / us_B - 1)[held_out_B])
    if not fit.fits:
        raise CurveFitError(
            f"{source}: no cost curve fits ({fit}); the median error must be at most {MAX_MEDIAN_ERROR:.0%} and "
            f"the 90th-percentile error at most {MAX_P90_ERROR:.0%}"
        )
    read = launch + slope * float(knee_K[best.knee_index])
    return CostCurve(floor, read, launch, slope, phase, source, fit, batch_us)


def _kernel_features(busy_B: Float64, reached_KB: Float64, batch_B: Float64) -> Float64:
    """Return the features of kernel runs for each knee, float64 ``[K, B, 4]``."""
    return np.stack(np.broadcast_arrays(1.0, busy_B, reached_KB, batch_B), axis=2)


class OnlineFit(NamedTuple):
    """A curve fitted to steps, with a 95 % confidence interval. Its floor is 0."""

    curve: CostCurve
    least: float
    """Lower bound on the true read time and slope, as a fraction of the curve's values; at most 1.

    A coefficient whose confidence interval includes 0 is ignored.
    """
    most: float
    """Upper bound on the true read time and slope, as a multiple of the curve's values; at least 1."""


def fit_online(step_us_T: npt.ArrayLike, tokens_TLRS: npt.ArrayLike, seed: int = 0) -> OnlineFit:
    """Fit a curve to step times and the tokens in each slot.

    A step is modelled as ``base + each * tokens + sum over layers of max over ranks of sum over slots of g(tokens)``.
    ``base`` is the time that does not depend on tokens, and ``tokens`` is the mean number of tokens per rank.

    The term ``each * tokens`` is needed because other work, such as attention, also takes longer in a larger batch.
    Without it, the fit would attribute that time to the slowest ranks and overestimate the gain from balancing. With
    it, only differences in balance count, not differences in batch size.

    The slowest ranks depend on the curve and the curve depends on the slowest ranks. The fit alternates between the
    two, starting with the ranks that have the most tokens. The base and the curve's floor cannot be distinguished, so
    the floor is 0. Confidence intervals come from a block bootstrap over steps.

    Parameters
    ----------
    step_us_T
        ``[T]``, time of each step in microseconds, above 0.
    tokens_TLRS
        ``[T, L, R, S]``, tokens of each slot.
    seed
        Seed for the bootstrap.

    Raises
    ------
    CurveFitError
        If there are too few steps, if the times do not measurably depend on how tokens are distributed, or if the
        curve does not fit the held-out steps.

    References
    ----------
    H. Künsch, *The Jackknife and the Bootstrap for General Stationary Observations*, 1989 (the block bootstrap).
    """
    us_T = np.asarray(step_us_T, dtype=np.float64)
    tokens = np.asarray(tokens_TLRS, dtype=np.float64)
    if us_T.size < _MIN_STEPS:
        raise CurveFitError(
            f"{us_T.size} steps are too few to fit a cost curve; at least {_MIN_STEPS} are needed"
        )
    held_out_T = np.arange(us_T.size) % _HELD_OUT_EACH == _HELD_OUT_EACH // 2
    slowest_TL = tokens.sum(axis=3).argmax(axis=2)
    mean_T = tokens.sum(axis=(1, 2, 3)) / tokens.shape[2]
    for _ in range(_MAX_ALTERNATIONS):
        slowest_TLS = np.take_along_axis(tokens, slowest_TL[:, :, None, None], axis=2)[:, :, 0]
        knee_K = _knees(slowest_TLS, _KNEES_ONLINE)
        features_KT4 = np.stack([_step_features(slowest_TLS, mean_T, knee) for knee in knee_K])
        best = _best_fit(features_KT4[:, ~held_out_T], us_T[~held_out_T])
        launch, slope = best.coefficients_F[2:].tolist()
        if launch == slope == 0:
            raise CurveFitError("step times do not grow with the slowest ranks' tokens or busy slots")
        knee = float(knee_K[best.knee_index])
        curve = CostCurve(0.0, launch + slope * knee, launch, slope)
        before_TL = slowest_TL
        slowest_TL = curve.rank_us(tokens).argmax(axis=2)
        if np.array_equal(before_TL, slowest_TL):
            break
    features_T4 = features_KT4[best.knee_index]
    fit = FitQuality.of(us_T.size, np.abs(features_T4 @ best.coefficients_F / us_T - 1)[held_out_T])
    if not fit.fits:
        raise CurveFitError(f"the fitted curve does not fit the held-out steps ({fit})")
    interval = _relative_interval(curve, _refits(features_T4, us_T, seed), knee)
    if interval is None:
        raise CurveFitError(
            f"the times of {us_T.size} steps do not measurably depend on how tokens are distributed over the ranks"
        )
    source = f"fitted online to {us_T.size} steps"
    curve = CostCurve(0.0, curve.read_us, launch, slope, "any", source, fit)
    return OnlineFit(curve, *interval)


def _relative_interval(curve: CostCurve, drawn_D4: Float64, knee: float) -> tuple[float, float] | None:
    """Return the 95 % confidence interval of the read time and the slope, as fractions of the curve's values.

    The result is ``None`` if neither value differs significantly from 0.

    Parameters
    ----------
    curve
        Fitted curve.
    drawn_D4
        float64 ``[D, 4]``, coefficients of the bootstrap samples.
    knee
        Knee of the curve.
    """
    read_D = drawn_D4[:, 2] + drawn_D4[:, 3] * knee
    intervals = [
        np.quantile(values_D / value, [0.025, 0.975]).tolist()
        for values_D, value in ((read_D, curve.read_us), (drawn_D4[:, 3], curve.slope_us))
        if value > 0
    ]
    significant = [(low, high) for low, high in intervals if low > 0]
    if not significant:
        return None
    return min(1.0, *(low for low, _ in significant)), max(1.0, *(high for _, high in significant))


def _knees(tokens: Float64, count: int) -> Float64:
    """Return the knees to try: 0, and a geometric series from one token to just below the largest number of tokens."""
    return np.append(0.0, np.geomspace(1.0, max(2.0, float(tokens.max())), count, endpoint=False))


def _best_fit(features_KTF: Float64, us_T: Float64) -> _BestFit:
    """Fit the coefficients for each knee and return the fit with the smallest mean relative error."""
    fits: list[tuple[float, Float64]] = []
    for features_TF in features_KTF:
        relative_TF = features_TF / us_T[:, None]
        weight_T = np.ones(len(us_T))
        for _ in range(_ROUNDS):
            coefficients_F = _least_squares(relative_TF, weight_T)
            error_T = np.abs(relative_TF @ coefficients_F - 1.0)
            weight_T = np.maximum(error_T, _MIN_ERROR) ** -0.5
        fits.append((float(error_T.mean()), coefficients_F))
    index = int(np.argmin([error for error, _ in fits]))
    error, coefficients_F = fits[index]
    return _BestFit(error, index, coefficients_F)


def _least_squares(relative_TF: Float64, weight_T: Float64) -> Float64:
    """Return the nonnegative least-squares coefficients, ``[F]``, with rounding errors set to 0.

    ``relative_TF`` contains the features divided by the measured times.
    """
    coefficients_F = nonnegative_least_squares(relative_TF * weight_T[:, None], weight_T)
    return np.where(coefficients_F * relative_TF.max(axis=0) > _ROUNDING, coefficients_F, 0.0)


def nonnegative_least_squares(matrix_TF: Float64, wanted_T: Float64) -> Float64:
    """Return the nonnegative coefficients, ``[F]``, that minimise ``|matrix_TF @ coefficients - wanted_T|``.

    This is only suitable for a handful of columns.

    Parameters
    ----------
    matrix_TF
        float64 ``[T, F]``, the matrix.
    wanted_T
        float64 ``[T]``, the target values.

    References
    ----------
    C. Lawson and R. Hanson, *Solving Least Squares Problems*, 1974, chapter 23 (NNLS).

    Examples
    --------
    Without the constraint, the second coefficient would be -1:

    >>> matrix_TF = np.array([[1.0, 0], [1, 1], [1, 2]])
    >>> nonnegative_least_squares(matrix_TF, np.array([3.0, 2, 1])).round(6)
    array([2., 0.])
    """
    length_F = np.linalg.norm(matrix_TF, axis=0)
    length_F[length_F == 0] = 1.0
    columns_TF = matrix_TF / length_F
    # The ridge keeps the solution unique if columns are equal up to rounding.
    products_FF = columns_TF.T @ columns_TF + _RIDGE * np.eye(length_F.size)
    target_F = columns_TF.T @ wanted_T
    tolerance = _ROUNDING * float(np.abs(target_F).max(initial=0.0))
    solution_F = np.zeros(length_F.size)
    free_F = np.zeros(length_F.size, dtype=bool)
    for _ in range(3 * length_F.size):
        gradient_F = np.where(free_F, -np.inf, target_F - products_FF @ solution_F)
        if gradient_F.max() <= tolerance:
            break
        free_F[gradient_F.argmax()] = True
        trial_F = _free_solution(products_FF, target_F, free_F)
        while (negative_F := free_F & (trial_F <= 0)).any():
            # Move towards the trial solution until the first coefficient reaches 0, and fix that coefficient.
            fraction_F = solution_F[negative_F] / (solution_F[negative_F] - trial_F[negative_F])
            solution_F += fraction_F.min() * (trial_F - solution_F)
            free_F &= solution_F > tolerance
            solution_F[~free_F] = 0.0
            trial_F = _free_solution(products_FF, target_F, free_F)
        solution_F = trial_F
    coefficients_F: Float64 = solution_F / length_F
    return coefficients_F


def _free_solution(products_FF: Float64, target_F: Float64, free_F: npt.NDArray[np.bool_]) -> Float64:
    """Return the least-squares coefficients, ``[F]``; coefficients that are not free are 0."""
    solution_F = np.zeros(free_F.size)
    solution_F[free_F] = np.linalg.solve(products_FF[np.ix_(free_F, free_F)], target_F[free_F])
    return solution_F


def _step_features(slowest_TLS: Float64, mean_T: Float64, knee: float) -> Float64:
    """Return the features of steps, float64 ``[T, 4]``.

    The features are 1, the mean tokens per rank, and two sums over the slowest ranks: the number of busy slots, and
    their tokens, where each busy slot counts as at least ``knee`` tokens. A feature that is the same in all steps
    cannot be distinguished from the base and is set to 0.

    Parameters
    ----------
    slowest_TLS
        float64 ``[T, L, S]``, tokens in each slot of each layer's slowest rank.
    mean_T
        float64 ``[T]``, mean tokens per rank.
    knee
        Knee of the curve, in tokens.
    """
    busy_T = (slowest_TLS > 0).sum(axis=(1, 2))
    reached_T = np.where(slowest_TLS > 0, np.maximum(slowest_TLS, knee), 0.0).sum(axis=(1, 2))
    features_T4 = np.stack([np.ones_like(mean_T), mean_T, busy_T, reached_T], axis=1)
    features_T4[:, 1:] *= np.ptp(features_T4[:, 1:], axis=0) > 0
    return features_T4


def _refits(features_TF: Float64, us_T: Float64, seed: int) -> Float64:
    """Fit the coefficients to block bootstrap samples of the steps and return them, float64 ``[D, F]``."""
    rng = np.random.default_rng(seed)
    relative_TF = features_TF / us_T[:, None]
    steps = us_T.size
    block = round(steps**0.5)
    coefficients_DF = []
    for _ in range(_DRAWS):
        first_B = rng.integers(0, steps - block + 1, -(-steps // block))
        drawn_T = (first_B[:, None] + np.arange(block)).ravel()[:steps]
        coefficients_DF.append(_least_squares(relative_TF[drawn_T], np.ones(steps)))
    return np.array(coefficients_DF)


def curve_from_table(path: Path, phase: str = "any", **kernel: Any) -> CostCurve:
    """Fit the curve of one kernel in a measured table (parquet), as shipped with ``aiconfigurator-core``.

    Each row describes one call on one rank. It gives the tokens of the entire expert-parallel group, the size of the
    group, and the time in milliseconds. Only rows with tokens spread evenly over the experts (``uniform`` or
    ``balanced``) are used, because other rows do not record the tokens of each slot. Some tables have no such rows, for
    example TensorRT-LLM's table for wide expert parallelism. From such tables, rows with balanced ranks
    (``..._eplb``) are used, and each slot is assumed to have an equal share of its rank's tokens.

    Parameters
    ----------
    path
        Path of the table.
    phase
        Phase of the curve.
    kernel
        Values that select the kernel: ``hidden_size`` and ``inter_size`` of an expert, ``num_experts`` and ``topk`` of
        a layer, ``moe_dtype`` and ``kernel_source`` as spelled in the table, such as ``fp8_block`` and ``deepepmoe``.
        Values that are ``None`` or omitted match every kernel. Exactly one kernel must match.

    Raises
    ------
    CurveError
        If the table cannot be read or not exactly one kernel matches.
    CurveFitError
        If no curve fits the kernel.
    """
    selection = {name: value for name, value in kernel.items() if value is not None}
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise CurveError(f"measured tables need pyarrow: {install_command('tables')} ({error})") from error
    try:
        measured = parquet.read_table(path).to_pylist()
        even = [row for row in measured if row["distribution"] in _EVEN]
        rows = [
            row
            for row in even or [row for row in measured if row["distribution"].endswith(_BALANCED)]
            if row.get("moe_tp_size", 1) == 1 and all(row[name] == value for name, value in selection.items())
        ]
        matches = sorted({tuple(row[name] for name in _KERNEL_COLUMNS) for row in rows})
        columns = zip(*map(_measurement, rows), strict=True)
    except (OSError, ArrowException, KeyError, TypeError, AttributeError) as error:
        raise CurveError(f"{path} is not a Parquet table of MoE kernels ({error!r:.200})") from error
    kernels = [
        ", ".join(f"{name} {value}" for name, value in zip(_KERNEL_COLUMNS, row, strict=True))
        for row in matches
    ]
    if not kernels:
        raise CurveError(f"{path} has no matching kernel with evenly distributed tokens for {selection}")
    if len(kernels) > 1:
        raise CurveError(
            f"{path} has {len(kernels)} matching kernels with evenly distributed tokens; select one of them: "
            f"{'; '.join(kernels[:_MAX_SHOWN])}"
        )
    device = f"{rows[0]['device']}, " if "device" in rows[0] else ""
    return fit_curve(*columns, phase=phase, source=f"{path.name}: {device}{kernels[0]}")


def _measurement(row: Mapping[str, Any]) -> tuple[float, float, float, float]:
    """Return a row's busy slots, tokens per busy slot, time in microseconds, and tokens of all ranks.

    A rank's tokens are spread evenly over its slots. If there are fewer tokens than slots, some slots get one token and
    the others none.
    """
    batch = row["num_tokens"] * row["topk"]
    ranks = row["moe_ep_size"]
    choices = batch / ranks
    busy = min(row.get("num_slots", row["num_experts"]) / ranks, max(choices, 1.0))
    return busy, max(choices / busy, 1.0), row["latency"] * 1e3, batch
