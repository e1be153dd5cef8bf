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

from benchmarks.scale.measured import Measured, verdicts
from benchmarks.scale.measured_service import Holds, MeasuredService, Reading, measured_service
from benchmarks.scale.ranks import DEPLOYMENT, Load, RankProcesses, Scale, Tally, rank_processes
from benchmarks.solver.tables import Table, target_table
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
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement (20); memory: 300")
    parser.add_argument("--layers", type=int, default=58, help="of the model, of 256 experts each (58)")
    parser.add_argument("--steps-per-second", type=float, default=20.0, help="of the model (20)")
    parser.add_argument("--report-steps", type=int, help="in a report; by default what the service asks for")
    parser.add_argument("--processes", type=int, default=2, help="that the agents are spread over (2)")
    parser.add_argument("--no-plan", action="store_true", help="ask for no decision")
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args()
    measured = []
    for ranks in (int(word) for word in options.ranks.split(",")):
        load = Load(Scale(ranks, options.layers, 256), options.steps_per_second, options.report_steps)
        measured.append(measure(load, options.seconds, options.processes, plan=not options.no_plan))
    columns = ["ranks", *(f"{one.ranks:,}" for one in measured)]
    rows = [[name, *(value(one) for one in measured)] for name, value in _ROWS]
    judged = list(verdicts(measured))
    console = Console(soft_wrap=True)
    console.print(Table("One service", columns, rows).drawn(), target_table(judged).drawn())
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(one) for one in measured], indent=1) + "\n")
    return int(not all(target.met for target in judged))


def measure(load: Load, seconds: float, processes: int, *, plan: bool) -> Measured:
    """One number of ranks, for so long; with ``plan`` a decision too, and how long its plan is on its way."""
    settings = {
        "decision_interval": _NEVER,
        "report_steps": load.report_steps or "auto",
        # On a busy machine agents may not be run for long; that is no reason to hear them no more.
        "heartbeat_seconds": 20.0,
        "max_streams_per_peer": _ROOM,
        "max_heat_bytes": 4 << 30,
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
        before, readings = ranks.tally(), [service.read()]
        for _ in range(_READINGS):
            time.sleep(seconds / _READINGS)
            readings.append(service.read())
        after = ranks.tally()
        decision = _decide(service, ranks) if plan else (None, 0.0)
        deciding = service.read()
    return _summary(load, (before, after), readings, (joining.holds, deciding.holds), decision)


def _decide(service: MeasuredService, ranks: RankProcesses) -> tuple[tuple[float, float] | None, float]:
    """Until when the first and the last rank had the plan, in milliseconds from its offer; seconds of the decision."""
    began = time.monotonic()
    with grpc.insecure_channel(service.address) as channel:
        operators = operator_pb2_grpc.OperatorServiceStub(channel)
        request = operator_pb2.RebalanceRequest(deployment=DEPLOYMENT)
        try:
            answer = operators.Rebalance(request, timeout=_PLAN_SECONDS)
        except grpc.RpcError as error:
            print(f"no decision: {error.details()}", file=sys.stderr)
            return None, time.monotonic() - began
        seconds = time.monotonic() - began
        arrived: Sequence[float] = ()
        while answer.plan_id and not (arrived and all(arrived)):
            if time.monotonic() - began - seconds > _ARRIVE_SECONDS:
                return None, seconds
            time.sleep(1.0)
            arrived = ranks.tally().plans_at
        if not arrived:
            return None, seconds
        history = operators.GetHistory(operator_pb2.GetHistoryRequest(deployment=DEPLOYMENT, limit=1))
    offered = history.plans[0].at
    return (1e3 * (min(arrived) - offered), 1e3 * (max(arrived) - offered)), seconds


def _summary(
    load: Load,
    tallies: tuple[Tally, Tally],
    readings: Sequence[Reading],
    joining_and_deciding: tuple[Holds, Holds],
    decision: tuple[tuple[float, float] | None, float],
) -> Measured:
    before, *between = readings
    after = between[-1]
    seconds, cpu = after.at - before.at, after.cpu - before.cpu
    return Measured(
        ranks=load.scale.ranks,
        seconds=seconds,
        steps_per_second=(after.received - before.received) / seconds,
        wanted_per_second=load.steps_per_second,
        cpu_ms_per_step=1e3 * cpu / (seconds * load.steps_per_second),
        cpu_percent=100 * cpu / seconds,
        lost_steps=after.lost - before.lost,
        dropped_steps=tallies[1].dropped_steps - tallies[0].dropped_steps,
        megabytes_per_second=(tallies[1].sent_bytes - tallies[0].sent_bytes) / seconds / 1e6,
        reports_per_second=(tallies[1].reports - tallies[0].reports) / seconds,
        resident_mb=tuple(round(reading.resident_bytes / 1e6, 1) for reading in readings),
        joining=joining_and_deciding[0],
        holding=Holds.merged(reading.holds for reading in between),
        deciding=joining_and_deciding[1],
        plan_ms=decision[0],
        decide_seconds=decision[1],
    )


def _said(holds: Holds) -> str:
    return f"{1e3 * holds.cpu:.1f}, {holds.name}"


_ROWS: tuple[tuple[str, Callable[[Measured], str]], ...] = (
    ("steps/s put together, of", lambda one: f"{one.steps_per_second:.1f}, {one.wanted_per_second:g}"),
    ("service's CPU, ms per step", lambda one: f"{one.cpu_ms_per_step:.2f}"),
    ("service's CPU, % of a core", lambda one: f"{one.cpu_percent:.0f}"),
    ("heat, MB/s", lambda one: f"{one.megabytes_per_second:.1f}"),
    ("heat, reports/s", lambda one: f"{one.reports_per_second:.0f}"),
    ("steps lost", lambda one: f"{one.lost_steps}"),
    ("steps that agents dropped", lambda one: f"{one.dropped_steps}"),
    ("memory, MB; grown in the second half", lambda one: f"{one.resident_mb[-1]:.0f}; {one.grown_mb:+.1f}"),
    ("longest hold of the loop, ms of CPU", lambda one: _said(one.holding)),
    ("while the ranks join", lambda one: _said(one.joining)),
    ("while deciding and offering", lambda one: _said(one.deciding)),
    ("the processor stood still within a hold, ms", lambda one: f"{1e3 * one.all_holds.still:.1f}"),
    ("decision, s", lambda one: f"{one.decide_seconds:.1f}"),
    (
        "plan at the first and last rank, ms",
        lambda one: "-" if one.plan_ms is None else f"{one.plan_ms[0]:.0f}, {one.plan_ms[1]:.0f}",
    ),
)


if __name__ == "__main__":
    sys.exit(main())
