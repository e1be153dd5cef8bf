"""Detect changes in a window's heat: how far back a decision may look, and at which step the heat changed.

All three tests are backtests, which forecast the newest steps from earlier ones and compare the errors. The forecast is
each expert's mean share of its layer's tokens. Ages and positions are given in steps, counted back from the newest
step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eplb_core.heat.window import Counts
from eplb_core.placement import Float64

MIN_LOOKBACK = 16
"""Shortest look-back that is considered, in steps."""

_REGRET_TOLERANCE = 1.1
"""Maximum error at which a longer look-back is preferred, as a multiple of the smallest error."""
_MAX_FORECAST_LAYERS = 16
"""Maximum number of layers, evenly spaced, used to choose the look-back."""
_MAX_FORECASTS = 4
"""Maximum number of recent intervals used to choose the look-back. A single interval is too noisy if heat is bursty."""
_CHANGE_ERROR_RATIO = 4.0
"""Heat counts as changed if the error of forecasts of the new segment from older steps is at least this multiple of the
error of forecasts from the segment's own older half. Bursts and drift stay below this ratio, and workload changes
exceed it (``make bench-decide``)."""

_MIN_CHANGE_AGE = 2
"""Smallest age at which ``find_change`` looks for a change."""
_MIN_STEPS_BEFORE = 4
"""Minimum number of steps before a change that ``find_change`` needs for comparison."""
_MAX_CHANGE_LAYERS = 4
"""Maximum number of layers, evenly spaced, that ``find_change`` reads."""
_MAX_CHANGE_STEPS = 256
"""Maximum number of recent steps that ``find_change`` reads."""
_BLOCK_LAG = MIN_LOOKBACK // _MIN_CHANGE_AGE
"""Distance, in blocks, between the starts of two adjacent blocks of history that do not overlap."""


def stationary_steps(heat_TLE: Counts, horizon: int) -> int:
    """Return the number of recent steps over which the heat can be treated as stationary, at most T.

    Up to four recent intervals of ``horizon`` steps are each forecast from the steps before them, with look-backs of
    16, 32, 64, ... steps. The squared error of each forecast is divided by the smallest error for the same interval.
    Among the look-backs whose summed error is within 10 % of the best, the longest is chosen, because it also gives the
    best estimate of how the experts' loads vary together.

    Parameters
    ----------
    heat_TLE
        ``[T, L, E]``, tokens of each expert in each step, oldest step first.
    horizon
        Number of steps that the decision is expected to serve.

    Examples
    --------
    Take 300 steps whose heat changed 60 steps ago, and a horizon of 16. There are 44 steps between the change and the
    newest interval, but only 28 and 12 before the next two intervals. Over all intervals, a look-back of 16 therefore
    gives the best forecasts. The result is 16 + 16 = 32 steps.

    >>> before_TLE = np.tile([[[90, 10]]], (240, 1, 1))
    >>> after_TLE = np.tile([[[10, 90]]], (60, 1, 1))
    >>> stationary_steps(np.concatenate([before_TLE, after_TLE]), 16)
    32
    """
    steps = len(heat_TLE)
    history = steps - horizon
    if horizon < 1 or history < MIN_LOOKBACK:
        return steps
    lookbacks = _lookbacks(history)
    intervals = min(_MAX_FORECASTS, max(history // (2 * horizon), 1))
    # The history of an interval starts at the interval's older end.
    starts = [horizon * number for number in range(1, 1 + intervals)]
    stops = {min(start + lookback, steps) for start in starts for lookback in lookbacks}
    layer_K = np.unique(np.linspace(0, heat_TLE.shape[1] - 1, _MAX_FORECAST_LAYERS).astype(np.int64))
    cumulative = _cumulative_shares(heat_TLE[:, layer_K], (0, *starts, *stops))
    regret_K = np.zeros(len(lookbacks))
    for start in starts:
        history_stops = [min(start + lookback, steps) for lookback in lookbacks]
        error_K = _forecast_errors(cumulative, (start - horizon, start), start, history_stops)
        regret_K += error_K / max(error_K.min(), 1e-30)
    return horizon + int(np.array(lookbacks)[regret_K <= _REGRET_TOLERANCE * regret_K.min()].max())


def has_changed(heat_TLE: Counts, recent: int) -> bool:
    """Return True if the heat of the last ``recent`` steps differs from the heat before them.

    The newer half of the recent steps is forecast both from their older half and from the steps before them, with
    look-backs of 16, 32, 64, ... steps. The heat has changed if the error of even the best look-back is at least four
    times that of the older half. During bursts, all look-backs forecast about equally well. During drift, the shortest
    one does about as well as the older half.

    If either half or the history is empty, no comparison is possible, and the heat counts as changed.
    """
    steps = len(heat_TLE)
    half = recent // 2
    if half < 1 or recent >= steps:
        return True
    history_stops = [recent + lookback for lookback in _lookbacks(steps - recent)]
    cumulative = _cumulative_shares(heat_TLE, (0, half, recent, *history_stops))
    segment_error = _forecast_errors(cumulative, (0, half), half, [recent])[0]
    history_error = _forecast_errors(cumulative, (0, half), recent, history_stops).min()
    return bool(history_error >= _CHANGE_ERROR_RATIO * segment_error)


def find_change(heat_TLE: Counts, max_age: int) -> int | None:
    """Return the age of the clearest change in heat within the newest ``max_age`` steps, or ``None`` if there is none.

    Each candidate age is tested as the start of a segment that lasts until now. The segment's newer half is forecast
    from its older half and from each block of up to 16 steps before the segment. The heat changed at that age if two
    conditions hold:

    - The error of even the best block is at least ``_CHANGE_ERROR_RATIO`` times that of the older half. A return to an
      earlier state therefore does not count as a change, because an earlier block forecasts it well.
    - The difference between the steps just before and just after that age is at least as large.

    The error of the older half has two lower bounds. One is the error expected of independent steps, because with few
    experts the measured error may be small by chance. The other is the median difference between blocks of the history
    that are 16 steps apart, because bursty heat never returns to exactly the same state.
    """
    heat_TLE = heat_TLE[-_MAX_CHANGE_STEPS:]
    steps = len(heat_TLE)
    age_A = _change_ages(min(max_age, steps - _MIN_STEPS_BEFORE))
    if not age_A.size:
        return None
    shares = _SummedShares.of(heat_TLE)
    start_B = np.arange(_MIN_CHANGE_AGE, steps - _MIN_STEPS_BEFORE + 1, _MIN_CHANGE_AGE)
    blocks = _Blocks(start_B, np.minimum(start_B + MIN_LOOKBACK, steps))
    error_A = _segment_errors(shares, age_A, blocks)
    ratio_A = np.minimum(
        _best_block_ratios(shares, age_A, blocks, error_A), _jump_ratios(shares, age_A, error_A)
    )
    clearest = int(ratio_A.argmax())
    return int(age_A[clearest]) if ratio_A[clearest] >= _CHANGE_ERROR_RATIO else None


@dataclass(frozen=True)
class _SummedShares:
    """Cumulative token shares of the experts in a few layers, used to compute means over any range of steps quickly.

    Each layer's shares are divided by the norm of their mean, so that all layers have the same weight.

    Parameters
    ----------
    sums_TX
        float64 ``[T + 1, K * E]``, cumulative shares, starting from the oldest step; the first row is zero.
    noise
        Variance of the shares in a single step, summed over all experts and estimated from the differences between
        consecutive steps.
    """

    sums_TX: Float64
    noise: float

    @classmethod
    def of(cls, heat_TLE: Counts) -> _SummedShares:
        layer_K = np.unique(np.linspace(0, heat_TLE.shape[1] - 1, _MAX_CHANGE_LAYERS).astype(np.int64))
        share_TKE = heat_TLE[:, layer_K].astype(np.float64)
        share_TKE /= np.maximum(share_TKE.sum(axis=2, keepdims=True), 1.0)
        share_TKE /= np.maximum(np.linalg.norm(share_TKE.mean(axis=0), axis=1)[:, None], 1e-30)
        share_TX = share_TKE.reshape(len(heat_TLE), -1)
        noise = 0.0
        if len(share_TX) > 1:
            noise = 0.5 * float(((share_TX[1:] - share_TX[:-1]) ** 2).sum(axis=1).mean())
        sums_TX = np.zeros((len(share_TX) + 1, share_TX.shape[1]))
        np.cumsum(share_TX, axis=0, out=sums_TX[1:])
        return cls(sums_TX, noise)

    def mean(self, newer_B: npt.NDArray[np.int64], older_B: npt.NDArray[np.int64]) -> Float64:
        """Return the mean shares of the steps between each pair of positions, float64 ``[B, X]``."""
        steps = len(self.sums_TX) - 1
        length_B = older_B - newer_B
        mean_BX: Float64 = (self.sums_TX[steps - newer_B] - self.sums_TX[steps - older_B]) / length_B[:, None]
        return mean_BX


@dataclass(frozen=True)
class _Blocks:
    """Blocks of history, up to 16 steps long, from which a segment is forecast.

    Parameters
    ----------
    start_B
        int64 ``[B]``, newer end of each block.
    stop_B
        int64 ``[B]``, older end of each block.
    """

    start_B: npt.NDArray[np.int64]
    stop_B: npt.NDArray[np.int64]

    @property
    def length_B(self) -> npt.NDArray[np.int64]:
        """Number of steps in each block, int64 ``[B]``; 16, except for blocks that reach the oldest step."""
        return self.stop_B - self.start_B

    @property
    def pairs(self) -> int:
        """Number of pairs of full blocks whose starts are 16 steps apart."""
        return max(int(np.count_nonzero(self.length_B == MIN_LOOKBACK)) - _BLOCK_LAG, 0)


def _segment_errors(shares: _SummedShares, age_A: npt.NDArray[np.int64], blocks: _Blocks) -> Float64:
    """Return the error of forecasting each segment's newer half from its older half, float64 ``[A]``.

    The median difference between blocks before the segment that are 16 steps apart is a lower bound on the error.
    """
    half_A = age_A // 2
    newer_AX = shares.mean(np.zeros_like(age_A), half_A)
    error_A: Float64 = ((newer_AX - shares.mean(half_A, age_A)) ** 2).sum(axis=1)
    block_BX = shares.mean(blocks.start_B, blocks.stop_B)
    pairs = blocks.pairs
    difference_P = ((block_BX[_BLOCK_LAG : _BLOCK_LAG + pairs] - block_BX[:pairs]) ** 2).sum(axis=1)
    for index, first in enumerate(np.searchsorted(blocks.start_B, age_A)):
        if first < pairs:
            error_A[index] = max(error_A[index], float(np.median(difference_P[first:])))
    return error_A


def _best_block_ratios(
    shares: _SummedShares, age_A: npt.NDArray[np.int64], blocks: _Blocks, error_A: Float64
) -> Float64:
    """Return each segment's smallest forecast error from any earlier block, relative to ``error_A``, ``[A]``."""
    half_A = age_A // 2
    newer_AX = shares.mean(np.zeros_like(age_A), half_A)
    block_BX = shares.mean(blocks.start_B, blocks.stop_B)
    ratio_AB = (newer_AX**2).sum(axis=1)[:, None] - 2.0 * newer_AX @ block_BX.T + (block_BX**2).sum(axis=1)
    # Expected difference between two means over so few steps if the steps were independent.
    sampling_AB = shares.noise * (1.0 / half_A[:, None] + 1.0 / np.minimum(half_A[:, None], blocks.length_B))
    ratio_AB /= np.maximum(np.maximum(error_A[:, None], sampling_AB), 1e-30)
    ratio_AB[blocks.start_B < age_A[:, None]] = np.inf
    best_A: Float64 = ratio_AB.min(axis=1)
    return best_A


def _jump_ratios(shares: _SummedShares, age_A: npt.NDArray[np.int64], error_A: Float64) -> Float64:
    """Return the difference between the steps just before and after each age, relative to ``error_A``, ``[A]``."""
    after_A = np.minimum(MIN_LOOKBACK, age_A)
    before_A = np.minimum(after_A, len(shares.sums_TX) - 1 - age_A)
    after_AX = shares.mean(age_A - after_A, age_A)
    before_AX = shares.mean(age_A, age_A + before_A)
    jump_A: Float64 = ((after_AX - before_AX) ** 2).sum(axis=1)
    sampling_A = shares.noise * (1.0 / before_A + 1.0 / after_A)
    jump_A /= np.maximum(np.maximum(error_A, sampling_A), 1e-30)
    return jump_A


def _change_ages(max_age: int) -> npt.NDArray[np.int64]:
    """Return the ages at which to look for a change: every age from 2 to 32, then in increments of about an eighth."""
    ages = []
    age = _MIN_CHANGE_AGE
    while age <= max_age:
        ages.append(age)
        age += max(1, age // 32 * 4)
    return np.array(ages, dtype=np.int64)


def _lookbacks(history: int) -> list[int]:
    """Return the look-backs to try: 16 steps, repeatedly doubled while below ``history``, and ``history`` itself.

    Examples
    --------
    >>> _lookbacks(100)
    [16, 32, 64, 100]
    """
    lengths = (MIN_LOOKBACK << power for power in range(history.bit_length()))
    return [*(length for length in lengths if length < history), history]


def _forecast_errors(
    cumulative: Mapping[int, Float64], target: tuple[int, int], start: int, stops: Sequence[int]
) -> Float64:
    """Return the relative squared error of forecasting a target interval from each of several histories.

    Parameters
    ----------
    cumulative
        Token shares as returned by ``_cumulative_shares``. They must include all positions in the other arguments.
    target
        Newer and older end of the interval to forecast.
    start
        Newer end, shared by all histories.
    stops
        Older end of each history.

    Returns
    -------
    Float64
        float64 ``[K]``, one error per history, averaged over the layers.
    """
    newer, older = target
    actual_LE = (cumulative[older] - cumulative[newer]) / (older - newer)
    norm_L = np.maximum((actual_LE**2).sum(axis=1), 1e-30)
    errors = []
    for stop in stops:
        forecast_LE = (cumulative[stop] - cumulative[start]) / (stop - start)
        errors.append((((forecast_LE - actual_LE) ** 2).sum(axis=1) / norm_L).mean())
    return np.array(errors)


def _cumulative_shares(heat_TLE: Counts, lengths: Sequence[int]) -> dict[int, Float64]:
    """Return each expert's token share, summed over the newest ``n`` steps, for each ``n`` in ``lengths``.

    The sum between any two of these positions is then a difference of two sums, without another pass over the heat.

    Returns
    -------
    dict of int to Float64
        float64 ``[L, E]``, keyed by length.
    """
    steps = len(heat_TLE)
    inverse_TL = 1.0 / np.maximum(heat_TLE.sum(axis=2, dtype=np.float64), 1.0)
    total_LE = np.zeros(heat_TLE.shape[1:])
    sums: dict[int, Float64] = {}
    summed = 0
    for length in sorted({*lengths}):
        added = slice(steps - length, steps - summed)
        total_LE = total_LE + np.einsum("tle,tl->le", heat_TLE[added], inverse_TL[added])
        sums[length] = total_LE
        summed = length
    return sums
