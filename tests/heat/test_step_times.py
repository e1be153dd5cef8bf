"""A step's time is the ranks' median, waits for requests are no steps, and shared tokens count once."""

from __future__ import annotations

from statistics import median

import numpy as np
import pytest

from eplb_service.heat.assembler import HeatAssembler
from eplb_service.heat.step_times import StepTimes, StepTimesRing
from eplb_service.placement import Placement
from eplb_service.wire.heat import HeatReport, StepPhase


def test_the_median_is_of_those_ranks_that_measured() -> None:
    rng = np.random.default_rng(0)
    micros_TR = rng.integers(1, 1000, (50, 5)) * (rng.random((50, 5)) < 0.6)
    ring = StepTimesRing(64, np.arange(5))
    for row, micros_R in enumerate(micros_TR):
        ring.put(row, micros_R, np.full(5, -1))
    found = ring.of(np.arange(50), np.ones(50, dtype=bool))
    for micros_R, us in zip(micros_TR, found.us_T, strict=True):
        known = [micros for micros in micros_R if micros > 0]
        assert us == median(known) if known else np.isnan(us)
    assert np.isnan(found.tokens_T).all()


def test_a_wait_for_requests_is_no_step() -> None:
    times = StepTimes(np.array([1000.0, np.nan, 1100.0, 900_000.0, 1200.0]), np.array([8.0, 8, 10, 2, 12]))
    assert times.served_T.tolist() == [True, False, True, False, True]
    assert times.mean_us == pytest.approx(1100)
    assert times.tokens_per_step == pytest.approx(10)
    assert times.newest(1).mean_us == 1200


def test_nothing_is_known_where_nothing_was_measured() -> None:
    times = StepTimes(np.full(3, np.nan), np.full(3, np.nan))
    assert times.mean_us is None
    assert times.tokens_per_step is None


def test_ranks_that_see_the_same_tokens_count_them_once_and_old_agents_leave_them_unknown() -> None:
    ranks, layers, experts, slots = 4, 1, 8, 2
    placement = Placement.linear(layers, experts, ranks, slots)
    groups_R = np.array([0, 0, 1, 1], dtype=np.int32)
    heat = HeatAssembler(ranks, layers, experts, slots, 8, 4, groups_R)
    heat.placements.place(0, 0, placement.phy2log_LRS[0], placement.default_log2phy()[:, 0])
    counts_TLS = np.ones((2, layers, slots), dtype=np.int32)
    phase_T = np.full(2, StepPhase.DECODE, dtype=np.uint8)
    for rank in range(ranks):
        tokens_T, micros_T = np.array([5 + rank // 2] * 2), np.array([0, 1000 + rank])
        heat.add(rank, HeatReport(0, (0,), counts_TLS, phase_T, tokens_T=tokens_T, micros_T=micros_T))
    for rank in range(ranks):
        heat.add(rank, HeatReport(2, (0,), counts_TLS, phase_T))
    times = heat.step_times((0,))
    np.testing.assert_array_equal(times.us_T, [np.nan, 1001.5, np.nan, np.nan])
    np.testing.assert_array_equal(times.tokens_T, [11, 11, np.nan, np.nan])
    assert np.isnan(heat.step_times((1,)).us_T).all(), (
        "what was served under another placement says nothing of this"
    )
