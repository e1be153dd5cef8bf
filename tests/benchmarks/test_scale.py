"""The load generator's ranks are taken in by a real service, and what holds its event loop is measured by CPU."""

from __future__ import annotations

import asyncio
import time

import pytest

from benchmarks.scale.__main__ import measure
from benchmarks.scale.heat import Scale, drawn_reports
from benchmarks.scale.holds import LONG_SECONDS, watched
from benchmarks.scale.ranks import Load
from eplb_service.wire.heat import decode_heat_report, encode_heat_report
from eplb_service.wire.hello import Shape


def _burn() -> None:
    until = time.thread_time() + 1.5 * LONG_SECONDS
    while time.thread_time() < until:
        pass


def test_holds_are_counted_by_cpu_and_named() -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.call_soon(_burn)
        # Waiting is no hold, whatever else the machine does.
        loop.call_soon(time.sleep, 3 * LONG_SECONDS)
        await asyncio.sleep(0.1)

    with watched() as holds:
        asyncio.run(run())
    assert holds.long == 1
    assert max(holds.named, key=holds.named.__getitem__) == "_burn"
    assert holds.wall >= 3 * LONG_SECONDS > holds.cpu


@pytest.mark.parametrize("sums", [False, True])
def test_what_ranks_send_is_what_a_service_takes(sums: bool) -> None:
    scale = Scale(ranks=8, layers=3, experts=16)
    shape = Shape(scale.ranks, scale.layers, scale.experts, scale.slots, 1)
    reports = drawn_reports(scale, rank=2, steps=4, sums=sums)
    for report in reports:
        taken = decode_heat_report(encode_heat_report(report), shape, most_steps=4)
        assert taken.slot_counts_TLS is not None
        assert (taken.source_sums_LE is not None, taken.source_counts_TLE is not None) == (sums, not sums)
    totals = [report.slot_counts_TLS.sum() for report in reports if report.slot_counts_TLS is not None]
    expected = 4 * 3 * 64 * 8
    assert sum(totals) / len(totals) == pytest.approx(expected, rel=0.5)


@pytest.mark.slow
def test_a_small_deployment_is_held_with_nothing_lost() -> None:
    load = Load(Scale(ranks=8, layers=4, experts=16), steps_per_second=20, report_steps=4, sums=True)
    measured = measure(load, seconds=4, processes=1, plan=True)
    assert measured.lost_steps == measured.dropped_steps == 0
    assert measured.reports_per_second > 0
    assert measured.cpu_ms_per_step > 0
    assert measured.plan_ms is not None
    assert 0 <= measured.plan_ms[0] <= measured.plan_ms[1]
