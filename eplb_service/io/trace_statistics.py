"""Figures of a trace: how skewed it is, how fast it moves, and what experts in order would make of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eplb_core.placement import Float64, Placement, par
from eplb_core.planner.score import par_of_steps, sampling_floor, split_steps
from eplb_core.planner.settings import TABLES
from eplb_service.io.trace import Trace


@dataclass(frozen=True)
class TraceStatistics:
    """Figures of a trace, each layer's float64 ``[L]``; ``None`` where they cannot be known.

    Parameters
    ----------
    window
        Steps of the windows that drift is measured between.
    choices_L
        Tokens over all experts (choices of experts) in a step, mean.
    hottest_L, top_tenth_L
        Share of the hottest expert, times E (1 where all are equally hot), and of the hottest tenth of the experts.
    drift_L, drift_noise_L
        Total variation between the popularities of one window and the next, 0 to 1, mean, and what token sampling alone
        would make of it.
    par_L, floor_L
        Peak-to-average ratio of each step with experts in order on ``ranks`` ranks, and what sampling alone leaves.
    par_served_L
        Peak-to-average ratio of each step as it was served while recorded.
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
    """Compute the statistics of a whole trace, one window at a time.

    Parameters
    ----------
    trace
        Heat, and the ranks' loads if they were recorded.
    window
        Steps per window. Drift is measured between windows.
    ranks
        Number of ranks for the peak-to-average ratio: experts are placed in order, with no spare slots.

    Returns
    -------
    TraceStatistics
        ``par_L`` and ``floor_L`` are ``None`` without ``ranks``.

    Raises
    ------
    HeatError
        If the trace is damaged.
    PlacementError
        If the experts do not fit the ranks.
    """
    placement = None
    if ranks is not None:
        slots = -(-trace.experts // ranks)
        placement = Placement.linear(trace.layers, trace.experts, ranks, slots)
    total_LE = np.zeros((trace.layers, trace.experts))
    apart, noise, pairs = np.zeros(trace.layers), np.zeros(trace.layers), 0
    pars: list[tuple[Float64, npt.NDArray[np.int64]]] = []
    floors, served = pars.copy(), pars.copy()
    before_LE: Float64 | None = None
    for first in range(0, trace.steps, window):
        heat_TLE = trace.heat(first, min(trace.steps, first + window))
        sum_LE = heat_TLE.sum(axis=0, dtype=np.float64)
        total_LE += sum_LE
        # The last window may be short; it would drift for its noise alone.
        if before_LE is not None and len(heat_TLE) == window:
            apart += _variation(before_LE, sum_LE)
            noise += _expected_variation(before_LE + sum_LE)
            pairs += 1
        before_LE = sum_LE
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
        drift_L=apart / pairs if pairs else None,
        drift_noise_L=noise / pairs if pairs else None,
        par_L=_busy_mean(pars),
        floor_L=_busy_mean(floors),
        par_served_L=_busy_mean(served),
    )


def _busy_mean(parts: list[tuple[Float64, npt.NDArray[np.int64]]]) -> Float64 | None:
    """Mean over the steps in which a layer has tokens, of means of so many such steps; NaN where it never had any."""
    if not parts:
        return None
    mean_WL, steps_WL = np.array([mean_L for mean_L, _ in parts]), np.array([steps_L for _, steps_L in parts])
    total_L, steps_L = (np.where(steps_WL > 0, mean_WL, 0.0) * steps_WL).sum(axis=0), steps_WL.sum(axis=0)
    busy_L: Float64 = np.full(total_L.shape, np.nan)
    np.divide(total_L, steps_L, out=busy_L, where=steps_L > 0)
    return busy_L


def _shares(sum_LE: Float64) -> Float64:
    share_LE: Float64 = sum_LE / np.maximum(sum_LE.sum(axis=1, keepdims=True), 1e-300)
    return share_LE


def _variation(one_LE: Float64, other_LE: Float64) -> Float64:
    apart_L: Float64 = 0.5 * np.abs(_shares(one_LE) - _shares(other_LE)).sum(axis=1)
    return apart_L


def _expected_variation(both_LE: Float64) -> Float64:
    """Expected total variation between two halves of ``both_LE`` that differ by sampling alone.

    Each share's difference is nearly normal with variance 2p(1-p)/n for n tokens a half.
    """
    share_LE = _shares(both_LE)
    half_L = np.maximum(both_LE.sum(axis=1) / 2, 1.0)
    expected_L: Float64 = np.sqrt(share_LE * (1 - share_LE) / (np.pi * half_L[:, None])).sum(axis=1)
    return expected_L
