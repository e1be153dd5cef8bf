"""Statistics of a trace: skew, drift, and the peak-to-average ratio (PAR) with the experts placed in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from eplb_core.placement import Float64, Placement, par
from eplb_core.planner.score import par_of_steps, sampling_floor, split_steps
from eplb_core.planner.settings import TABLES
from eplb_service.io.trace import Trace

_WindowMean: TypeAlias = tuple[Float64, npt.NDArray[np.int64]]
"""Mean of each layer over its busy steps in one window, float64 ``[L]``, and the number of these steps, ``[L]``."""


@dataclass(frozen=True)
class TraceStatistics:
    """Statistics of a trace. Per-layer statistics are float64 ``[L]``, or ``None`` if they cannot be computed.

    Parameters
    ----------
    window
        Steps per window. Drift is measured between consecutive windows.
    choices_L
        Mean number of expert choices per step: tokens times experts per token.
    hottest_L
        Share of the hottest expert, times E. It is 1 if all experts are equally hot.
    top_tenth_L
        Share of the hottest tenth of the experts.
    drift_L
        Mean total variation distance, 0 to 1, between the expert shares in one window and in the next.
    drift_noise_L
        Value of ``drift_L`` that token sampling alone would cause if the shares did not change.
    par_L
        Mean PAR per step with the experts placed in order.
    floor_L
        Mean noise floor per step: the PAR that token sampling gives a perfectly balanced placement.
    par_served_L
        Mean PAR per step during the recording.
    """

    window: int
    choices_L: Float64
    hottest_L: Float64
    top_tenth_L: Float64
    drift_L: Float64 | None
    drift_noise_L: Float64 | None
    par_L: Float64 | None
    floor_L: Float64 | None
    par_served_L: Float64 | None


def statistics(trace: Trace, window: int, ranks: int | None = None) -> TraceStatistics:
    """Compute the statistics of a trace, reading one window at a time.

    Parameters
    ----------
    trace
        Trace to read. ``par_served_L`` requires recorded rank loads.
    window
        Steps per window. Drift is measured between windows.
    ranks
        Number of ranks for ``par_L`` and ``floor_L``, which are ``None`` if it is not given. The experts are placed in
        order, with as few slots as possible.

    Returns
    -------
    TraceStatistics
        The statistics.

    Raises
    ------
    HeatError
        If the trace is damaged.
    PlacementError
        If the experts cannot be placed on that many ranks.

    Examples
    --------
    On two ranks, experts 0 and 1 share the first rank, which has 6 of the 8 tokens: the PAR is 6 / 4.

    >>> from eplb_service.io.trace import ArrayTrace
    >>> result = statistics(ArrayTrace(np.array([[[5, 1, 1, 1]]])), window=1, ranks=2)
    >>> result.hottest_L, result.par_L
    (array([2.5]), array([1.5]))
    """
    placement = None
    if ranks is not None:
        slots = -(-trace.experts // ranks)
        placement = Placement.linear(trace.layers, trace.experts, ranks, slots)
    total_LE = np.zeros((trace.layers, trace.experts))
    drift_L = np.zeros(trace.layers)
    noise_L = np.zeros(trace.layers)
    pairs = 0
    pars: list[_WindowMean] = []
    floors: list[_WindowMean] = []
    served: list[_WindowMean] = []
    previous_LE: Float64 | None = None
    for first in range(0, trace.steps, window):
        heat_TLE = trace.heat(first, min(trace.steps, first + window))
        sum_LE = heat_TLE.sum(axis=0, dtype=np.float64)
        total_LE += sum_LE
        # A short last window would show more drift merely because it has more sampling noise.
        if previous_LE is not None and len(heat_TLE) == window:
            drift_L += _variation(previous_LE, sum_LE)
            noise_L += _expected_variation(previous_LE + sum_LE)
            pairs += 1
        previous_LE = sum_LE
        busy_L = heat_TLE.any(axis=2).sum(axis=0)
        if placement is not None:
            in_order = split_steps(heat_TLE, placement, placement.default_log2phy(), None, TABLES)
            pars.append((par_of_steps(in_order), busy_L))
            floors.append((sampling_floor(in_order), busy_L))
        served_TLR = trace.served_loads(first, first + len(heat_TLE))
        if served_TLR is not None:
            served.append((par(served_TLR), busy_L))
    share_LE = _shares(total_LE)
    tenth = max(1, round(trace.experts / 10))
    return TraceStatistics(
        window=window,
        choices_L=total_LE.sum(axis=1) / trace.steps,
        hottest_L=share_LE.max(axis=1) * trace.experts,
        top_tenth_L=np.sort(share_LE, axis=1)[:, -tenth:].sum(axis=1),
        drift_L=drift_L / pairs if pairs else None,
        drift_noise_L=noise_L / pairs if pairs else None,
        par_L=_busy_mean(pars),
        floor_L=_busy_mean(floors),
        par_served_L=_busy_mean(served),
    )


def _busy_mean(windows: list[_WindowMean]) -> Float64 | None:
    """Return each layer's mean over its steps with tokens, float64 ``[L]``.

    A layer without any tokens gets NaN. Without windows, the result is ``None``.
    """
    if not windows:
        return None
    mean_WL = np.array([mean_L for mean_L, _ in windows])
    steps_WL = np.array([steps_L for _, steps_L in windows])
    total_L = (np.where(steps_WL > 0, mean_WL, 0.0) * steps_WL).sum(axis=0)
    steps_L = steps_WL.sum(axis=0)
    busy_L: Float64 = np.full(total_L.shape, np.nan)
    np.divide(total_L, steps_L, out=busy_L, where=steps_L > 0)
    return busy_L


def _shares(sum_LE: Float64) -> Float64:
    """Return each expert's share of its layer's tokens."""
    share_LE: Float64 = sum_LE / np.maximum(sum_LE.sum(axis=1, keepdims=True), 1e-300)
    return share_LE


def _variation(first_LE: Float64, second_LE: Float64) -> Float64:
    """Return the total variation distance between the expert shares of two windows, float64 ``[L]``."""
    variation_L: Float64 = 0.5 * np.abs(_shares(first_LE) - _shares(second_LE)).sum(axis=1)
    return variation_L


def _expected_variation(total_LE: Float64) -> Float64:
    """Return the expected total variation distance between two windows that differ only by token sampling.

    The difference between an expert's two shares is nearly normal, with variance 2p(1-p)/n for n tokens per window.

    Parameters
    ----------
    total_LE
        Total tokens in both windows.
    """
    share_LE = _shares(total_LE)
    half_L = np.maximum(total_LE.sum(axis=1) / 2, 1.0)
    expected_L: Float64 = np.sqrt(share_LE * (1 - share_LE) / (np.pi * half_L[:, None])).sum(axis=1)
    return expected_L
