"""The results of a run as tables, one for each measurement."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from benchmarks.solver.beside_flashlb import Rows
from benchmarks.solver.report.balance_tables import (
    cells_table,
    example_table,
    few_slots_table,
    policies_table,
    source_tables_table,
)
from benchmarks.solver.report.cost_tables import keeping_table, scaling_table, time_table
from benchmarks.solver.report.loop_tables import ablation_table, loop_tables
from benchmarks.solver.report.table import Table
from benchmarks.solver.targets import Results, targets
from eplb_service.bench.contest import OURS, OURS_EVEN


def tables(results: Results) -> list[Table]:
    """Targets first, then every measurement that was made."""
    makers: Mapping[str, Callable[[Rows], list[Table]]] = {
        "cells": lambda rows: [cells_table(rows, OURS), cells_table(rows, OURS_EVEN), policies_table(rows)],
        "time": lambda rows: [time_table(rows)],
        "keeping": lambda rows: [keeping_table(rows)],
        "tables": lambda rows: [source_tables_table(rows)],
        "loop": lambda rows: loop_tables(rows, "Closed loop"),
        "traces": lambda rows: loop_tables(rows, "Recorded trace"),
        "pareto": lambda rows: loop_tables(rows, "Balance against moves"),
        "scaling": lambda rows: [scaling_table(rows)],
        "ablation": lambda rows: [ablation_table(rows)],
        "example": lambda rows: [example_table(rows)],
        "few_slots": lambda rows: [few_slots_table(rows)],
    }
    found = [_targets(results)]
    for name, maker in makers.items():
        if results.get(name):
            found += maker(results[name])
    return found


def _targets(results: Results) -> Table:
    judged = targets(results)
    met = sum(target.met for target in judged)
    return Table(
        f"Targets: {met} of {len(judged)} met",
        ("target", "wanted", "found", ""),
        [(target.what, target.wanted, target.found, "met" if target.met else "NOT MET") for target in judged],
        marked=frozenset(number for number, target in enumerate(judged) if not target.met),
    )
