"""Tables of a run's results, with one or more tables per measurement."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import rich.box
import rich.table

from benchmarks.solver.heats import KINDS, shape_name
from benchmarks.solver.judged import Results, Rows, Target, compared_cells, promise_error, targets
from benchmarks.solver.measures import SMALL
from eplb_lab.bench.closed_loop import cpu_after_first, moves_after_first, realised_mean
from eplb_lab.bench.contest import OURS, OURS_EVEN


class Table(NamedTuple):
    """Contents of a table.

    Parameters
    ----------
    title
        Title of the table.
    columns
        Column headings. The first column is left-aligned, and the others are right-aligned.
    rows
        Cells of each row.
    note
        Caption below the table.
    marked
        Indices of the rows to highlight.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    marked: Collection[int] = ()

    def drawn(self) -> rich.table.Table:
        """Lay the table out for a terminal."""
        table = rich.table.Table(
            title=self.title, caption=self.note or None, box=rich.box.SIMPLE_HEAD, title_justify="left"
        )
        for number, column in enumerate(self.columns):
            table.add_column(column, justify="left" if number == 0 else "right")
        for number, row in enumerate(self.rows):
            table.add_row(*row, style="bold red" if number in self.marked else None)
        return table


def tables(results: Results) -> list[Table]:
    """Return the table of targets, followed by the tables of every measurement in the results."""
    makers: Mapping[str, Callable[[Rows], list[Table]]] = {
        "cells": lambda rows: [_cells(rows, OURS), _cells(rows, OURS_EVEN)],
        "time": _time,
        "keeping": _keeping,
        "tables": _source_tables,
        "loop": lambda rows: _loop(rows, "Closed loop; plans take effect immediately"),
        "traces": lambda rows: _loop(rows, "Recorded trace; plans take effect immediately"),
        "pareto": lambda rows: _loop(rows, "Balance against moves; plans take effect immediately"),
        "ablation": _ablation,
        "example": _example,
        "few_slots": _few_slots,
    }
    all_tables = [target_table(targets(results))]
    for name, maker in makers.items():
        if results.get(name):
            all_tables += maker(results[name])
    return all_tables


def target_table(judged: Sequence[Target]) -> Table:
    """Return a table that compares each target with the measured figure and highlights the missed ones."""
    lines = [
        (target.what, target.wanted, target.found, "met" if target.met else "NOT MET") for target in judged
    ]
    missed = [number for number, target in enumerate(judged) if not target.met]
    title = f"Targets: {len(judged) - len(missed)} of {len(judged)} met"
    return Table(title, ("figure", "target", "measured", ""), lines, marked=missed)


def _cells(rows: Rows, policy: str) -> Table:
    compared = compared_cells(rows, policy)
    split = "Ours with its tables, FlashLB with even shares." if policy == OURS else "With even shares."
    return Table(
        f"Balance: {policy} and FlashLB, placed from scratch",
        ("shape, heat", "window: ours", "FlashLB", "worst seed", "next: ours", "FlashLB", "worst seed", ""),
        [
            (
                f"{cell.shape} {cell.kind}",
                *(f"{ratio:.4f}" for ratio in cell.in_sample[:2]),
                f"{cell.in_sample[2]:+.4f}",
                *(f"{ratio:.4f}" for ratio in cell.next_window[:2]),
                f"{cell.next_window[2]:+.4f}",
                "; ".join(cell.failings) or "ok",
            )
            for cell in compared
        ],
        f"Peak-to-average ratio per step, mean over layers and seeds; layers x experts x ranks x slots. {split}",
        [number for number, cell in enumerate(compared) if cell.failings],
    )


def _source_tables(rows: Rows) -> list[Table]:
    return [
        Table(
            "PAR with the tables of the source ranks",
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
            f"{rows[0]['shape']}; each token draws its source rank from a fixed lognormal mix with the row's log-sd. "
            "PAR per step; promises refer to the window. Peers use replica `rank % replicas`.",
        )
    ]


def _example(rows: Rows) -> list[Table]:
    return [
        Table(
            "Known example: tokens on the hottest rank",
            ("policy", "even shares", "tables, 8 sources"),
            [(row["policy"], f"{row['even']:.2f}", f"{row['sources_8']:.2f}") for row in rows],
            "[600, 560, 120, 120, 20, 10, 10, 10] on 8 ranks x 2 slots, mean 181.25; with even shares 196.67 is "
            "optimal. Tables of 16 sources could reach 185.",
        )
    ]


def _few_slots(rows: Rows) -> list[Table]:
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    cells = dict.fromkeys((row["shape"], row["kind"]) for row in rows)

    def ratio(cell: tuple[str, str], policy: str, name: str) -> str:
        selected = [
            row[name] for row in rows if (row["shape"], row["kind"], row["policy"]) == (*cell, policy)
        ]
        return f"{np.mean(selected):.4f}" if selected else ""

    columns = [f"{policy}: {when}" for policy in policies for when in ("window", "next")]
    return [
        Table(
            "Two slots per rank, placed from scratch",
            ("shape, heat", *columns),
            [
                (
                    " ".join(cell),
                    *(
                        ratio(cell, policy, name)
                        for policy in policies
                        for name in ("in_sample", "next_window")
                    ),
                )
                for cell in cells
            ],
            "Even shares, ratio per step, mean over layers and seeds.",
        )
    ]


def _time(rows: Rows) -> list[Table]:
    lines = []
    for shape in dict.fromkeys(row["shape"] for row in rows):
        totals: dict[str, float] = {}
        for policy in dict.fromkeys(row["policy"] for row in rows if row["shape"] == shape):
            selected = [
                row["cpu_seconds"] for row in rows if (row["shape"], row["policy"]) == (shape, policy)
            ]
            totals[policy] = sum(min(seconds) for seconds in selected)
            by_kind = [f"{min(spent):.3f} / {np.median(spent):.3f} / {max(spent):.3f}" for spent in selected]
            over = f"{totals[policy] / totals[OURS]:.2f}" if OURS in totals else ""
            padding = [""] * (len(KINDS) - len(selected))
            lines.append((f"{shape} {policy}", *by_kind, *padding, f"{totals[policy]:.3f}", over))
    return [
        Table(
            "CPU seconds of one decision from scratch",
            ("shape, policy", *KINDS, "sum of minima", "relative to ours"),
            lines,
            "Minimum / median / maximum over the repeats. Policies take turns, each in its own process, on one thread.",
        )
    ]


def _keeping(rows: Rows) -> list[Table]:
    return [
        Table(
            "A decision on static heat, one window after a placement from scratch",
            ("policy", "layers changed", "CPU ms: minimum", "median"),
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
    ]


def _loop(rows: Rows, title: str) -> list[Table]:
    scenario_tables = []
    for scenario in dict.fromkeys(row["scenario"] for row in rows):
        selected = [row for row in rows if row["scenario"] == scenario]
        decisions = max(1, len(selected[0]["moves"]) - 1)
        lines = [
            (
                row["policy"],
                f"{realised_mean(row):.4f}",
                str(moves_after_first(row)),
                f"{moves_after_first(row) / decisions / row['slots']:.1%}",
                f"{cpu_after_first(row):.3f}",
            )
            for row in selected
        ]
        columns = (
            "policy",
            "realised",
            "slots moved",
            "share of all slots per decision",
            "CPU s per decision",
        )
        note = (
            f"PAR per step on the window after each of {decisions} decisions, with each policy's own tables."
        )
        scenario_tables.append(Table(f"{title}: {scenario}", columns, lines, note))
    return scenario_tables


def _ablation(rows: Rows) -> list[Table]:
    traces = [name for name in dict.fromkeys(row["scenario"] for row in rows) if name not in KINDS]

    def mean(policy: str, measure: Callable[[Mapping[str, Any]], float | None], *scenarios: str) -> float:
        selected = [
            row for row in rows if row["policy"] == policy and row["scenario"] in (scenarios or KINDS)
        ]
        values = [value for value in map(measure, selected) if value is not None]
        return float(np.mean(values)) if values else np.nan

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

    columns = ("planner", "from scratch: window", "CPU s", *map(shape_name, SMALL.values()))
    columns += ("loop: " + " / ".join(KINDS), "slots moved", "CPU s per decision")
    return [
        Table(
            "Ablation: one component switched off at a time",
            (*columns, *(f"{name}: ratio, slots moved" for name in traces)),
            [line(policy) for policy in dict.fromkeys(row["policy"] for row in rows)],
            "Plans take effect immediately. Means over the four kinds and "
            f"{len({row['seed'] for row in rows} - {None})} seeds; source ranks differ "
            "by a log-sd of 0.3. Columns with a shape: placed from scratch for a host that splits evenly.",
        )
    ]
