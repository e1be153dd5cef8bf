"""The load generator's ranks are taken in by a real service, and what holds its event loop is measured by CPU."""

from __future__ import annotations

import asyncio
import dataclasses
import multiprocessing
import time
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.scale import __main__ as scale_run
from benchmarks.scale.__main__ import measure
from benchmarks.scale.asking import asked_by
from benchmarks.scale.heat import Scale, drawn_reports
from benchmarks.scale.holds import LONG_SECONDS, watched
from benchmarks.scale.measured import Held, Measured
from benchmarks.scale.ranks import Load
from benchmarks.scale.targets import verdicts
from eplb_service.wire.heat import decode_heat_report, encode_heat_report
from eplb_service.wire.hello import Shape


def _burn() -> None:
    until = time.thread_time() + 5 * LONG_SECONDS
    while time.thread_time() < until:
        pass


def test_holds_are_counted_by_cpu_and_named() -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.call_soon(_burn)
        # Waiting is no hold, whatever else the machine does.
        loop.call_soon(time.sleep, 10 * LONG_SECONDS)
        await asyncio.sleep(0.1)

    with watched() as holds:
        asyncio.run(run())
    assert holds.long == 1
    assert max(holds.named, key=holds.named.__getitem__) == "_burn"
    assert holds.wall >= 10 * LONG_SECONDS > holds.cpu


def test_a_processor_that_stands_still_is_no_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that jumps while the thread does nothing is what Linux shows of a virtual processor that is not run."""
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
    assert holds.long == 0
    assert holds.still >= 9 * LONG_SECONDS
    assert holds.cpu < LONG_SECONDS


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


def measured(**found: Any) -> Measured:
    """A run of half an hour that met every target, but for what ``found`` says."""
    good = Measured(
        ranks=256,
        seconds=1800.0,
        steps_per_second=20.0,
        wanted_per_second=20.0,
        cpu_ms_per_step=4.0,
        cpu_percent=8.0,
        loop_cpu_percent=6.0,
        lost_steps=0,
        dropped_steps=0,
        megabytes_per_second=1.0,
        reports_per_second=320.0,
        resident_mb=(200.0, 300.0, 301.0),
        joining=Held(9.0, 30.0, {}),
        holding=Held(5.0, 6.0, {}),
        deciding=Held(9.0, 90.0, {}),
        long_holds=0,
        plan_ms=(1.0, 9.0),
        decide_seconds=1.0,
    )
    return dataclasses.replace(good, **found)


@pytest.mark.parametrize(
    ("found", "missed"),
    [
        ({}, set()),
        ({"cpu_percent": 12.0}, {"256 ranks cost"}),
        ({"ranks": 64, "cpu_percent": 12.0}, set()),
        ({"steps_per_second": 10.0}, {"256 ranks cost", "steps are put"}),
        ({"lost_steps": 1}, {"no step is lost"}),
        ({"dropped_steps": 1}, {"no step is lost"}),
        ({"joining": Held(21.0, 21.0, {})}, {"nothing holds"}),
        ({"deciding": Held(21.0, 21.0, {})}, {"nothing holds"}),
        ({"resident_mb": (200.0, 300.0, 330.0)}, {"memory grows"}),
        ({"plan_ms": None}, {"a plan reaches"}),
    ],
)
def test_targets_are_met_or_missed(found: dict[str, Any], missed: set[str]) -> None:
    judged = list(verdicts([measured(**found)]))
    names = {name for _, name, _, word in judged if word == "missed"}
    assert len(names) == len(missed)
    assert all(any(name.startswith(start) for name in names) for start in missed)
    assert {word for *_, word in judged} <= {"met", "missed"}


@pytest.mark.parametrize(("reports_per_second", "word"), [(80.0, "met"), (1280.0, "missed")])
def test_steps_of_one_report_may_be_under_way(reports_per_second: float, word: str) -> None:
    found = measured(seconds=20.0, steps_per_second=19.2, reports_per_second=reports_per_second)
    outcomes = {name: said for _, name, _, said in verdicts([found])}
    assert next(said for name, said in outcomes.items() if name.startswith("steps are put")) == word


def test_a_run_of_few_reports_says_nothing_of_the_rate_but_names_losses() -> None:
    found = measured(seconds=10.0, steps_per_second=13.0, reports_per_second=80.0, lost_steps=3)
    outcomes = {name: verdict for _, name, _, verdict in verdicts([found])}
    assert (
        next(verdict for name, verdict in outcomes.items() if name.startswith("steps are put"))
        == "too short to say"
    )
    assert (
        next(verdict for name, verdict in outcomes.items() if name.startswith("no step is lost")) == "missed"
    )


def test_a_decision_that_never_comes_is_a_missed_plan_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scale_run, "_PLAN_SECONDS", 0.2)
    found = scale_run._decide(SimpleNamespace(address="127.0.0.1:1"), None)  # type: ignore[arg-type]
    assert found[0] is None
    assert "no decision" in capsys.readouterr().err


def test_a_short_run_says_nothing_of_memory_that_stays() -> None:
    outcomes = {name: word for _, name, _, word in verdicts([measured(seconds=20.0)])}
    assert [word for name, word in outcomes.items() if name.startswith("memory")] == ["too short to say"]


@pytest.mark.parametrize(("last_mb", "status"), [(301.0, 0), (330.0, 1)])
def test_a_run_that_misses_a_target_exits_with_1(
    last_mb: float, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = measured(ranks=64, seconds=300.0, resident_mb=(200.0, 300.0, last_mb))
    monkeypatch.setattr(scale_run, "measure", lambda *_, **__: found)
    monkeypatch.setattr("sys.argv", ["scale", "--ranks", "64"])
    assert scale_run.main() == status
    printed = capsys.readouterr().out
    assert ("missed" in printed) == bool(status)
    assert f"+100.0, {last_mb - 300:+.1f}" in printed


@pytest.mark.slow
def test_a_small_deployment_is_held_with_nothing_lost() -> None:
    load = Load(Scale(ranks=8, layers=4, experts=16), steps_per_second=20, report_steps=4, sums=True)
    found = measure(load, seconds=4, processes=1, plan=True)
    assert found.lost_steps == found.dropped_steps == 0
    assert found.reports_per_second > 0
    assert found.cpu_ms_per_step > 0
    assert len(found.resident_mb) == 11
    assert found.plan_ms is not None
    assert 0 <= found.plan_ms[0] <= found.plan_ms[1]


def test_whoever_was_started_hears_that_the_measuring_process_is_gone() -> None:
    ours, theirs = multiprocessing.Pipe()
    ours.send("tally")
    ours.close()
    assert [asked_by(theirs), asked_by(theirs)] == ["tally", None]
