"""``python -m benchmarks.scale``: one service under the heat of 64, 256 and 1,024 ranks.

The service runs in a process of its own, the agents as coroutines in others. On a busy machine the service's CPU
seconds per step are the figure that holds; rates and latencies count what else runs. Exits with 1 where a target is
missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import grpc
from rich.console import Console
from rich.table import Table

from benchmarks.scale.heat import Scale
from benchmarks.scale.measured import Held, Measured
from benchmarks.scale.measured_service import MeasuredService, Reading, measured_service
from benchmarks.scale.ranks import DEPLOYMENT, Load, RankProcesses, Tally, rank_processes
from benchmarks.scale.targets import MISSED, verdicts
from eplb_service.wire.generated import operator_pb2, operator_pb2_grpc

_SETTLE_SECONDS = 4.0
_GROW_SECONDS = 30.0
"""By then a service knows how fast the ranks step, and has asked them for reports of another length."""
_PLAN_SECONDS = 300.0
_ARRIVE_SECONDS = 30.0
_NEVER = 1 << 30
_ROOM = 1 << 13
_READINGS = 10


def main() -> int:
    """Measure each number of ranks, and print one table; 1 where a target is missed, otherwise 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--ranks", default="64,256,1024", help="numbers of ranks (64,256,1024)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=20.0,
        help="of each measurement (20); 300 and more show whether memory is flat",
    )
    parser.add_argument("--layers", type=int, default=58)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--steps-per-second", type=float, default=20.0, help="of the model (20)")
    parser.add_argument(
        "--report-steps", type=int, help="in a report; by default as many as the service asks for"
    )
    parser.add_argument("--per-step-sources", action="store_true", help="as agents of 0.1 report")
    parser.add_argument("--processes", type=int, default=2, help="that the agents are spread over (2)")
    parser.add_argument("--no-plan", action="store_true", help="ask for no decision")
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args()
    measured = []
    for ranks in (int(word) for word in options.ranks.split(",")):
        scale = Scale(ranks, options.layers, options.experts)
        load = Load(scale, options.steps_per_second, options.report_steps, not options.per_step_sources)
        measured.append(measure(load, options.seconds, options.processes, plan=not options.no_plan))
    console = Console(soft_wrap=True)
    console.print(_table(measured))
    judged = list(verdicts(measured))
    console.print(_targets(judged))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(one) for one in measured], indent=1) + "\n")
    return int(any(verdict == MISSED for *_, verdict in judged))


def measure(load: Load, seconds: float, processes: int, *, plan: bool) -> Measured:
    """One number of ranks, for so long; with ``plan`` a decision too, and how long its plan is on its way."""
    settings = {
        "decision_interval": _NEVER,
        "report_steps": load.report_steps or "auto",
        # On a busy machine agents may not be run for long; that is no reason to hear them no more.
        "heartbeat_seconds": 20.0,
        "max_streams_per_peer": _ROOM,
        "max_heat_bytes": 4 << 30,
        "plan_timeout_seconds": _PLAN_SECONDS,
        "solve_timeout_seconds": _PLAN_SECONDS,
    }
    with (
        tempfile.TemporaryDirectory(prefix="eplb-scale-") as folder,
        measured_service(Path(folder), **settings) as service,
        rank_processes(service.address, load, processes) as ranks,
    ):
        ranks.begin()
        time.sleep(_SETTLE_SECONDS if load.report_steps else _GROW_SECONDS)
        joining = service.read()
        sent, readings = ranks.tallies(), [service.read()]
        for _ in range(_READINGS):
            time.sleep(seconds / _READINGS)
            readings.append(service.read())
            _say(load, readings)
        sent_by_then = ranks.tallies()
        decision = _decide(service, ranks) if plan else (None, 0.0)
        deciding = service.read()
    return _summary(load, (sent, sent_by_then), readings, (joining, deciding), decision)


def _say(load: Load, readings: Sequence[Reading]) -> None:
    """Where a run is, for whoever waits for it; half an hour is long."""
    first, now = readings[0], readings[-1]
    print(
        f"{load.scale.ranks} ranks, {now.at - first.at:.0f} s: {now.resident_bytes / 1e6:.0f} MB, "
        f"{now.lost - first.lost} steps lost",
        file=sys.stderr,
    )


def _decide(service: MeasuredService, ranks: RankProcesses) -> tuple[tuple[float, float] | None, float]:
    """Until when the first and the last rank had the plan, in milliseconds from its offer; seconds of the decision."""
    began = time.monotonic()
    with grpc.insecure_channel(service.address) as channel:
        operators = operator_pb2_grpc.OperatorServiceStub(channel)
        try:
            answer = operators.Rebalance(
                operator_pb2.RebalanceRequest(deployment=DEPLOYMENT), timeout=_PLAN_SECONDS
            )
        except grpc.RpcError as error:
            print(f"no decision: {error.details()}", file=sys.stderr)
            return None, time.monotonic() - began
        seconds = time.monotonic() - began
        if not answer.plan_id:
            return None, seconds
        everywhere = _everywhere(ranks)
        history = operators.GetHistory(operator_pb2.GetHistoryRequest(deployment=DEPLOYMENT, limit=1))
    if not everywhere:
        return None, seconds
    arrivals = [1e3 * (at - history.plans[0].at) for at in everywhere]
    return (min(arrivals), max(arrivals)), seconds


def _everywhere(ranks: RankProcesses) -> list[float]:
    """When each rank got its plan, once all have it; nothing where one does not in time."""
    end = time.monotonic() + _ARRIVE_SECONDS
    while time.monotonic() < end:
        time.sleep(1.0)
        arrived = [at for tally in ranks.tallies() for at in tally.plans_at]
        if all(arrived):
            return arrived
    return []


def _summary(
    load: Load,
    tallies: tuple[list[Tally], list[Tally]],
    readings: Sequence[Reading],
    joining_and_deciding: tuple[Reading, Reading],
    decision: tuple[tuple[float, float] | None, float],
) -> Measured:
    before, *between = readings
    after = between[-1]
    seconds = after.at - before.at

    def gained(name: str) -> int:
        return sum(getattr(tally, name) for tally in tallies[1]) - sum(
            getattr(tally, name) for tally in tallies[0]
        )

    made = seconds * load.steps_per_second
    return Measured(
        ranks=load.scale.ranks,
        seconds=seconds,
        steps_per_second=(after.received - before.received) / seconds,
        wanted_per_second=load.steps_per_second,
        cpu_ms_per_step=1e3 * (after.cpu - before.cpu) / made,
        cpu_percent=100 * (after.cpu - before.cpu) / seconds,
        loop_cpu_percent=100 * (after.loop_cpu - before.loop_cpu) / seconds,
        lost_steps=after.lost - before.lost,
        dropped_steps=gained("dropped_steps"),
        megabytes_per_second=gained("sent_bytes") / seconds / 1e6,
        reports_per_second=gained("reports") / seconds,
        resident_mb=tuple(round(reading.resident_bytes / 1e6, 1) for reading in readings),
        joining=_held(joining_and_deciding[:1]),
        holding=_held(between),
        deciding=_held(joining_and_deciding[1:]),
        long_holds=sum(reading.long_holds for reading in between),
        plan_ms=decision[0],
        decide_seconds=decision[1],
    )


def _held(readings: Sequence[Reading]) -> Held:
    named: dict[str, float] = {}
    for reading in readings:
        for name, seconds in reading.named.items():
            named[name] = max(named.get(name, 0.0), round(1e3 * seconds, 1))
    cpu, wall, still = (
        1e3 * max(getattr(one, name) for one in readings) for name in ("hold", "hold_wall", "still")
    )
    return Held(cpu, wall, named, still)


def _table(measured: list[Measured]) -> Table:
    table = Table("ranks", *(f"{one.ranks:,}" for one in measured))
    rows: list[tuple[str, Callable[[Measured], str]]] = [
        ("steps/s put together, of", lambda one: f"{one.steps_per_second:.1f}, {one.wanted_per_second:g}"),
        ("service's CPU, ms per step", lambda one: f"{one.cpu_ms_per_step:.2f}"),
        ("service's CPU, % of a core", lambda one: f"{one.cpu_percent:.0f}"),
        ("of these, its event loop", lambda one: f"{one.loop_cpu_percent:.0f}"),
        ("heat, MB/s", lambda one: f"{one.megabytes_per_second:.1f}"),
        ("heat, reports/s", lambda one: f"{one.reports_per_second:.0f}"),
        ("steps lost", lambda one: f"{one.lost_steps}"),
        ("steps that agents dropped", lambda one: f"{one.dropped_steps}"),
        ("memory over the run, MB; by halves", _memory),
        ("longest hold of the loop, ms of CPU (of the clock)", lambda one: _said(one.holding)),
        ("while the ranks join", lambda one: _said(one.joining)),
        ("while deciding and offering", lambda one: _said(one.deciding)),
        ("the processor stood still within a hold, ms", lambda one: f"{one.stood_still_ms:.1f}"),
        ("decision, s", lambda one: f"{one.decide_seconds:.1f}"),
        ("plan at the first and last rank, ms", _pushed),
    ]
    for name, value in rows:
        table.add_row(name, *(value(one) for one in measured))
    return table


def _targets(judged: list[tuple[int, str, str, str]]) -> Table:
    table = Table("ranks", "target", "found", "")
    for ranks, name, figure, verdict in judged:
        table.add_row(f"{ranks:,}", name, figure, verdict)
    return table


def _said(held: Held) -> str:
    name = max(held.named, key=held.named.__getitem__, default="")
    return f"{held.cpu_ms:.1f} ({held.wall_ms:.1f})" + (f", {name}" if name else "")


def _memory(one: Measured) -> str:
    """At the beginning, at half-time and at the end, and what each half has added."""
    first, half, last = (one.resident_mb[at] for at in (0, len(one.resident_mb) // 2, -1))
    return f"{first:.0f}, {half:.0f}, {last:.0f}; {half - first:+.1f}, {one.grown_mb:+.1f}"


def _pushed(one: Measured) -> str:
    return "-" if one.plan_ms is None else f"{one.plan_ms[0]:.0f}, {one.plan_ms[1]:.0f}"


if __name__ == "__main__":
    sys.exit(main())
