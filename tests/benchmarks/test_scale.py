"""Tests that the scale and switch benchmarks complete, and that event-loop blocking is measured in CPU time."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import multiprocessing
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.scale import __main__ as scale_run
from benchmarks.scale.__main__ import measure
from benchmarks.scale.heat import Scale, drawn_report, expected_tokens
from benchmarks.scale.measured import Measured, verdicts
from benchmarks.scale.measured_service import LONG_SECONDS, Holds, asked_by, watched
from benchmarks.scale.ranks import Load
from eplb_core.wire.codec import encode
from eplb_core.wire.heat import decode_heat_report

SMALL = ["--pairs", "32", "--rounds", "2", "--hidden", "64", "--intermediate", "32"]


def _burn() -> None:
    until = time.thread_time() + 5 * LONG_SECONDS
    while time.thread_time() < until:
        pass


def test_event_loop_blocks_are_named_and_measured_in_cpu_time() -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.call_soon(_burn)
        # Sleeping does not count as blocking, regardless of other load on the machine.
        loop.call_soon(time.sleep, 10 * LONG_SECONDS)
        await asyncio.sleep(0.1)

    with watched() as holds:
        asyncio.run(run())
    assert holds.name == "_burn"
    assert 4 * LONG_SECONDS < holds.cpu < 10 * LONG_SECONDS


def test_time_in_which_the_cpu_is_not_scheduled_does_not_count_as_a_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The clock jumps while the thread is idle, as on Linux when the hypervisor does not schedule a virtual CPU."""
    jumped = 0.0
    thread_time = time.thread_time
    monkeypatch.setattr(time, "thread_time", lambda: thread_time() + jumped)

    def stand_still() -> None:
        nonlocal jumped
        jumped += 10 * LONG_SECONDS

    async def run() -> None:
        asyncio.get_running_loop().call_soon(stand_still)
        await asyncio.sleep(0.01)

    with watched() as holds:
        asyncio.run(run())
    assert holds.still >= 9 * LONG_SECONDS
    assert holds.cpu < LONG_SECONDS


def test_the_service_accepts_the_reports_of_simulated_ranks() -> None:
    scale = Scale(ranks=8, layers=3, experts=16)
    expected_LS = expected_tokens(scale, scale.placement(), 2)
    reports = [drawn_report(scale, 2, 4, expected_LS, variant) for variant in range(4)]
    for report in reports:
        decoded = decode_heat_report(encode(report), scale.shape, most_steps=4)
        assert (decoded.slot_counts_TLS is None, decoded.source_sums_LE is None) == (False, False)
    totals = [report.slot_counts_TLS.sum() for report in reports if report.slot_counts_TLS is not None]
    assert sum(totals) / len(totals) == pytest.approx(4 * 3 * 64 * 8, rel=0.5)


def measured(**changes: Any) -> Measured:
    """Return the figures of a half-hour run that met every target, overridden by the figures in ``changes``."""
    good: dict[str, Any] = {field.name: 1.0 for field in dataclasses.fields(Measured)}
    good |= {"ranks": 256, "seconds": 1800.0, "steps_per_second": 20.0, "wanted_per_second": 20.0}
    good |= {"cpu_percent": 8.0, "deciding_cpu_seconds": (1.0, 1.0), "plan_ms": (1.0, 1.0, 9.0)}
    good |= {"lost_steps": 0, "dropped_steps": 0, "reports_per_second": 320.0, "resident_mb": (200, 300, 301)}
    good |= dict.fromkeys(("joining", "holding", "deciding"), Holds(cpu=0.009))
    return Measured(**good | changes)


def verdicts_of(figures: Measured) -> dict[str, bool]:
    """Return whether each target was met, keyed by the first part of the target's name."""
    return {
        " ".join(verdict.what.partition(": ")[2].split()[:3]): verdict.met for verdict in verdicts([figures])
    }


@pytest.mark.parametrize(
    ("found", "missed"),
    [
        ({}, set()),
        ({"cpu_percent": 12.0}, {"the service uses"}),
        ({"ranks": 64, "cpu_percent": 12.0}, set()),
        ({"steps_per_second": 10.0}, {"the service uses", "steps are assembled"}),
        ({"lost_steps": 1}, {"no step is"}),
        ({"dropped_steps": 1}, {"no step is"}),
        ({"joining": Holds(cpu=0.11)}, {"no callback blocks"}),
        ({"deciding": Holds(cpu=0.11)}, {"no callback blocks"}),
        ({"resident_mb": (200.0, 300.0, 330.0)}, {"memory grows by"}),
        ({"plan_ms": None}, {"the first plan"}),
        ({"plan_ms": (1.0, 9.0, 5001.0)}, {"the first plan"}),
        # The steps of one report may still be in transit.
        ({"seconds": 20.0, "steps_per_second": 19.2, "reports_per_second": 80.0}, set()),
        (
            {"ranks": 64, "seconds": 20.0, "steps_per_second": 19.2, "reports_per_second": 1280.0},
            {"steps are assembled"},
        ),
        # Rates and memory are not judged in a short run, but losses are still reported.
        (
            {"seconds": 10.0, "steps_per_second": 13.0, "reports_per_second": 80.0, "lost_steps": 3},
            {"no step is"},
        ),
    ],
)
def test_figures_beyond_their_limits_miss_their_targets(found: dict[str, Any], missed: set[str]) -> None:
    judged = verdicts_of(measured(**found))
    assert {name for name, met in judged.items() if not met} == missed


@pytest.mark.parametrize(("last_mb", "status"), [(301.0, 0), (330.0, 1)])
def test_a_run_that_misses_a_target_exits_with_1(
    last_mb: float, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = measured(ranks=64, seconds=300.0, resident_mb=(200.0, 300.0, last_mb))
    monkeypatch.setattr(scale_run, "measure", lambda *_, **__: figures)
    monkeypatch.setattr("sys.argv", ["scale", "--ranks", "64"])
    assert scale_run.main() == status
    printed = capsys.readouterr().out
    assert ("NOT MET" in printed) == bool(status)
    assert f"{last_mb:.0f}; 1; {last_mb - 300:+.1f}" in printed


@pytest.mark.slow
def test_the_service_keeps_up_with_a_small_deployment_without_loss() -> None:
    load = Load(Scale(ranks=8, layers=4, experts=16), 20, report_steps=4, switch_steps=4, interval=32)
    figures = measure(load, seconds=4, processes=2, plan=True)
    assert figures.lost_steps == figures.dropped_steps == 0
    assert figures.reports_per_second > 0
    assert figures.cpu_ms_per_step > 0
    assert figures.plan_ms is not None
    assert 0 <= figures.plan_ms[0] <= figures.plan_ms[1] <= figures.plan_ms[2]
    assert figures.switched > 0 == figures.switched % load.scale.ranks


def test_a_child_process_notices_that_the_measuring_process_has_exited() -> None:
    parent_end, child_end = multiprocessing.Pipe()
    parent_end.send("tally")
    parent_end.close()
    assert [asked_by(child_end), asked_by(child_end)] == ["tally", None]


@pytest.mark.slow
def test_the_switch_benchmark_measures_every_ratio(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    subprocess.run([sys.executable, "-m", "benchmarks.switch.run", *SMALL, "--json", path], check=False)
    ratios = json.loads(path.read_text())["ratios"]
    assert len(ratios) == 7
    assert all(ratio["ratio"] > 0 for ratio in ratios)
