"""Tables of CPU time: a whole placement, a decision that keeps, growth with size."""

from __future__ import annotations

import numpy as np

from benchmarks.solver.beside_flashlb import Rows
from benchmarks.solver.heat_kinds import KINDS
from benchmarks.solver.report.table import Table
from benchmarks.solver.scaling import growth
from eplb_service.bench.contest import OURS


def time_table(rows: Rows) -> Table:
    lines = []
    for shape in dict.fromkeys(row["shape"] for row in rows):
        totals: dict[str, float] = {}
        for policy in dict.fromkeys(row["policy"] for row in rows if row["shape"] == shape):
            here = [row["cpu_seconds"] for row in rows if (row["shape"], row["policy"]) == (shape, policy)]
            totals[policy] = sum(min(seconds) for seconds in here)
            lines.append(
                (
                    f"{shape} {policy}",
                    *(
                        f"{min(seconds):.3f} / {np.median(seconds):.3f} / {max(seconds):.3f}"
                        for seconds in here
                    ),
                    *([""] * (len(KINDS) - len(here))),
                    f"{totals[policy]:.3f}",
                    f"{totals[policy] / totals[OURS]:.2f}" if OURS in totals else "",
                )
            )
    return Table(
        "CPU seconds of one decision that places everything",
        ("shape, policy", *KINDS, "sum of minima", "over ours"),
        lines,
        "Least / median / most of the repeats; one thread, policies asked in turn, each in a process of its own.",
    )


def keeping_table(rows: Rows) -> Table:
    return Table(
        "A decision on static heat that was placed one window before",
        ("policy", "layers changed", "CPU ms: least", "median"),
        [
            (
                f"{row['policy']}, {row['case']}",
                str(row["changed_layers"]),
                f"{min(row['cpu_seconds']) * 1e3:.1f}",
                f"{np.median(row['cpu_seconds']) * 1e3:.1f}",
            )
            for row in rows
        ],
        f"{rows[0]['shape']}, one thread.",
    )


def scaling_table(rows: Rows) -> Table:
    lines = []
    for grows in dict.fromkeys(row["grows"] for row in rows):
        for policy in dict.fromkeys(row["policy"] for row in rows):
            here = [row for row in rows if (row["grows"], row["policy"]) == (grows, policy)]
            sizes, seconds = [row["size"] for row in here], [row["cpu_seconds"] for row in here]
            power = f"{growth(sizes, seconds):.2f}" if len(here) > 1 else ""
            points = ", ".join(f"{size}: {spent:.3f}" for size, spent in zip(sizes, seconds, strict=True))
            lines.append((f"{grows}, {policy}", points, power))
    return Table(
        "CPU seconds as layers, experts and ranks grow",
        ("what grows, policy", "size: seconds", "power"),
        lines,
        "From 16 layers, 256 experts, 32 ranks, one slot per rank more than needed; phased heat.",
    )
