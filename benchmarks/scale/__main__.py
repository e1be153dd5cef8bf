"""``python -m benchmarks.scale``: one service under the heat of 64, 256 and 1,024 ranks.

The service runs in a process of its own, the agents as coroutines in others. It decides as it does by default, and the
ranks carry the first plan out, layer after layer; then the service is measured as it goes on. On a busy machine the
service's CPU seconds per step are the figure that holds; rates and latencies count what else runs. Exits with 1 where a
target is missed.
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
    """Measure each number of ranks, and print one table; 1 where a target is missed, otherwise 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--ranks", default="64,256,1024", help="numbers of ranks (64,256,1024)")
    parser.add_argument("--slots", type=int, help="per rank; by default an eighth more than experts need")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement (20); memory: 300")
    parser.add_argument("--layers", type=int, default=58, help="of the model, of 256 experts each (58)")
    parser.add_argument("--steps-per-second", type=float, default=20.0, help="of the model (20)")
    parser.add_argument("--report-steps", type=int, help="in a report; by default what the service asks for")
    parser.add_argument("--processes", type=int, default=2, help="that the agents are spread over (2)")
    parser.add_argument("--no-plan", action="store_true", help="heat alone: nothing is decided")
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args()
    measured = []
    for ranks in (int(word) for word in options.ranks.split(",")):
        scale = Scale(ranks, options.layers, 256, options.slots)
        load = Load(scale, options.steps_per_second, options.report_steps)
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
    """One number of ranks, for so long; with ``plan`` once the first one, after an interval, is carried out."""
    settings = {
        "decision_interval": load.interval if plan else _NEVER,
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
        time.sleep(_SETTLE_SECONDS)
        joined = service.read()
        interval_end = ranks.start + load.interval / load.steps_per_second
        time.sleep(max(0.0, interval_end - time.time()) if plan else 0.0)
        ended, agents = service.read(), ranks.tally().cpu
        first = _first_plan(ranks, interval_end) if plan else None
        deciding, agents = service.read(), ranks.tally().cpu - agents
        if first is not None:
            _carried_out(load, ranks)
        carried = service.read()
        before, readings = ranks.tally(), [service.read()]
        for _ in range(_READINGS):
            time.sleep(seconds / _READINGS)
            readings.append(service.read())
        after = ranks.tally()
    phases = Phases(joined, ended, deciding, carried, agents, first)
    return _summary(load, (before, after), readings, phases)


@dataclass(frozen=True)
class Phases:
    """Readings of the service before the measurement.

    Parameters
    ----------
    joined, ended, deciding, carried
        Once the ranks step, once the first decision's interval is over, once all have a plan, and once they have
        carried it out.
    agents_cpu
        Seconds that the agents took from ``ended`` to ``deciding``.
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
    """Wait until all ranks have a plan; returns ``Measured.plan_ms``."""
    arrived = ranks.tally().plans_at
    while time.time() < ended + _PLAN_SECONDS:
        tally = ranks.tally()
        arrived = tally.plans_at
        if all(arrived):
            heat, first, last = (
                1e3 * (at - ended) for at in (max(tally.heat_at), min(arrived), max(arrived))
            )
            return heat, first, last
        time.sleep(_POLL_SECONDS)
    print(f"only {sum(map(bool, arrived))} of {len(arrived)} ranks have a plan", file=sys.stderr)
    return None


def _carried_out(load: Load, ranks: RankProcesses) -> None:
    """Have all ranks carry their plan out; returns once the last has switched its last layer, and reported it."""
    now = int((time.time() - ranks.start) * load.steps_per_second)
    # Reports that have begun end before it.
    ranks.switch_from(-(-(now + 4 * MAX_STEPS) // MAX_STEPS) * MAX_STEPS)
    wanted = load.scale.ranks * load.scale.layers
    until = time.time() + _PLAN_SECONDS + load.scale.layers * load.switch_steps / load.steps_per_second
    before = -1
    while time.time() < until:
        switched = ranks.tally().switched
        if switched == wanted or (switched == before > 0):
            break
        before = switched
        time.sleep(4 * load.switch_steps / load.steps_per_second)
    time.sleep(2 * MAX_STEPS / load.steps_per_second)


def _summary(
    load: Load, tallies: tuple[Tally, Tally], readings: Sequence[Reading], phases: Phases
) -> Measured:
    before, *between = readings
    after = between[-1]
    seconds, cpu = after.at - before.at, after.cpu - before.cpu
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
        deciding=Holds.merged(one.holds for one in (phases.ended, phases.deciding, phases.carried)),
        holding=Holds.merged(reading.holds for reading in between),
        plan_ms=phases.plan_ms,
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
    (
        "memory, MB; most; grown in the second half",
        lambda one: f"{one.resident_mb[-1]:.0f}; {one.peak_mb:.0f}; {one.grown_mb:+.1f}",
    ),
    ("longest hold of the loop, ms of CPU", lambda one: _said(one.holding)),
    ("while the ranks join", lambda one: _said(one.joining)),
    ("until the plan is carried out", lambda one: _said(one.deciding)),
    ("the processor stood still within a hold, ms", lambda one: f"{1e3 * one.all_holds.still:.1f}"),
    (
        "CPU from the interval's end until all ranks have the plan, s: service, agents",
        lambda one: f"{one.deciding_cpu_seconds[0]:.1f}, {one.deciding_cpu_seconds[1]:.1f}",
    ),
    ("CPU while they switch, % of a core", lambda one: f"{one.carrying_cpu_percent:.0f}"),
    ("layers switched, over all ranks", lambda one: f"{one.switched}"),
    (
        "ms from there: last heat of it sent; plan at first, last rank",
        lambda one: "-" if one.plan_ms is None else "{:.0f}; {:.0f}, {:.0f}".format(*one.plan_ms),
    ),
)


if __name__ == "__main__":
    sys.exit(main())
