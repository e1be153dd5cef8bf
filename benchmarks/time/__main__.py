"""Compare planning for time with balancing tokens: ``python -m benchmarks.time``."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track

from benchmarks.solver.judged import Target
from benchmarks.solver.tables import Table, target_table
from benchmarks.time.cells import CONFIDENCE, Cell, cells, compared
from benchmarks.time.heats import heats
from benchmarks.time.slot_counts import NEAR, Named, named
from benchmarks.time.slot_counts import STEPS as LOOP_STEPS
from eplb_core.cost.curve import CostCurve, CurveError, read_curve
from eplb_core.solver.warmup import warm_up

H200 = CostCurve(20.0, 11.6, 5.0, 0.0615, "decode", "fit to DeepSeek-V3's experts on H200, uniform rows")
TOKENS = (64, 256, 1024, 4096, 16384)
RANKS = (8, 32, 64)
_PARTS = ("cells", "slots")
_SURE = f"{CONFIDENCE:.0%} over all cells"


def main() -> int:
    """Parse the options, measure, and print the targets. Return the exit code."""
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
    drawn = (options.routes, options.tokens, options.layers, options.seeds)
    total = len(options.seeds) * len(options.tokens) * (4 + len(options.routes))
    found: list[Cell] = []
    if "cells" in options.parts:
        for heat in track(heats(*drawn), "cells", total, console=console):
            found += cells(heat, options.ranks, curve)
    counts: list[Named] = []
    if "slots" in options.parts:
        for heat in track(heats(*drawn, LOOP_STEPS), "slot counts", total, console=console):
            counts += named(heat, options.ranks, curve)
    console.print(f"{curve} ({curve.source})", markup=False)
    judged: list[Target] = []
    if found:
        console.print(_cell_table(found).drawn())
        judged += _of_cells(found)
    if counts:
        judged += _of_slots(counts)
    console.print(target_table(judged).drawn())
    console.print(f"{len(found)} cells in {time.monotonic() - began:.0f} s")
    if options.json is not None:
        rows = {"cells": found, "slots": counts}
        options.json.write_text(
            json.dumps({name: [asdict(row) for row in of] for name, of in rows.items()}, indent=1)
        )
    return 0


def _cell_table(found: Sequence[Cell]) -> Table:
    """Return a table of each placement's time on the next window, as the mean over the heats."""
    rows = []
    for key in dict.fromkeys((cell.ranks, cell.tokens, cell.more) for cell in found):
        selected = [cell for cell in found if (cell.ranks, cell.tokens, cell.more) == key]
        times = [
            np.mean([getattr(cell, name) for cell in selected])
            for name in ("off_next", "balanced_next", "timed_next")
        ]
        gain = np.mean([1 - cell.timed_next / cell.balanced_next for cell in selected])
        name = f"EP{key[0]}, {key[1]} tokens, +{key[2]}"
        rows.append([name, *(f"{us:.1f}" for us in times), f"{gain:+.1%}"])
    columns = ["cell, mean over heats", "unbalanced, us", "planned for tokens", "planned for time"]
    return Table("slowest rank on the next window", [*columns, "gain of planning for time"], rows)


def _of_cells(found: Sequence[Cell]) -> Iterator[Target]:
    """Yield the targets of the cells; the figures name each cell in which planning for time is significantly slower."""
    above = [cell for cell in found if cell.timed > cell.better * (1 + 1e-6)]
    gain = np.mean([1 - cell.timed / cell.balanced for cell in found])
    yield Target(
        "cells slower than the better of no balancing and planning for tokens, on the window",
        "0",
        f"{len(above)} of {len(found)}; mean gain over planning for tokens {gain:.1%}",
        not above,
    )
    later = compared(found)
    slower = [cell for cell in later if cell.is_shown(len(later))]
    names = "".join(f"; {cell.heat} EP{cell.ranks} {cell.tokens} tokens +{cell.more}" for cell in slower)
    worst = max(cell.slower for cell in later)
    yield Target(
        f"the same on the next window, significant at {_SURE}",
        "0",
        f"{len(slower)} of {len(later)}; worst cell {worst:+.2%}{names}",
        not slower,
    )


def _of_slots(counts: Sequence[Named]) -> Iterator[Target]:
    """Yield the target of the recommended slot counts; the figure names each wrong recommendation."""
    wrong = [count for count in counts if not count.is_right(len(counts))]
    names = "".join(
        f"; {count.heat} EP{count.ranks} {count.tokens} tokens, seed {count.seed}: "
        f"{count.slots} recommended, {count.fastest} fastest"
        for count in wrong
    )
    yield Target(
        f"recommended slot counts that are more than {NEAR:.0%} slower on later windows, significant at {_SURE}",
        "0",
        f"{len(wrong)} of {len(counts)}{names}",
        not wrong,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.time", description=__doc__)
    add = parser.add_argument
    add("--curve", help="cost curve, FILE or FILE:PHASE (default: the H200 curve in docs/research/time.md)")
    add(
        "--routes",
        type=Path,
        action="append",
        default=[],
        help="also draw heat from this recorded routes.npz; repeatable",
    )
    add("--tokens", type=int, nargs="+", default=list(TOKENS), help="tokens per step")
    add("--ranks", type=int, nargs="+", default=list(RANKS), help="expert-parallel sizes")
    add(
        "--parts",
        nargs="+",
        choices=_PARTS,
        default=list(_PARTS),
        help="measurements to run; slots takes longest",
    )
    add("--layers", type=int, default=2, help="layers of each heat")
    add(
        "--seeds",
        type=int,
        nargs="+",
        default=[1],
        help="seeds of the heat; several show the scatter of the draws",
    )
    add("--json", type=Path, help="write every cell to this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
