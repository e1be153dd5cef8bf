"""Measure the decision pace and compare each figure with its target: ``python -m benchmarks.decide``.

Recorded routing is also measured if ``--traces`` names a directory that contains it.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.decide.alarms import measured
from benchmarks.decide.heat import PACED_TARGETS, TARGETS, generated, recorded, shipped, untuned
from benchmarks.decide.promises import measured as promises_measured
from benchmarks.decide.served import AT_ONCE, Delay, Row, interval_of, mean_rows, own_rows, peer_rows
from eplb_core.planner.settings import PlannerSettings
from eplb_core.solver.warmup import warm_up
from eplb_lab.bench.closed_loop import Scenario
from eplb_lab.bench.contest import OURS, Contest
from eplb_lab.bench.peers.archives import INDEX
from eplb_lab.bench.peers.balancers import FLASHLB

_PROMISES = "promises"
_COLUMNS = (
    "heat",
    "policy",
    "PAR realised",
    "moves per window",
    "decisions",
    "CPU ms each",
    "forecasts held",
    "below off",
    "target",
)


def main() -> None:
    """Print both tables, each row as soon as it is measured."""
    options = _parser().parse_args()
    # Flush after each line so that a log file can be followed. Outside a terminal, use a width that fits the tables.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    console = Console(width=None if sys.stdout.isatty() else 150)
    began = time.monotonic()
    with console.status("compiling the solver's kernels (first run only)"):
        warm_up(threads=1)
    if not options.only:
        console.print(_alarms(options.seeds[0]))
    if not options.only or options.only == _PROMISES:
        console.print(_promises(options.seeds[0], options.traces))
    if options.only == _PROMISES:
        return
    contest = Contest(options.peers, options.index, options.limit_seconds, console.print)
    settings = PlannerSettings(threads=1, link_bandwidth=options.link_bandwidth)
    table = Table(*_COLUMNS)
    try:
        for scenarios in zip(*(_scenarios(options, seed) for seed in options.seeds), strict=True):
            _add(table, scenarios[0], _measured(scenarios, settings, contest, options))
            console.print(f"{scenarios[0].name}: {time.monotonic() - began:.0f} s since the start")
    finally:
        contest.close()
    console.print(table)
    console.print(
        "below off: windows in which balancing gained less than its moves and switches cost (target 0)"
    )
    console.print(
        "at once: plans take effect in the step after their window; at the pace: after solving, transfers and votes"
    )
    console.print(
        f"moves are priced at their cost: {options.link_bandwidth:g} GB/s, "
        f"{options.bytes_per_expert or 'assumed'} bytes per expert; the run took {time.monotonic() - began:.0f} s"
    )


def _measured(
    scenarios: Sequence[Scenario], settings: PlannerSettings, contest: Contest, options: argparse.Namespace
) -> list[tuple[Row, float]]:
    """Return the rows for one kind of heat, averaged over its seeds: our policy, then the peers at both intervals."""
    drawn = _drawn(scenarios)
    delay = Delay(options.step_ms, options.solve_ms, options.model_layers)
    unscored = options.unscored
    own = [
        list(own_rows(scenario, settings, options.bytes_per_expert, options.cpu_ms, delay, unscored))
        for scenario in drawn
    ]
    ours = [row for rows in own for row in rows if row.policy == f"{OURS}, {AT_ONCE}"]
    interval = interval_of(drawn[0], ours, unscored)
    return mean_rows(
        [
            [
                *rows,
                *peer_rows(scenario, contest, unscored=unscored),
                *(peer_rows(scenario, contest, interval, unscored) if interval is not None else ()),
            ]
            for scenario, rows in zip(drawn, own, strict=True)
        ]
    )


def _scenarios(options: argparse.Namespace, seed: int) -> list[Scenario]:
    """Return the scenarios to decide on for one seed."""
    scenarios = [
        *generated(seed, options.layers, options.windows),
        *untuned(seed, options.layers, options.windows),
        shipped(),
    ]
    if options.traces is not None:
        scenarios += recorded(options.traces, seed)
    return [scenario for scenario in scenarios if options.only in scenario.name]


def _drawn(scenarios: Sequence[Scenario]) -> Sequence[Scenario]:
    """Return the scenarios for all seeds, or only the first one if the heat does not depend on the seed."""
    if all(np.array_equal(scenario.heat_TLE, scenarios[0].heat_TLE) for scenario in scenarios[1:]):
        return scenarios[:1]
    return scenarios


def _alarms(seed: int) -> Table:
    table = Table(
        "ranks x choices",
        "false alarms per 10,000 steps",
        "target",
        "detection delay, 90 % of changes",
        "target",
    )
    for ranks, choices in ((8, 256), (8, 4096), (32, 32_768)):
        alarms = measured(ranks, choices, seed)
        rate = 1e4 * alarms.false / alarms.steps
        delay = sorted(alarms.delays)[len(alarms.delays) * 9 // 10]
        table.add_row(
            f"{ranks} x {choices:,}", f"{rate:.2f}", "at most 1", f"{delay:.0f} steps", "at most 16"
        )
    return table


def _promises(seed: int, traces: Path | None) -> Table:
    """Return a table of promised PAR and the PAR that whole tokens realise on the next window.

    The target is a difference of at most 3 %.
    """
    table = Table("heat", "seen", "promised", "realised", "promise off", "window off", "moves per window")
    for row in promises_measured(seed, traces):
        error = row.promised / row.realised - 1.0
        figures = (f"{row.seen:.3f}", f"{row.promised:.3f}", f"{row.realised:.3f}", f"{error:+.1%}")
        table.add_row(row.name, *figures, f"{row.off:.1%}", f"{row.moves:.0f}")
    return table


def _add(table: Table, scenario: Scenario, rows: list[tuple[Row, float]]) -> None:
    for row, error in rows:
        table.add_row(
            scenario.name,
            row.policy,
            f"{row.par:.4f}" + (f" ± {error:.4f}" if error else ""),
            f"{row.moves_per_window:.1f}",
            f"{row.decisions}",
            f"{1e3 * row.cpu_seconds:.0f}",
            f"{row.held / row.forecasts:.0%} of {row.forecasts}" if row.forecasts else "",
            f"{row.below_off} of {row.windows}" if row.decisions and row.windows else "",
            _target(scenario.name, row.policy),
        )


def _target(heat: str, policy: str) -> str:
    """Return a row's target. Only our policy's rows have one."""
    if policy == f"{OURS}, {AT_ONCE}":
        return TARGETS.get(heat, "")
    return PACED_TARGETS.get(heat, "") if policy.startswith(f"{OURS}, ") else ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decide", description=__doc__)
    add = parser.add_argument
    add("--traces", type=Path, help="folder with recorded routing, one subfolder per model")
    add(
        "--only",
        default="",
        help="measure only heat whose name contains this text; promises: measure only the promises",
    )
    add(
        "--seeds",
        type=int,
        nargs="+",
        default=[0],
        help="seeds for the drawn heat; figures are means over the seeds",
    )
    add("--layers", type=int, default=4, help="layers of the drawn heat (4)")
    add(
        "--link-bandwidth",
        type=float,
        default=25.0,
        help="link bandwidth in GB/s, which determines the move price (25)",
    )
    add(
        "--bytes-per-expert",
        type=int,
        default=0,
        help="bytes per expert, which determine the move price; 0: default size",
    )
    add(
        "--cpu-ms",
        type=float,
        default=math.inf,
        help="mean CPU milliseconds per step that our policy may use",
    )
    add(
        "--step-ms",
        type=float,
        default=40.0,
        help="step time of the row in which plans take effect at the model's pace; 0: omit the row",
    )
    add(
        "--solve-ms",
        type=float,
        default=200.0,
        help="time from the end of a window until its plan reaches the ranks",
    )
    add(
        "--model-layers",
        type=int,
        default=58,
        help="MoE layers of the model, which determine how soon plans take effect",
    )
    add("--windows", type=int, default=12, help="windows of generated heat (12)")
    add(
        "--unscored",
        type=int,
        default=1,
        help="windows after the first decision to exclude from all rows (1)",
    )
    add(
        "--peers",
        nargs="*",
        default=[FLASHLB],
        help="peers to compare, deciding once per window and as often as our policy",
    )
    add("--index", default=INDEX, help="package index to download the peers from; each is downloaded once")
    add("--limit-seconds", type=float, default=60.0, help="time limit of a peer's decision")
    return parser


if __name__ == "__main__":
    main()
