"""Measures the stepwise split, and dealing tables: ``python -m benchmarks.split [--trace PATH]``."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.solver.heat_kinds import generate
from benchmarks.solver.recorded import recorded_course
from benchmarks.split.by_source import by_source
from benchmarks.split.cost import cost
from benchmarks.split.quality import SPLITS, quality
from eplb_service.bench.closed_loop import Course


def main() -> None:
    """Print one table for each trace and shape, and one for the cost."""
    options = _parser().parse_args()
    console = Console(width=150, highlight=False)
    courses = [
        recorded_course(path, options.trace_ranks, options.trace_slots, options.window)
        for path in options.trace
    ]
    drawn_TLE = generate("static", options.layers, 256, 4 * options.window, tokens=1024)
    courses.append(Course("static 1,024 tokens", np.ascontiguousarray(drawn_TLE), 32, 9, options.window))
    for course in courses:
        table = Table(
            "placement", *SPLITS, title=f"{course.name}, {course.ranks} ranks x {course.slots}: next window"
        )
        for row in quality(course, options.window, options.windows):
            table.add_row(str(row["placement"]), *(f"{row[split]:.3f}" for split in SPLITS))
        console.print(table)
        title = f"{course.name}: next window under tables, {options.deal_width} entries where they deal"
        table = Table("tables of each source rank", "mean over layers", "each window", title=title)
        for name, ratios in by_source(course, options.window, options.windows, options.deal_width).items():
            table.add_row(name, f"{np.mean(ratios):.3f}", "  ".join(f"{ratio:.3f}" for ratio in ratios))
        console.print(table)
    for tokens in (1024, 4096):
        title = f"256 experts, 32 ranks x 9, {tokens} tokens; load {os.getloadavg()[0]:.1f}"
        table = Table(
            "rounds",
            "tokens above the optimum",
            "most",
            "within a token",
            "us 5 % / 50 % / 95 %",
            title=title,
        )
        for row in cost(256, 32, 9, tokens):
            low, middle, high = row["us"]  # type: ignore[misc]
            table.add_row(
                str(row["rounds"]),
                f"{row['mean']:.2f}",
                f"{row['most']:.2f}",
                f"{row['within a token']:.1%}",
                f"{low:.0f} / {middle:.0f} / {high:.0f}",
            )
        console.print(table)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.split", description=__doc__)
    parser.add_argument("--trace", type=Path, action="append", default=[], help="recorded heat or routes")
    parser.add_argument("--trace-ranks", type=int, default=8)
    parser.add_argument("--trace-slots", type=int, default=None)
    parser.add_argument(
        "--window", type=int, default=64, help="steps that a placement is made on, and serves"
    )
    parser.add_argument("--windows", type=int, default=3, help="windows of each trace")
    parser.add_argument("--deal-width", type=int, default=8, help="entries of dealing tables")
    parser.add_argument("--layers", type=int, default=4, help="of the drawn heat")
    return parser


if __name__ == "__main__":
    main()
