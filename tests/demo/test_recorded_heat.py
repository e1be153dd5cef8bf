"""Tests that the embedded model's recorded heat is complete, and shifts only when the domain changes."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from eplb_service.io.open_trace import open_trace
from eplb_service.offline import solve

RECORDED = Path(__file__).parents[1] / "data" / "byte_moe_heat.npz"
RANKS = 4
REQUESTS = 32
TOP_K = 4
REQUEST_STEPS = 96
"""Number of steps after the start of a phase until all requests from the previous phase have ended."""

Recording = dict[str, npt.NDArray[np.generic]]


@pytest.fixture(scope="module")
def recording() -> Recording:
    with np.load(RECORDED) as file:
        return {name: file[name].astype(np.int64) for name in ("counts", "source", "phase", "requests")}


def test_every_choice_of_every_request_is_counted_once(recording: Recording) -> None:
    assert (recording["source"].sum(axis=3) == REQUESTS * TOP_K).all()
    np.testing.assert_array_equal(recording["source"].sum(axis=1), recording["counts"])
    assert (recording["requests"].sum(axis=2) == REQUESTS).all()


def test_the_recording_opens_as_a_trace(recording: Recording) -> None:
    trace = open_trace(RECORDED)
    np.testing.assert_array_equal(trace.heat(0, trace.steps), recording["counts"])


def test_heat_differs_more_between_domains_than_within_one(recording: Recording) -> None:
    settled = [recording["counts"][recording["phase"] == phase][REQUEST_STEPS:] for phase in range(4)]
    halves = [[part_TLE.sum(axis=0) for part_TLE in np.array_split(phase_TLE, 2)] for phase_TLE in settled]
    shares_2PLE = np.array(halves).swapaxes(0, 1) / np.array(halves).sum(axis=3, keepdims=True).swapaxes(0, 1)

    def moved(one_LE: npt.NDArray[np.float64], other_LE: npt.NDArray[np.float64]) -> float:
        """Return the fraction of router choices that moved to different experts."""
        return float(0.5 * np.abs(one_LE - other_LE).sum(axis=1).mean())

    early_PLE, late_PLE = shares_2PLE
    assert max(map(moved, early_PLE, late_PLE)) < 0.06
    assert min(moved(one, other) for one, other in combinations(late_PLE, 2)) > 0.15


def test_a_placement_solved_for_one_domain_balances_it(recording: Recording) -> None:
    data_TLE = recording["counts"][recording["phase"] == 3][REQUEST_STEPS:]
    solved = solve(data_TLE, RANKS, slots=10)
    assert solved.par_after < 1.15 < 1.4 < solved.par_before
