"""``python -m benchmarks.decide``: each measure beside its target; recorded routing too where ``--traces`` has it."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.decide.alarms import measured
from benchmarks.decide.heat import Course, generated, recorded
from eplb_service.io.trace import ArrayTrace
from eplb_service.planner.settings import PlannerSettings
from eplb_service.planner.topology import Topology
from eplb_service.replay.jobs import Scene
from eplb_service.replay.policy import ON_CHANGE
from eplb_service.replay.result import Setup
from eplb_service.replay.runner import jobs_for, replay, scene_for
from eplb_service.replay.schedule import Schedule

POLICIES = ("none", "flashlb", ON_CHANGE)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decide", description=__doc__)
    parser.add_argument("--traces", type=Path, help="folder of recorded routing, a folder for each model")
    parser.add_argument("--seed", type=int, default=0, help="of all heat that is drawn")
    parser.add_argument("--link-bandwidth", type=float, default=25.0, help="GB/s, which prices moves")
    parser.add_argument("--bytes-per-expert", type=int, default=0, help="which prices moves; 0: as assumed")
    arguments = parser.parse_args()
    console = Console(soft_wrap=True)
    console.print(_alarms(arguments.seed))
    courses = list(generated(arguments.seed))
    if arguments.traces is not None:
        courses += recorded(arguments.traces, arguments.seed)
    table = Table("heat", "policy", "PAR realised", "moves per window", "decisions", "CPU ms", "target")
    for course in courses:
        settings = PlannerSettings(threads=1, link_bandwidth=arguments.link_bandwidth)
        _served(table, course, settings, arguments.bytes_per_expert)
    console.print(table)


def _alarms(seed: int) -> Table:
    table = Table(
        "ranks x choices", "false alarms in 10,000 steps", "target", "found within, 90 % of changes", "target"
    )
    for ranks, choices in ((8, 256), (8, 4096), (32, 32_768)):
        found = measured(ranks, choices, seed)
        rate, delay = 1e4 * found.false / found.steps, sorted(found.delays)[len(found.delays) * 9 // 10]
        table.add_row(
            f"{ranks} x {choices:,}", f"{rate:.2f}", "at most 1", f"{delay:.0f} steps", "at most 16"
        )
    return table


def _served(table: Table, course: Course, settings: PlannerSettings, size: int) -> None:
    """Rows of one course; the first window after the first decision is left out, as everybody places from scratch."""
    setup = Setup(course.slots, Schedule(course.window, course.window))
    ranks = course.ranks
    scene = scene_for(ranks)
    if size:
        scene = Scene(Topology(np.zeros(ranks), np.arange(ranks), size), scene.costs)
    jobs = jobs_for(POLICIES, [setup], settings, hindsight=False)
    for policy in replay(ArrayTrace(course.heat_TLE), jobs, scene).policies:
        rows = policy.decisions[1:]
        realised = np.average([row.par_realised for row in rows], weights=[row.steps for row in rows])
        decisions = sum(row.decisions for row in rows)
        table.add_row(
            course.name,
            policy.policy,
            f"{realised:.4f}",
            f"{np.mean([row.moves for row in rows]):.1f}",
            f"{decisions}",
            f"{1e3 * sum(row.seconds for row in rows) / max(decisions, 1):.0f}",
            course.target if policy.policy == ON_CHANGE else "",
        )


if __name__ == "__main__":
    main()
