"""Tables of balance: from scratch, through tables, on the known example, beside a long search."""

from __future__ import annotations

import numpy as np

from benchmarks.solver.beside_flashlb import Rows, compared_cells
from benchmarks.solver.report.table import Table
from benchmarks.solver.targets import promise_error
from eplb_service.bench.contest import OURS, OURS_EVEN


def cells_table(rows: Rows, mine: str) -> Table:
    """``mine`` beside FlashLB, a line for each shape and kind."""
    compared = compared_cells(rows, mine)
    return Table(
        f"Balance: {mine}, beside FlashLB, placed from scratch",
        ("shape, heat", "window: ours", "FlashLB", "worst seed", "next: ours", "FlashLB", "worst seed", ""),
        [
            (
                f"{cell.shape} {cell.kind}",
                f"{cell.ours_in_sample:.4f}",
                f"{cell.flashlb_in_sample:.4f}",
                f"{cell.in_sample_worst:+.4f}",
                f"{cell.ours_next:.4f}",
                f"{cell.flashlb_next:.4f}",
                f"{cell.next_worst:+.4f}",
                "; ".join(cell.failings) or "ok",
            )
            for cell in compared
        ],
        "Peak-to-average ratio per step, mean over layers and seeds; shape is layers x experts x ranks x slots. "
        + ("Ours through its tables, FlashLB by even shares." if mine == OURS else "By even shares."),
        frozenset(number for number, cell in enumerate(compared) if cell.failings),
    )


def policies_table(rows: Rows) -> Table:
    """All policies on the first seed, the mean over the shapes."""
    seed = rows[0]["seed"]
    here = [row for row in rows if row["seed"] == seed]

    kinds = list(dict.fromkeys(row["kind"] for row in here))

    def line(policy: str) -> list[str]:
        mine = [row for row in here if row["policy"] == policy]

        def by_kind(field: str) -> str:
            found = [[row[field] for row in mine if row["kind"] == kind] for kind in kinds]
            return " / ".join(f"{np.mean(ratios):.3f}" if ratios else "" for ratios in found)

        moved, seconds = (np.mean([row[field] for row in mine]) for field in ("moved", "cpu_seconds"))
        return [policy, by_kind("in_sample"), by_kind("next_window"), f"{moved:.0%}", f"{seconds:.3f}"]

    policies = list(dict.fromkeys(row["policy"] for row in here))
    return Table(
        "Balance: all policies",
        ("policy", "window: " + " / ".join(kinds), "next window", "slots moved", "CPU s"),
        [line(policy) for policy in policies],
        f"Mean over the shapes, seed {seed}; each placed from the engines' first layout; ours through its tables, "
        "all others by even shares.",
    )


def source_tables_table(rows: Rows) -> Table:
    return Table(
        "Through the tables of the source ranks",
        ("heat, spread of sources, policy", "window", "next window", "promised", "realised"),
        [
            (
                f"{row['kind']}, {row['spread']:g}, {row['policy']}",
                f"{row['realised_window']:.4f}",
                f"{row['realised_next']:.4f}",
                "" if row["promised_L"] is None else f"{np.mean(row['promised_L']):.4f}",
                "" if row["promised_L"] is None else f"{promise_error(row):+.2%}",
            )
            for row in rows
        ],
        f"{rows[0]['shape']}; each token draws its source rank from a persistent lognormal mix of this log-sd. Window "
        "and next window per step; a promise is about the window. Peers by replica `rank % replicas`.",
    )


def example_table(rows: Rows) -> Table:
    return Table(
        "Known example: tokens on the hottest rank",
        ("policy", "even shares", "tables, 8 sources", "tables, 16 sources"),
        [
            (
                row["policy"],
                f"{row['even']:.2f}",
                f"{row['sources_8']:.2f}",
                "" if row["sources_16"] is None else f"{row['sources_16']:.2f}",
            )
            for row in rows
        ],
        "[600, 560, 120, 120, 20, 10, 10, 10] on 8 ranks x 2 slots, mean 181.25; with even shares 196.67 is optimal.",
    )


def few_slots_table(rows: Rows) -> Table:
    return Table(
        "Two slots per rank, beside a long search",
        ("shape, heat", OURS_EVEN, "FlashLB", "long search", "ours above it"),
        [
            (
                f"{row['shape']} {row['kind']}",
                f"{row[OURS_EVEN]:.4f}" if OURS_EVEN in row else "",
                f"{row['FlashLB']:.4f}" if "FlashLB" in row else "",
                f"{row['best']:.4f}",
                f"{row[OURS_EVEN] / row['best'] - 1:+.2%}" if OURS_EVEN in row else "",
            )
            for row in rows
        ],
        f"Even shares, ratio over the solver's 64 episodes; {rows[0]['long_seconds']:g} s of long search a layer.",
    )
