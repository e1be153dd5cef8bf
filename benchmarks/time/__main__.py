"""Measures planning for time beside balancing tokens: ``python -m benchmarks.time``."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track

from benchmarks.solver.report.table import Table
from benchmarks.time.cells import Cell, cells
from benchmarks.time.fits import Fitted, fits
from benchmarks.time.heats import heats
from benchmarks.time.slot_counts import ERRORS, NEAR, Named, named
from benchmarks.time.slot_counts import STEPS as LOOP_STEPS
from eplb_service.cost.curve import CostCurve, CurveError
from eplb_service.cost.curve_file import read_curve
from eplb_service.solver.warmup import warm_up

H200 = CostCurve(20.0, 11.6, 5.0, 0.0615, "decode", "fit to DeepSeek-V3's experts on H200, uniform rows")
TOKENS = (64, 256, 1024, 4096, 16384)
RANKS = (8, 32, 64)
_SIGNIFICANT = 2.0
"""Standard errors that a cell must be above the better of the others on the next window to be named."""


def main() -> int:
    """Parse options, measure, and say which targets are met; returns the exit code."""
    options = _parser().parse_args()
    console = Console(width=None if sys.stdout.isatty() else 150)
    try:
        curve = H200 if options.curve is None else read_curve(options.curve)
    except CurveError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with console.status("compiling the solver's kernels, once"):
        warm_up(threads=1)
    began = time.monotonic()
    total = len(options.tokens) * (4 + len(options.routes))
    found: list[Cell] = []
    for heat in track(
        heats(options.routes, options.tokens, options.layers, options.seed), "cells", total, console=console
    ):
        found += cells(heat, options.ranks, curve)
    counts: list[Named] = []
    for heat in track(
        heats(options.routes, options.tokens, options.layers, options.seed, LOOP_STEPS),
        "numbers of slots",
        total,
        console=console,
    ):
        counts += named(heat, options.ranks, curve)
    fitted = list(fits(options.table))
    console.print(f"{curve} ({curve.source})", markup=False)
    for table in (*_cell_tables(found), _fit_table(fitted), _targets(found, counts, fitted)):
        if table.rows:
            console.print(table.drawn())
    console.print(f"{len(found)} cells in {time.monotonic() - began:.0f} s")
    if options.json is not None:
        rows = {"cells": found, "slots": counts, "fits": fitted}
        options.json.write_text(
            json.dumps({name: [asdict(row) for row in of] for name, of in rows.items()}, indent=1)
        )
    return 0


def _cell_tables(found: Sequence[Cell]) -> list[Table]:
    """Mean over heats: what each way takes on the next window."""
    rows = []
    for key in dict.fromkeys((cell.ranks, cell.tokens, cell.more) for cell in found):
        here = [cell for cell in found if (cell.ranks, cell.tokens, cell.more) == key]
        off, balanced, timed = (
            float(np.mean([getattr(cell, name) for cell in here]))
            for name in ("off_next", "balanced_next", "timed_next")
        )
        gain = np.mean([1 - cell.timed_next / cell.balanced_next for cell in here])
        rows.append(
            [
                f"EP{key[0]}, {key[1]} tokens, +{key[2]}",
                *(f"{us:.1f}" for us in (off, balanced, timed)),
                f"{gain:+.1%}",
            ]
        )
    columns = [
        "cell, mean over heats",
        "left alone, us",
        "tokens balanced",
        "time lowered",
        "gain over balanced",
    ]
    return [Table("slowest rank on the next window", columns, rows)]


def _fit_table(fitted: Sequence[Fitted]) -> Table:
    rows = [
        [
            one.table,
            one.curve,
            *("-" if error is None else f"{error:.1%}" for error in (one.median_error, one.p90_error)),
        ]
        for one in fitted
    ]
    return Table("curves of measured tables", ["table", "curve", "median error", "90th percentile"], rows)


def _targets(found: Sequence[Cell], counts: Sequence[Named], fitted: Sequence[Fitted]) -> Table:
    above = [cell for cell in found if cell.timed > cell.better * (1 + 1e-6)]
    later = [
        cell
        for cell in found
        if cell.timed_next - cell.better_next > _SIGNIFICANT * cell.noise_next + 1e-6 * cell.timed
    ]
    worst = max((cell.timed_next / cell.better_next - 1 for cell in found), default=0.0)
    gains = [1 - cell.timed / cell.balanced for cell in found]
    gains_next = [1 - cell.timed_next / cell.balanced_next for cell in found]
    wrong = [one for one in counts if not one.right]
    rows = [
        ["cells above the better of off and balanced, on the window", "0", f"{len(above)} of {len(found)}"],
        [
            f"the same on the next window, by more than {_SIGNIFICANT:g} standard errors",
            "0",
            f"{len(later)} of {len(found)}; worst cell {worst:+.2%}",
        ],
        [
            "mean gain over balanced, window and next",
            "stated",
            f"{np.mean(gains):.1%}, {np.mean(gains_next):.1%}",
        ],
        [
            f"slots named wrong by what came after: by more than {NEAR:.0%} and {ERRORS:g} standard errors",
            "0",
            f"{len(wrong)} of {len(counts)}",
        ],
    ]
    errors = [one.median_error for one in fitted if one.median_error is not None]
    if errors:
        rows.append(
            [
                "median error of fits on held-out rows",
                "<= 10 %",
                f"{max(errors):.1%} at most, {len(errors)} tables",
            ]
        )
    notes = [
        f"{one.heat} EP{one.ranks} {one.tokens} tokens: {one.slots} named, {one.fastest} fastest, "
        f"{one.slower:+.2%} (standard error {one.error:.2%})"
        for one in wrong
    ]
    notes += [
        f"{cell.heat} EP{cell.ranks} {cell.tokens} tokens +{cell.more}: "
        f"{cell.timed_next / cell.better_next - 1:+.2%} on the next window"
        for cell in later
    ]
    return Table("targets", ["what", "target", "found"], rows, note="; ".join(notes))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.time", description=__doc__)
    add = parser.add_argument
    add("--curve", help="cost curve, FILE or FILE:PHASE; by default that of H200 in docs/time.md")
    add(
        "--routes",
        type=Path,
        action="append",
        default=[],
        help="recorded routes.npz to draw heat from as well",
    )
    add("--table", type=Path, action="append", default=[], help="measured table to fit as well (parquet)")
    add("--tokens", type=int, nargs="+", default=list(TOKENS), help="tokens of a step")
    add("--ranks", type=int, nargs="+", default=list(RANKS), help="expert-parallel sizes")
    add("--layers", type=int, default=2, help="layers of each heat")
    add("--seed", type=int, default=1)
    add("--json", type=Path, help="write every cell here")
    return parser


if __name__ == "__main__":
    sys.exit(main())
