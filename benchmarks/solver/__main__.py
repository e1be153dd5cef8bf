"""Measures the solver and its peers side by side: ``python -m benchmarks.solver``."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.solver.about import about
from benchmarks.solver.extent import FULL, QUICK, Extent
from benchmarks.solver.recorded import recorded_course
from benchmarks.solver.report.files import write_folder, write_json
from benchmarks.solver.report.tables import tables
from benchmarks.solver.sections import GROUPS, Section, sections
from eplb_service.atomic_write import OutputError
from eplb_service.bench.contest import Contest
from eplb_service.bench.peers.archives import INDEX
from eplb_service.bench.peers.balancers import PEERS
from eplb_service.heat.window import HeatError
from eplb_service.solver.warmup import warm_up


def main() -> int:
    """Parse options, measure, and say what was found; returns the exit code."""
    options = _parser().parse_args()
    # A log shows each line at once; and what is no terminal takes any width, as tables want it.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    console = Console(width=None if sys.stdout.isatty() else 150)
    try:
        courses = [
            recorded_course(path, options.trace_ranks, options.trace_slots, options.trace_window)
            for path in options.trace
        ]
    except HeatError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    extent = _extent(options)
    contest = Contest(options.peers, options.index, options.limit_seconds, console.print)
    chosen = [
        section
        for section in sections(contest, extent, courses)
        if section.group in options.only and (section.name != "traces" or courses)
    ]
    with console.status("compiling the solver's kernels, once"):
        warm_up(threads=1)
    began = time.monotonic()
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        results = _measured(chosen, console)
    finally:
        contest.close()
    took = f"{(time.monotonic() - began) / 60:.1f} minutes"
    results = {"about": {**about(extent.seeds), "took": took}, "failures": contest.failures, **results}
    for table in reversed(tables(results)):
        console.print(table.drawn())
    console.print(f"{results['about']['machine']}; took {took}")
    try:
        if options.json is not None:
            write_json(options.json, results)
        if options.out is not None:
            write_folder(options.out, results)
    except OutputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _interrupt(number: int, _frame: object) -> None:
    """A time limit set from outside ends it as Ctrl-C does: with what was measured until then."""
    # Some send the signal twice.
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _measured(chosen: Sequence[Section], console: Console) -> dict[str, Any]:
    """The rows of each section; after Ctrl-C or SIGTERM those that there are."""
    results: dict[str, Any] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[row]}"), console=console) as progress:
        whole = progress.add_task("measurements", total=len(chosen), row="")
        try:
            for section in chosen:
                rows = results.setdefault(section.name, [])
                progress.update(whole, description=section.title)
                began = time.monotonic()
                for row in section.rows():
                    rows.append(row)
                    progress.update(whole, row=_where(row))
                progress.advance(whole)
                console.print(f"{section.title}: {len(rows)} rows in {time.monotonic() - began:.0f} s")
        except KeyboardInterrupt:
            console.print("interrupted: what follows is what was measured until then")
    return results


def _where(row: dict[str, Any]) -> str:
    """What was just measured, in short."""
    names = ("shape", "course", "kind", "seed", "size", "policy")
    return " ".join(str(row[name]) for name in names if name in row)


def _extent(options: argparse.Namespace) -> Extent:
    extent = QUICK if options.quick else FULL
    changes: dict[str, Any] = {}
    if options.seeds:
        changes["seeds"] = tuple(options.seeds)
    if options.repeats:
        changes["repeats"] = options.repeats
    if options.long_seconds:
        changes["long_seconds"] = options.long_seconds
    return replace(extent, **changes)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.solver", description=__doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="about two minutes: one shape, one seed, short loops")
    add("--only", nargs="+", choices=GROUPS, default=list(GROUPS), help="measure these alone")
    add("--peers", nargs="*", choices=list(PEERS), default=list(PEERS), help="peers that take part")
    add("--index", default=INDEX, help="package index that peers are fetched from, once")
    add("--seeds", type=int, nargs="+", help="of the generated heat; the first serves where one is enough")
    add("--repeats", type=int, help="runs of each timed decision")
    add("--limit-seconds", type=float, default=60.0, help="a decision that takes longer is given up")
    add("--long-seconds", type=float, help="long search for each layer of two slots per rank")
    add("--trace", type=Path, action="append", default=[], help="recorded heat to serve as well")
    add("--trace-ranks", type=int, default=8)
    add("--trace-slots", type=int, help="default: one a rank more than the experts need")
    add("--trace-window", type=int, default=256, help="steps a decision sees; fewer where a trace is short")
    add("--json", type=Path, help="write every row here")
    add("--out", type=Path, help="write tables and plots into this folder")
    return parser


if __name__ == "__main__":
    sys.exit(main())
