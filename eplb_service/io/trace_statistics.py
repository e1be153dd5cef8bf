"""What a trace is like: how skewed, how fast it moves, and what experts in order would make of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from eplb_service.io.trace import Float64, Heat, Trace
from eplb_service.placement import Placement
from eplb_service.planner.noise_floor import noise_floor
from eplb_service.planner.scoring import par, rank_loads


@dataclass(frozen=True)
class TraceStatistics:
    """Figures of a trace, each layer's float64 ``[L]``.

    Parameters
    ----------
    window
        Steps of the windows that drift is measured between.
    choices_L
        Tokens over all experts (choices of experts) in a step, mean.
    hottest_L
        Share of the hottest expert, times E: 1 where all are equally hot.
    top_tenth_L
        Share of all tokens that the hottest tenth of the experts gets.
    drift_L
        Total variation between the popularities of one window and the next, 0 to 1, mean; 0 where there is one window.
    drift_noise_L
        What token sampling alone would make of it.
    par_L, floor_L
        Peak-to-average ratio of each step with experts in order on ``ranks`` ranks, and what sampling alone leaves;
        both ``None`` where the ranks are not known.
    par_served_L
        Peak-to-average ratio of each step as it was served while recorded; ``None`` where the trace does not tell.
    """

    window: int
    choices_L: Float64
    hottest_L: Float64
    top_tenth_L: Float64
    drift_L: Float64
    drift_noise_L: Float64
    par_L: Float64 | None
    floor_L: Float64 | None
    par_served_L: Float64 | None


def statistics(trace: Trace, window: int, ranks: int | None = None) -> TraceStatistics:
    """Figures of a whole trace, read a window at a time.

    ``ranks`` asks for the peak-to-average ratio of experts in order, with as few slots as hold them. Raises
    ``HeatError`` where the trace is damaged, ``PlacementError`` where the experts do not fit the ranks.
    """
    placement = None
    if ranks is not None:
        slots = -(-trace.experts // ranks)
        placement = Placement.linear(trace.layers, trace.experts, ranks, slots)
    total_LE = np.zeros((trace.layers, trace.experts))
    apart, noise, pairs = np.zeros(trace.layers), np.zeros(trace.layers), 0
    pars: list[Float64] = []
    floors: list[Float64] = []
    served: list[Float64] = []
    lengths: list[int] = []
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
        if placement is not None:
            loaded_L, floor_L = _balance(heat_TLE, placement)
            pars.append(loaded_L)
            floors.append(floor_L)
        served_TLR = trace.served_loads(first, first + len(heat_TLE))
        if served_TLR is not None:
            served.append(par(served_TLR))
        lengths.append(len(heat_TLE))
    share_LE = _shares(total_LE)
    tenth = max(1, round(trace.experts / 10))
    return TraceStatistics(
        window=window,
        choices_L=total_LE.sum(axis=1) / trace.steps,
        hottest_L=share_LE.max(axis=1) * trace.experts,
        top_tenth_L=np.sort(share_LE, axis=1)[:, -tenth:].sum(axis=1),
        drift_L=apart / max(1, pairs),
        drift_noise_L=noise / max(1, pairs),
        par_L=np.average(pars, axis=0, weights=lengths) if pars else None,
        floor_L=np.average(floors, axis=0, weights=lengths) if floors else None,
        par_served_L=np.average(served, axis=0, weights=lengths) if served else None,
    )


def _balance(heat_TLE: Heat, placement: Placement) -> tuple[Float64, Float64]:
    loads_TLR = rank_loads(heat_TLE, placement, placement.default_log2phy())
    return par(loads_TLR), noise_floor(heat_TLE, placement.ranks)  # type: ignore[arg-type]


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
