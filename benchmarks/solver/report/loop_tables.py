"""Tables of the closed loop: balance realised, slots moved, and what each idea is worth."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.solver.ablation import SMALL
from benchmarks.solver.beside_flashlb import Rows
from benchmarks.solver.closed_loop import cpu_after_first, moves_after_first, realised_mean
from benchmarks.solver.heat_kinds import KINDS, shape_name
from benchmarks.solver.report.table import Table


def loop_tables(rows: Rows, title: str) -> list[Table]:
    found = []
    for course in dict.fromkeys(row["course"] for row in rows):
        here = [row for row in rows if row["course"] == course]
        decisions = max(1, len(here[0]["moves"]) - 1)
        found.append(
            Table(
                f"{title}: {course}",
                ("policy", "realised", "slots moved", "of all slots, a decision", "CPU s a decision"),
                [
                    (
                        row["policy"],
                        f"{realised_mean(row):.4f}",
                        str(moves_after_first(row)),
                        f"{moves_after_first(row) / decisions / row['slots']:.1%}",
                        f"{cpu_after_first(row):.3f}",
                    )
                    for row in here
                ],
                f"Ratio per step on the window after each decision, through each policy's own tables; {decisions} "
                "decisions after the first placement.",
            )
        )
    return found


def ablation_table(rows: Rows) -> Table:
    def mean(policy: str, measure: Callable[[Mapping[str, Any]], float]) -> float:
        return float(np.mean([measure(row) for row in rows if row["policy"] == policy]))

    def line(policy: str) -> Sequence[str]:
        by_kind = [
            realised_mean(row)
            for kind in KINDS
            for row in rows
            if (row["policy"], row["course"]) == (policy, kind)
        ]
        return (
            policy,
            f"{mean(policy, lambda row: row['in_sample']):.4f}",
            f"{mean(policy, lambda row: row['cpu_anew']):.3f}",
            *(f"{mean(policy, lambda row, name=name: row[name] or np.nan):.4f}" for name in SMALL),
            " / ".join(f"{ratio:.3f}" for ratio in by_kind),
            f"{mean(policy, moves_after_first):.0f}",
            f"{mean(policy, cpu_after_first):.3f}",
        )

    return Table(
        "Ablation: one idea switched off at a time",
        (
            "planner",
            "placed anew: window",
            "CPU s",
            *(f"{shape_name(shape)}" for shape in SMALL.values()),
            "loop: " + " / ".join(KINDS),
            "slots moved",
            "CPU s a decision",
        ),
        [line(policy) for policy in dict.fromkeys(row["policy"] for row in rows)],
        "Means over the four kinds; source ranks differ by a log-sd of 0.3. Columns with a shape: placed anew for a "
        "host that splits evenly.",
    )
