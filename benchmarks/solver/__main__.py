"""Compare the solver with its peers on the same heat: ``python -m benchmarks.solver``."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.solver import measures
from benchmarks.solver.heats import KINDS, SHAPES, Shape, generated_scenarios, recorded_scenario
from benchmarks.solver.tables import tables
from eplb_core.atomic_write import OutputError, write_atomically
from eplb_core.heat.window import HeatError
from eplb_core.solver.warmup import warm_up
from eplb_lab.bench.closed_loop import Scenario, entrants, loops
from eplb_lab.bench.contest import Contest
from eplb_lab.bench.peers.archives import INDEX
from eplb_lab.bench.peers.balancers import PEERS

GROUPS = ("cells", "time", "loop", "ablation", "example")
"""Choices of ``--only``."""
Rows = Iterator[dict[str, Any]]


@dataclass(frozen=True)
class Extent:
    """Size of each measurement: its shapes, seeds, windows and repeats."""

    shapes: tuple[Shape, ...] = SHAPES
    seeds: tuple[int, ...] = (1, 2, 3)
    timed: tuple[Shape, ...] = (*measures.COMPARED, measures.LARGE)
    repeats: int = 5
    spreads: tuple[float, ...] = measures.SPREADS
    table_shape: Shape = (8, 256, 32, 9)
    loop_shape: Shape = (16, 256, 32, 9)
    loop_windows: int = 9
    ablation_windows: int = 6


QUICK = Extent(
    shapes=((16, 256, 32, 9),),
    seeds=(1,),
    timed=(SHAPES[1],),
    repeats=2,
    spreads=(0.3,),
    table_shape=(2, 256, 32, 9),
    loop_shape=(4, 256, 32, 9),
    loop_windows=4,
    ablation_windows=3,
)


def measured(
    contest: Contest, extent: Extent, traces: Sequence[Scenario], only: Sequence[str]
) -> Iterator[tuple[str, Rows]]:
    """Yield each measurement's name and rows.

    Parameters
    ----------
    contest
        Policies to measure.
    extent
        Size of each measurement.
    traces
        Recorded heat for the closed loop and the ablation.
    only
        Groups to measure, from ``GROUPS``.
    """
    seed = extent.seeds[0]
    loop_extent = (extent.loop_shape, extent.loop_windows, seed)
    if "cells" in only:
        yield "cells", measures.cells(contest, extent.shapes, extent.seeds)
        yield "tables", measures.source_tables(contest, extent.table_shape, seed, extent.spreads)
    if "time" in only:
        yield "time", measures.cpu_times(contest, extent.timed, extent.repeats, seed)
        yield "keeping", measures.keeping(contest, extent.repeats, seed)
        yield "following", measures.following(extent.seeds)
    if "loop" in only:
        yield "loop", loops(contest, generated_scenarios(KINDS, *loop_extent), entrants(contest))
        moving = generated_scenarios(("drift", "bursty"), *loop_extent)
        yield "pareto", loops(contest, moving, measures.priced(contest))
        yield "traces", loops(contest, traces, entrants(contest))
    if "ablation" in only:
        yield (
            "ablation",
            measures.ablation(contest, extent.loop_shape, extent.ablation_windows, extent.seeds, traces),
        )
    if "example" in only:
        yield "example", measures.known_example(contest)
        yield "few_slots", measures.few_slots(contest, extent.seeds)


def main() -> int:
    """Parse the options, measure, and print the tables. Return the exit code."""
    options = _parser().parse_args()
    console = Console(width=None if sys.stdout.isatty() else 150)
    try:
        scenarios = [
            recorded_scenario(path, options.trace_ranks, options.trace_slots, options.trace_window)
            for path in options.trace
        ]
    except HeatError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    seeds = tuple(options.seeds or ())
    overrides = {"seeds": seeds, "repeats": options.repeats}
    extent = replace(
        QUICK if options.quick else Extent(), **{name: value for name, value in overrides.items() if value}
    )
    contest = Contest(options.peers, options.index, options.limit_seconds, console.print)
    with console.status("compiling the solver's kernels (first run only)"):
        warm_up(threads=1)
    signal.signal(signal.SIGTERM, _interrupt)
    began = time.monotonic()
    results: dict[str, Any] = {"about": _about(extent.seeds), "failures": contest.failures}
    try:
        for name, rows in measured(contest, extent, scenarios, options.only):
            with console.status(name):
                # Append row by row, so that an interrupted measurement keeps its rows.
                measured_rows = results.setdefault(name, [])
                for row in rows:
                    measured_rows.append(row)
            console.print(f"{name}: {len(measured_rows)} rows, {time.monotonic() - began:.0f} s so far")
    except KeyboardInterrupt:
        console.print("interrupted; the tables below contain the measurements so far")
    finally:
        contest.close()
    for table in reversed(tables(results)):
        console.print(table.drawn())
    console.print(*results["about"].values(), sep="; ")
    try:
        if options.json is not None:
            write_atomically(options.json, json.dumps(results, indent=1).encode())
    except OutputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _interrupt(number: int, _frame: object) -> None:
    """Stop as on Ctrl-C, keeping the results so far. Ignore a second signal, because some senders repeat it."""
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _about(seeds: tuple[int, ...]) -> dict[str, str]:
    """Return the command, machine and versions that are needed to interpret the figures."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        processor = platform.machine()
    versions = [f"{name} {version(name)}" for name in ("numpy", "numba")]
    return {
        "command": " ".join(["python -m benchmarks.solver", *sys.argv[1:]]),
        "machine": f"{processor}, {os.cpu_count()} cores, {platform.system()}",
        "versions": ", ".join([f"Python {platform.python_version()}", *versions]),
        "seeds": ", ".join(map(str, seeds)),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.solver", description=__doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="about two minutes: one shape, one seed, short loops")
    add("--only", nargs="+", choices=GROUPS, default=list(GROUPS), help="groups to measure")
    add("--peers", nargs="*", choices=list(PEERS), default=list(PEERS), help="peers to compare")
    add("--index", default=INDEX, help="package index to download the peers from; each is downloaded once")
    add(
        "--seeds",
        type=int,
        nargs="+",
        help="seeds for the generated heat; some measurements use only the first",
    )
    add("--repeats", type=int, help="repeats of each timed decision")
    add("--limit-seconds", type=float, default=60.0, help="time limit of a decision")
    add("--trace", type=Path, action="append", default=[], help="also measure this recorded heat")
    add("--trace-ranks", type=int, default=8)
    add("--trace-slots", type=int, help="slots per rank (default: one more than the experts need)")
    add("--trace-window", type=int, default=256, help="steps per window; fewer if a trace is short")
    add("--json", type=Path, help="write every row to this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
