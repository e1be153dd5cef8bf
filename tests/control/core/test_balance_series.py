"""The series holds a bounded number of evenly spaced points, however long it goes on, and loses no switch."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from eplb_service.control.core.balance_series import MOST_POINTS, BalanceSeries
from eplb_service.wire.balance import BalancePoint


def series(seconds: int) -> BalanceSeries:
    made = BalanceSeries(interval=1.0)
    for second in range(seconds):
        floor = math.nan if second < 3 else 1.1
        made.add(BalancePoint(1000.0 + second, 1.0 + second / seconds, 1.05, floor, second // 10))
    return made


def test_a_point_per_second_at_first() -> None:
    points = series(10).points
    assert [point.at for point in points] == [1000.0 + second for second in range(10)]
    assert math.isnan(points[0].noise_floor)
    assert points[-1].noise_floor == 1.1


@pytest.mark.parametrize("seconds", [MOST_POINTS, 3 * MOST_POINTS, 100_000])
def test_it_stays_small_even_and_whole(seconds: int) -> None:
    points = series(seconds).points
    assert MOST_POINTS / 2 <= len(points) <= MOST_POINTS
    gaps = {round(b.at - a.at) for a, b in pairwise(points[1:])}
    assert max(gaps) <= 2 * min(gaps)
    assert points[-1].at >= 1000 + seconds - 1 - max(gaps)
    assert [point.par for point in points] == sorted(point.par for point in points)
    assert points[-1].layers_switched >= (seconds - 1 - max(gaps)) // 10


def test_what_is_not_known_is_in_no_mean() -> None:
    made = BalanceSeries(interval=10.0)
    for second, floor in enumerate([math.nan] * 6 + [1.2] * 6):
        made.add(BalancePoint(float(second), 1.5, math.nan, floor, 0))
    first, second_point = made.points
    assert math.isnan(first.noise_floor)
    assert second_point.noise_floor == pytest.approx(1.2)
    assert math.isnan(second_point.par_planned)
