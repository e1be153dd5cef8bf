"""The recorded heat of the embedded model is whole, and shifts when, and only when, the domain does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from eplb_service.io.open_trace import open_trace
from eplb_service.offline import solve

RECORDED = Path(__file__).parents[1] / "data" / "byte_moe_heat.npz"
RANKS, REQUESTS, TOP_K = 4, 32, 4
REQUEST_STEPS = 96
"""After so many steps of a phase, all requests of the one before have ended."""

Held = dict[str, npt.NDArray[np.generic]]


@pytest.fixture(scope="module")
def held() -> Held:
    with np.load(RECORDED) as file:
        return {name: file[name].astype(np.int64) for name in ("counts", "source", "phase", "requests")}


def _shares(counts_TLE: npt.NDArray[np.generic]) -> npt.NDArray[np.float64]:
    summed_LE = counts_TLE.sum(axis=0, dtype=np.float64)
    return summed_LE / summed_LE.sum(axis=1, keepdims=True)


def test_every_choice_of_every_request_is_counted_once(held: Held) -> None:
    assert (held["source"].sum(axis=3) == REQUESTS * TOP_K).all()
    np.testing.assert_array_equal(held["source"].sum(axis=1), held["counts"])
    assert (held["requests"].sum(axis=2) == REQUESTS).all()


def test_it_is_a_trace_that_every_command_reads(held: Held) -> None:
    trace = open_trace(RECORDED)
    np.testing.assert_array_equal(trace.heat(0, trace.steps), held["counts"])


def test_heat_differs_more_between_domains_than_within_one(held: Held) -> None:
    settled = [held["counts"][held["phase"] == phase][REQUEST_STEPS:] for phase in range(4)]
    halves = [np.array_split(part_TLE, 2) for part_TLE in settled]
    within = [_distance(_shares(early), _shares(late)) for early, late in halves]
    between = [
        _distance(_shares(settled[one]), _shares(settled[other])) for one in range(4) for other in range(one)
    ]
    assert max(within) < 0.06
    assert min(between) > 0.15


def _distance(one_LE: npt.NDArray[np.float64], other_LE: npt.NDArray[np.float64]) -> float:
    """Part of the choices that moved to other experts."""
    return float(0.5 * np.abs(one_LE - other_LE).sum(axis=1).mean())


def test_a_placement_for_one_domain_serves_it_well(held: Held) -> None:
    data_TLE = held["counts"][held["phase"] == 3][REQUEST_STEPS:]
    solved = solve(data_TLE, RANKS, slots=10)
    assert solved.par_after < 1.15 < 1.4 < solved.par_before
