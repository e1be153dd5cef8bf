"""Measure one service under the heat of 64, 256 and 1,024 ranks: ``python -m benchmarks.scale``.

The service runs in a separate process, and the agents run as coroutines in several other processes. The service decides
with its default settings. The ranks execute its first plan layer by layer, and the measurement starts afterwards. On a
busy machine, only the service's CPU seconds per step are reliable, because rates and latencies depend on other load.
The exit code is 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from benchmarks.scale.heat import Scale
from benchmarks.scale.measured import Measured, verdicts
from benchmarks.scale.measured_service import Holds, Reading, measured_service
from benchmarks.scale.ranks import Load, RankProcesses, Tally, rank_processes
from benchmarks.solver.tables import Table, target_table
from eplb_service.control.core.flow import MAX_STEPS

_SETTLE_SECONDS = 4.0
_PLAN_SECONDS = 300.0
_POLL_SECONDS = 0.5
_NEVER = 1 << 30
_ROOM = 1 << 13
_READINGS = 10


def main() -> int:
    """Measure each rank count and print one table. Return 1 if a target is missed, otherwise 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument(
        "--ranks", default="64,256,1024", help="rank counts, separated by commas (64,256,1024)"
    )
    parser.add_argument(
        "--slots", type=int, help="slots per rank; by default, there are one eighth more slots than experts"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=20.0,
        help="length of each measurement (20); the memory target needs 300",
    )
    parser.add_argument(
        "--layers", type=int, default=58, help="layers of the model, with 256 experts each (58)"
    )
    parser.add_argument(
        "--steps-per-second", type=float, default=20.0, help="steps per second of the model (20)"
    )
    parser.add_argument(
        "--report-steps", type=int, help="steps per report; by default the number that the service requests"
    )
    parser.add_argument("--processes", type=int, default=2, help="number of processes for the agents (2)")
    parser.add_argument(
        "--no-plan", action="store_true", help="send only heat, so that the service makes no decision"
    )
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    measured = []
    for ranks in (int(word) for word in options.ranks.split(",")):
        scale = Scale(ranks, options.layers, 256, options.slots)
        load = Load(scale, options.steps_per_second, options.report_steps)
        measured.append(measure(load, options.seconds, options.processes, plan=not options.no_plan))
    columns = ["ranks", *(f"{run.ranks:,}" for run in measured)]
    rows = [[name, *(value(run) for run in measured)] for name, value in _ROWS]
    judged = list(verdicts(measured))
    console = Console(soft_wrap=True)
    console.print(Table("One service", columns, rows).drawn(), target_table(judged).drawn())
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(run) for run in measured], indent=1) + "\n")
    return int(not all(target.met for target in judged))


def measure(load: Load, seconds: float, processes: int, *, plan: bool) -> Measured:
    """Measure the service with one rank count.

    Parameters
    ----------
    load
        Size and rate of the deployment.
    seconds
        Length of the measurement.
    processes
        Number of processes that run the agents.
    plan
        True to let the service decide after one interval and to start the measurement once its plan is committed.
    """
    settings = {
        "decision_interval": load.interval if plan else _NEVER,
        "report_steps": load.report_steps or "auto",
        # On a busy machine, an agent may not run for a while, but the service must not treat it as gone.
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
        time.sleep(_SETTLE_SECONDS)
        joined = service.read()
        interval_end = ranks.start + load.interval / load.steps_per_second
        time.sleep(max(0.0, interval_end - time.time()) if plan else 0.0)
        ended = service.read()
        agents_cpu_before = ranks.tally().cpu
        first = _first_plan(ranks, interval_end) if plan else None
        deciding = service.read()
        agents_cpu = ranks.tally().cpu - agents_cpu_before
        if first is not None:
            _execute_plan(load, ranks)
        carried = service.read()
        before = ranks.tally()
        readings = [service.read()]
        for _ in range(_READINGS):
            time.sleep(seconds / _READINGS)
            readings.append(service.read())
        after = ranks.tally()
    phases = Phases(joined, ended, deciding, carried, agents_cpu, first)
    return _summary(load, (before, after), readings, phases)


@dataclass(frozen=True)
class Phases:
    """Readings of the service before the measurement.

    Parameters
    ----------
    joined
        Reading shortly after the ranks have started stepping.
    ended
        Reading at the end of the first decision's interval.
    deciding
        Reading when every rank has a plan.
    carried
        Reading when the ranks have carried out the plan.
    agents_cpu
        CPU seconds of the agents between ``ended`` and ``deciding``.
    plan_ms
        As in ``Measured``.
    """

    joined: Reading
    ended: Reading
    deciding: Reading
    carried: Reading
    agents_cpu: float
    plan_ms: tuple[float, float, float] | None


def _first_plan(ranks: RankProcesses, ended: float) -> tuple[float, float, float] | None:
    """Wait until every rank has a plan, and return ``Measured.plan_ms``."""
    arrived = ranks.tally().plans_at
    while time.time() < ended + _PLAN_SECONDS:
        tally = ranks.tally()
        arrived = tally.plans_at
        if all(arrived):
            moments = (max(tally.heat_at), min(arrived), max(arrived))
            heat, first, last = (1e3 * (moment - ended) for moment in moments)
            return heat, first, last
        time.sleep(_POLL_SECONDS)
    print(f"only {sum(map(bool, arrived))} of {len(arrived)} ranks have a plan", file=sys.stderr)
    return None


def _execute_plan(load: Load, ranks: RankProcesses) -> None:
    """Make all ranks carry out their plan, and wait until every layer has been switched and reported."""
    now = int((time.time() - ranks.start) * load.steps_per_second)
    # Choose a start step that is not in any report that a rank has already begun.
    ranks.switch_from(-(-(now + 4 * MAX_STEPS) // MAX_STEPS) * MAX_STEPS)
    expected = load.scale.ranks * load.scale.layers
    until = time.time() + _PLAN_SECONDS + load.scale.layers * load.switch_steps / load.steps_per_second
    before = -1
    while time.time() < until:
        switched = ranks.tally().switched
        if switched == expected or (switched == before > 0):
            break
        before = switched
        time.sleep(4 * load.switch_steps / load.steps_per_second)
    time.sleep(2 * MAX_STEPS / load.steps_per_second)


def _summary(
    load: Load, tallies: tuple[Tally, Tally], readings: Sequence[Reading], phases: Phases
) -> Measured:
    before, *between = readings
    after = between[-1]
    seconds = after.at - before.at
    cpu = after.cpu - before.cpu
    carrying = phases.carried.at - phases.deciding.at
    return Measured(
        ranks=load.scale.ranks,
        seconds=seconds,
        steps_per_second=(after.received - before.received) / seconds,
        wanted_per_second=load.steps_per_second,
        cpu_ms_per_step=1e3 * cpu / (seconds * load.steps_per_second),
        cpu_percent=100 * cpu / seconds,
        deciding_cpu_seconds=(phases.deciding.cpu - phases.ended.cpu, phases.agents_cpu),
        carrying_cpu_percent=100 * (phases.carried.cpu - phases.deciding.cpu) / max(carrying, 1e-3),
        lost_steps=after.lost,
        dropped_steps=tallies[1].dropped_steps,
        switched=tallies[1].switched,
        megabytes_per_second=(tallies[1].sent_bytes - tallies[0].sent_bytes) / seconds / 1e6,
        reports_per_second=(tallies[1].reports - tallies[0].reports) / seconds,
        resident_mb=tuple(round(reading.resident_bytes / 1e6, 1) for reading in readings),
        peak_mb=after.peak_bytes / 1e6,
        joining=phases.joined.holds,
        deciding=Holds.merged(reading.holds for reading in (phases.ended, phases.deciding, phases.carried)),
        holding=Holds.merged(reading.holds for reading in between),
        plan_ms=phases.plan_ms,
    )


def _hold_text(holds: Holds) -> str:
    return f"{1e3 * holds.cpu:.1f}, {holds.name}"


_ROWS: tuple[tuple[str, Callable[[Measured], str]], ...] = (
    ("steps/s assembled, wanted", lambda run: f"{run.steps_per_second:.1f}, {run.wanted_per_second:g}"),
    ("service's CPU, ms per step", lambda run: f"{run.cpu_ms_per_step:.2f}"),
    ("service's CPU, % of a core", lambda run: f"{run.cpu_percent:.0f}"),
    ("heat, MB/s", lambda run: f"{run.megabytes_per_second:.1f}"),
    ("heat, reports/s", lambda run: f"{run.reports_per_second:.0f}"),
    ("steps lost", lambda run: f"{run.lost_steps}"),
    ("steps that agents dropped", lambda run: f"{run.dropped_steps}"),
    (
        "memory, MB: at the end; maximum; growth in the second half",
        lambda run: f"{run.resident_mb[-1]:.0f}; {run.peak_mb:.0f}; {run.grown_mb:+.1f}",
    ),
    ("longest block of the event loop, ms of CPU", lambda run: _hold_text(run.holding)),
    ("while the ranks join", lambda run: _hold_text(run.joining)),
    ("until the plan is committed", lambda run: _hold_text(run.deciding)),
    ("time off the CPU within a block, ms", lambda run: f"{1e3 * run.all_holds.still:.1f}"),
    (
        "CPU from the end of the interval until every rank has the plan, s: service, agents",
        lambda run: f"{run.deciding_cpu_seconds[0]:.1f}, {run.deciding_cpu_seconds[1]:.1f}",
    ),
    ("service's CPU while layers switch, % of a core", lambda run: f"{run.carrying_cpu_percent:.0f}"),
    ("layers switched, over all ranks", lambda run: f"{run.switched}"),
    (
        "ms after the end of the interval: last heat sent; plan on the first, last rank",
        lambda run: "-" if run.plan_ms is None else "{:.0f}; {:.0f}, {:.0f}".format(*run.plan_ms),
    ),
)


if __name__ == "__main__":
    sys.exit(main())
