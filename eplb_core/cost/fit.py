"""Cost curves fitted to measured times: of kernel runs, of a table of them, and of a model's own steps while it serves.

For a given knee the model is linear in its coefficients: ``t = floor + launch * busy + slope * reached + each *
batch``, where ``busy`` counts the slots with tokens, ``reached`` sums their tokens, those of a slot with fewer than
the knee taken for the knee, and ``batch`` are the tokens of all ranks. So knees are tried one by one, and the numbers,
none of them negative, follow by least squares; errors
count as parts of the time, and large ones less (iteratively reweighted least squares, which nears the least absolute
error). Curves are judged by measurements that the fit did not see.
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
"""Of so many measurements, by size or in order, one is held out."""
_MIN_MEASUREMENTS, _MIN_STEPS = 8, 32
"""Measurements, and steps, below which nothing can be fitted and judged."""
_KNEES, _KNEES_ONLINE = 64, 16
"""Places of a curve's knee that are tried, spaced geometrically; fewer online, where each decision fits one."""
_ROUNDS = 8
"""Rounds of reweighting by least absolute error; chosen by hand."""
_MIN_ERROR = 0.01
"""Relative error below which a measurement weighs no more."""
_CLEARLY_BETTER = 0.8
"""Part of the error without a term for the batch that a fit with one must stay below: where ranks' tokens and those of
all ranks grow alike it would take up some of the slope. Of 176 measured kernels 142 fit by always taking it, 141 by 0.8
or 0.9, 135 by 0.7."""
_ROUNDING = 1e-9
"""Part of a measurement that a coefficient which is 0 may come out as by rounding, which depends on the machine."""
_RIDGE = 1e-13
"""Added to the squared length of each column, which is 1, so that equal columns can be solved for."""
_TURNS = 5
"""Fits of a curve to the ranks that the last one takes for the slowest, at most; chosen by hand."""
_DRAWS = 200
"""Bootstrap samples of blocks of steps that the intervals are taken from."""


class CurveFitError(CurveError):
    """Measurements that no cost curve fits."""


def fit_curve(
    busy: npt.ArrayLike,
    tokens: npt.ArrayLike,
    us: npt.ArrayLike,
    batch: npt.ArrayLike = 0.0,
    *,
    phase: str = "any",
    source: str = "measured",
) -> CostCurve:
    """The curve that fits best, judged on measurements that it did not see; every fourth by size is held out.

    Parameters
    ----------
    busy, tokens
        ``[B]``, slots of a rank with tokens, and tokens in each of them.
    us
        ``[B]``, microseconds that the rank took.
    batch
        ``[B]``, tokens of all ranks together; 0 where that is not known, and then nothing is put down to them.
    phase, source
        Of the curve.

    Raises
    ------
    CurveFitError
        Where values are not above 0, measurements too few, or the curve does not fit those held out; see
        ``FitQuality.fits``.
    """
    measured_B4 = np.stack(np.broadcast_arrays(busy, tokens, us, batch), axis=1).astype(np.float64)
    if len(measured_B4) < _MIN_MEASUREMENTS:
        raise CurveFitError(
            f"{source}: {len(measured_B4)} measurements are too few to fit a cost curve; "
            f"{_MIN_MEASUREMENTS} or more are needed"
        )
    if not (np.isfinite(measured_B4) & (measured_B4 > [0, 0, 0, -1])).all():
        raise CurveFitError(f"{source}: a measurement is not above 0")
    busy_B, tokens_B, us_B, batch_B = measured_B4.T
    held_B = np.zeros(us_B.size, dtype=bool)
    held_B[np.lexsort((busy_B, tokens_B))[_HELD_OUT_EACH // 2 :: _HELD_OUT_EACH]] = True
    knee_K = _knees(tokens_B[~held_B], _KNEES)
    reached_KB = busy_B * np.maximum(tokens_B, knee_K[:, None])
    plain_KB4, whole_KB4 = (
        np.stack(np.broadcast_arrays(1.0, busy_B, reached_KB, each_B), axis=2)
        for each_B in (np.zeros_like(batch_B), batch_B)
    )
    plain, whole = (_fitted(way_KB4[:, ~held_B], us_B[~held_B]) for way_KB4 in (plain_KB4, whole_KB4))
    _, best, found_4 = whole if whole[0] < _CLEARLY_BETTER * plain[0] else plain
    fitted_B, (floor, launch, slope, batch_us) = whole_KB4[best] @ found_4, found_4.tolist()
    fit = FitQuality.of(us_B.size, np.abs(fitted_B / us_B - 1)[held_B])
    if not fit.fits:
        raise CurveFitError(
            f"{source}: no cost curve fits ({fit}); at most {MAX_MEDIAN_ERROR:.0%} in the median and "
            f"{MAX_P90_ERROR:.0%} at the 90th percentile are accepted"
        )
    return CostCurve(floor, launch + slope * float(knee_K[best]), launch, slope, phase, source, fit, batch_us)


class OnlineFit(NamedTuple):
    """A curve that steps speak for, with a floor of 0, and the parts of it that the true one is at least and at most.

    With 95 % confidence, by that of its read and slope which is less sure.
    """

    curve: CostCurve
    least: float
    most: float


def fit_online(step_us_T: npt.ArrayLike, tokens_TLRS: npt.ArrayLike, seed: int = 0) -> OnlineFit:
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
        ``[T]``, microseconds of each step, all above 0.
    tokens_TLRS
        ``[T, L, R, S]``, tokens that each slot received in it.
    seed
        Of the draws.

    Raises
    ------
    CurveFitError
        Where there are too few steps, times do not measurably depend on where tokens are, or the curve does not fit
        steps held out.

    References
    ----------
    H. Künsch, *The Jackknife and the Bootstrap for General Stationary Observations*, 1989 (the block bootstrap).
    """
    us_T, tokens = np.asarray(step_us_T, dtype=np.float64), np.asarray(tokens_TLRS, dtype=np.float64)
    if us_T.size < _MIN_STEPS:
        raise CurveFitError(
            f"{us_T.size} steps are too few to fit a cost curve; {_MIN_STEPS} or more are needed"
        )
    held_T = np.arange(us_T.size) % _HELD_OUT_EACH == _HELD_OUT_EACH // 2
    slowest_TL = tokens.sum(axis=3).argmax(axis=2)
    mean_T = tokens.sum(axis=(1, 2, 3)) / tokens.shape[2]
    for _ in range(_TURNS):
        chosen_TLS = np.take_along_axis(tokens, slowest_TL[:, :, None, None], axis=2)[:, :, 0]
        knee_K = _knees(chosen_TLS, _KNEES_ONLINE)
        features_KT4 = np.stack([_features(chosen_TLS, mean_T, knee) for knee in knee_K])
        _, best, found_4 = _fitted(features_KT4[:, ~held_T], us_T[~held_T])
        launch, slope = found_4[2:].tolist()
        if launch == slope == 0:
            raise CurveFitError("step times do not grow with the slowest ranks' tokens or busy slots")
        curve = CostCurve(0.0, launch + slope * float(knee_K[best]), launch, slope)
        before_TL, slowest_TL = slowest_TL, curve.rank_us(tokens).argmax(axis=2)
        if np.array_equal(before_TL, slowest_TL):
            break
    fit = FitQuality.of(us_T.size, np.abs(features_KT4[best] @ found_4 / us_T - 1)[held_T])
    if not fit.fits:
        raise CurveFitError(f"what was fitted misses the steps held out ({fit})")
    drawn_D4 = _refits(features_KT4[best], us_T, seed)
    read_D = drawn_D4[:, 2] + drawn_D4[:, 3] * knee_K[best]
    bounds = [
        np.quantile(values_D / value, [0.025, 0.975]).tolist()
        for values_D, value in ((read_D, curve.read_us), (drawn_D4[:, 3], slope))
        if value > 0
    ]
    sure = [(least, most) for least, most in bounds if least > 0]
    if not sure:
        raise CurveFitError(f"the times of {us_T.size} steps do not depend measurably on where tokens are")
    source = f"fitted online to {us_T.size} steps"
    curve = CostCurve(0.0, curve.read_us, launch, slope, "any", source, fit)
    return OnlineFit(curve, min(1.0, *(least for least, _ in sure)), max(1.0, *(most for _, most in sure)))


def _knees(tokens: Float64, count: int) -> Float64:
    """Knees worth trying for slots with so many tokens: 0, and from one token to below the most, evenly by factors."""
    return np.append(0.0, np.geomspace(1.0, max(2.0, float(tokens.max())), count, endpoint=False))


def _fitted(features_KTF: Float64, us_T: Float64) -> tuple[float, int, Float64]:
    """Least mean relative error, the index of the knee that has it, and its coefficients."""
    found: list[tuple[float, Float64]] = []
    for features_TF in features_KTF:
        relative_TF, weight_T = features_TF / us_T[:, None], np.ones(len(us_T))
        for _ in range(_ROUNDS):
            found_F = _least_squares(relative_TF, weight_T)
            error_T = np.abs(relative_TF @ found_F - 1.0)
            weight_T = np.maximum(error_T, _MIN_ERROR) ** -0.5
        found.append((float(error_T.mean()), found_F))
    best = int(np.argmin([error for error, _ in found]))
    return found[best][0], best, found[best][1]


def _least_squares(relative_TF: Float64, weight_T: Float64) -> Float64:
    """Coefficients of features as parts of the time, none negative and 0 where they are but rounding, ``[F]``."""
    found_F = nonnegative_least_squares(relative_TF * weight_T[:, None], weight_T)
    return np.where(found_F * relative_TF.max(axis=0) > _ROUNDING, found_F, 0.0)


def nonnegative_least_squares(matrix_TF: Float64, wanted_T: Float64) -> Float64:
    """Return coefficients ``[F]``, none negative, that bring ``matrix_TF @ coefficients`` nearest to ``wanted_T``.

    Meant for a handful of columns.

    References
    ----------
    C. Lawson and R. Hanson, *Solving Least Squares Problems*, 1974, chapter 23 (NNLS).
    """
    length_F = np.linalg.norm(matrix_TF, axis=0)
    length_F[length_F == 0] = 1.0
    columns_TF = matrix_TF / length_F
    # The ridge keeps the solution unique if columns are equal up to rounding.
    products_FF = columns_TF.T @ columns_TF + _RIDGE * np.eye(length_F.size)
    wanted_F = columns_TF.T @ wanted_T
    tolerance = _ROUNDING * float(np.abs(wanted_F).max(initial=0.0))
    found_F = np.zeros(length_F.size)
    free_F = np.zeros(length_F.size, dtype=bool)
    for _ in range(3 * length_F.size):
        gradient_F = np.where(free_F, -np.inf, wanted_F - products_FF @ found_F)
        if gradient_F.max() <= tolerance:
            break
        free_F[gradient_F.argmax()] = True
        trial_F = _free_solution(products_FF, wanted_F, free_F)
        while (negative_F := free_F & (trial_F <= 0)).any():
            # Go towards the trial until the first coefficient is 0, and fix that one.
            part_F = found_F[negative_F] / (found_F[negative_F] - trial_F[negative_F])
            found_F += part_F.min() * (trial_F - found_F)
            free_F &= found_F > tolerance
            found_F[~free_F] = 0.0
            trial_F = _free_solution(products_FF, wanted_F, free_F)
        found_F = trial_F
    coefficients_F: Float64 = found_F / length_F
    return coefficients_F


def _free_solution(products_FF: Float64, wanted_F: Float64, free_F: npt.NDArray[np.bool_]) -> Float64:
    """Return the least-squares coefficients ``[F]``; those that are not free are 0."""
    found_F = np.zeros(free_F.size)
    found_F[free_F] = np.linalg.solve(products_FF[np.ix_(free_F, free_F)], wanted_F[free_F])
    return found_F


def _features(chosen_TLS: Float64, mean_T: Float64, knee: float) -> Float64:
    """One, the mean rank's tokens, and of the slowest ranks busy slots and tokens up from a knee, float64 ``[T, 4]``.

    What is the same in all steps cannot be distinguished from the base, and is 0.
    """
    busy_T = (chosen_TLS > 0).sum(axis=(1, 2))
    reached_T = np.where(chosen_TLS > 0, np.maximum(chosen_TLS, knee), 0.0).sum(axis=(1, 2))
    features_T4 = np.stack([np.ones_like(mean_T), mean_T, busy_T, reached_T], axis=1)
    features_T4[:, 1:] *= np.ptp(features_T4[:, 1:], axis=0) > 0
    return features_T4


def _refits(features_TF: Float64, us_T: Float64, seed: int) -> Float64:
    """Coefficients of refits to blocks of steps that are drawn again, float64 ``[D, F]``."""
    rng = np.random.default_rng(seed)
    relative_TF, steps = features_TF / us_T[:, None], us_T.size
    block = round(steps**0.5)
    found = []
    for _ in range(_DRAWS):
        first_B = rng.integers(0, steps - block + 1, -(-steps // block))
        drawn_T = (first_B[:, None] + np.arange(block)).ravel()[:steps]
        found.append(_least_squares(relative_TF[drawn_T], np.ones(steps)))
    return np.array(found)


_EVEN, _BALANCED = ("uniform", "balanced"), "_eplb"
_SHOWN = 8
_KERNEL_COLUMNS = ("hidden_size", "inter_size", "num_experts", "topk", "moe_dtype", "kernel_source")


def curve_from_table(path: Path, phase: str = "any", **kernel: Any) -> CostCurve:
    """Fit the curve of one kernel of a measured table, as the package ``aiconfigurator-core`` ships them (parquet).

    A row is one call on one rank: tokens of the whole expert-parallel group, the group's size, and milliseconds. Only
    rows whose tokens are spread evenly over the experts (``uniform`` or ``balanced``) are read: of the others nobody
    knows how many tokens each slot had. A table without any, as TensorRT-LLM's of wide expert parallelism are, is read
    by its rows of balanced ranks (``..._eplb``), their slots taken to have equal shares of a rank's tokens.

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
    wanted = {name: value for name, value in kernel.items() if value is not None}
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
            if row.get("moe_tp_size", 1) == 1 and all(row[name] == value for name, value in wanted.items())
        ]
        found = sorted({tuple(row[name] for name in _KERNEL_COLUMNS) for row in rows})
        columns = zip(*map(_measurement, rows), strict=True)
    except (OSError, ArrowException, KeyError, TypeError, AttributeError) as error:
        raise CurveError(f"{path}: is no table of MoE kernels in parquet ({error!r:.200})") from error
    kernels = [
        ", ".join(f"{name} {value}" for name, value in zip(_KERNEL_COLUMNS, row, strict=True))
        for row in found
    ]
    if len(found) != 1:
        raise CurveError(
            f"{path}: has rows of evenly spread tokens of {len(found)} such kernels, name one: "
            f"{'; '.join(kernels[:_SHOWN]) or 'there is none'}"
        )
    device = f"{rows[0]['device']}, " if "device" in rows[0] else ""
    return fit_curve(*columns, phase=phase, source=f"{path.name}: {device}{kernels[0]}")


def _measurement(row: Mapping[str, Any]) -> tuple[float, float, float, float]:
    """Busy slots, tokens in each, microseconds, and tokens of all ranks of a row whose choices are spread evenly.

    Each slot of a rank gets as many, or, where there are fewer than slots, some get one.
    """
    batch, ranks = row["num_tokens"] * row["topk"], row["moe_ep_size"]
    choices = batch / ranks
    busy = min(row.get("num_slots", row["num_experts"]) / ranks, max(choices, 1.0))
    return busy, max(choices / busy, 1.0), row["latency"] * 1e3, batch
