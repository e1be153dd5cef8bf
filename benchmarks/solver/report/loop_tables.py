"""Tables of the closed loop: balance realised, slots moved, and what each idea is worth."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.solver.ablation import SMALL
from benchmarks.solver.beside_flashlb import Rows
from benchmarks.solver.heat_kinds import KINDS, shape_name
from benchmarks.solver.report.table import Table
from eplb_service.bench.closed_loop import cpu_after_first, moves_after_first, realised_mean


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
    traces = [name for name in dict.fromkeys(row["course"] for row in rows) if name not in KINDS]

    def mean(policy: str, measure: Callable[[Mapping[str, Any]], float | None], *courses: str) -> float:
        found = [
            measure(row) for row in rows if row["policy"] == policy and row["course"] in (courses or KINDS)
        ]
        known = [value for value in found if value is not None]
        return float(np.mean(known)) if known else np.nan

    def line(policy: str) -> Sequence[str]:
        return (
            policy,
            f"{mean(policy, lambda row: row['in_sample']):.4f}",
            f"{mean(policy, lambda row: row['cpu_from_scratch']):.3f}",
            *(f"{mean(policy, lambda row, name=name: row.get(name)):.4f}" for name in SMALL),
            " / ".join(f"{mean(policy, realised_mean, kind):.3f}" for kind in KINDS),
            f"{mean(policy, moves_after_first):.0f}",
            f"{mean(policy, cpu_after_first):.3f}",
            *(
                f"{mean(policy, realised_mean, name):.3f}, {mean(policy, moves_after_first, name):.0f}"
                for name in traces
            ),
        )

    seeds = len({row["seed"] for row in rows if row["seed"] is not None})
    return Table(
        "Ablation: one component switched off at a time",
        (
            "planner",
            "from scratch: window",
            "CPU s",
            *(f"{shape_name(shape)}" for shape in SMALL.values()),
            "loop: " + " / ".join(KINDS),
            "slots moved",
            "CPU s per decision",
            *(f"{name}: ratio, slots moved" for name in traces),
        ),
        [line(policy) for policy in dict.fromkeys(row["policy"] for row in rows)],
        f"Means over the four kinds and {seeds} seeds; source ranks differ by a log-sd of 0.3. Columns with a shape: "
        "placed from scratch for a host that splits evenly.",
    )
