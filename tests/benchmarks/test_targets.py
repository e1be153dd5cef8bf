"""Targets are judged by the worst seed and by the figures that a table shows."""

from __future__ import annotations

import pytest

from benchmarks.solver.judged import compared_cells, targets, time_ratio
from benchmarks.solver.measures import PRICED
from eplb_service.bench.closed_loop import DEFAULT, FULL

SHAPE = "58x256x32x9"


def cell(policy: str, seed: int, in_sample: float, next_window: float, kind: str = "static"):
    return {
        "shape": SHAPE,
        "kind": kind,
        "seed": seed,
        "policy": policy,
        "in_sample": in_sample,
        "next_window": next_window,
    }


def loop_row(policy: str, realised: float, moves: int, course: str = "drift"):
    return {
        "course": course,
        "policy": policy,
        "realised": [9.0, realised, realised],
        "moves": [1000, moves, moves],
        "changed_layers": [2, 1, 1],
        "cpu_seconds": [1.0, 0.1, 0.1],
        "slots": 1000,
    }


def test_a_cell_fails_by_its_worst_seed() -> None:
    rows = [cell("ours", 1, 1.10, 1.1), cell("FlashLB", 1, 1.11, 1.1)]
    assert compared_cells(rows)[0].failings == ()
    rows += [cell("ours", 2, 1.114, 1.1), cell("FlashLB", 2, 1.11, 1.1)]
    assert compared_cells(rows)[0].failings == ("in sample by 0.0010",)


@pytest.mark.parametrize(("gain", "met"), [(0.019, False), (0.021, True)])
def test_bursty_heat_must_be_balanced_better_on_the_next_window(gain: float, met: bool) -> None:
    rows = [cell("ours", 1, 1.4, 1.6 - gain, "bursty"), cell("FlashLB", 1, 1.4, 1.6, "bursty")]
    assert [target.met for target in targets({"cells": rows})] == [met]


def test_time_is_compared_over_the_minima_of_all_kinds() -> None:
    def row(policy: str, kind: str, seconds: list[float]):
        return {"shape": SHAPE, "kind": kind, "policy": policy, "cpu_seconds": seconds}

    rows = [
        row("ours", "static", [1.0, 3.0]),
        row("ours", "drift", [1.0, 9.0]),
        row("FlashLB", "static", [8.0, 9.0]),
        row("FlashLB", "drift", [2.0, 2.5]),
    ]
    assert time_ratio(rows, SHAPE, ["static", "drift"]) == 5
    found = {target.what.rpartition(", ")[2]: target.met for target in targets({"time": rows})}
    assert set(found.values()) == {False}


@pytest.mark.parametrize(
    ("name", "label", "realised", "moves", "met"),
    [
        ("pareto", PRICED, 1.54, 99, [True, True]),
        ("pareto", PRICED, 1.55, 101, [False, False]),
        # Moves that pay are not held against default settings.
        ("loop", DEFAULT.label, 1.54, 900, [True]),
        ("loop", DEFAULT.label, 1.55, 900, [False]),
    ],
)
def test_drift_is_held_against_a_full_re_solve(
    name: str, label: str, realised: float, moves: int, met: list[bool]
) -> None:
    rows = [loop_row(label, realised, moves), loop_row(FULL.label, 1.5, 1000)]
    assert [target.met for target in targets({name: rows})] == met


@pytest.mark.parametrize(("realised", "met"), [(1.109, True), (1.112, False)])
def test_tables_are_held_to_what_the_plan_promised_of_the_same_steps(realised: float, met: bool) -> None:
    row = {"policy": "ours", "realised_window": realised, "promised_L": [1.0, 1.2]}
    assert [target.met for target in targets({"tables": [row, row | {"promised_L": None}]})] == [met]


def test_a_decision_that_changes_something_does_not_count_as_keeping() -> None:
    row = {
        "shape": SHAPE,
        "policy": "ours",
        "case": "in default settings",
        "changed_layers": 1,
        "cpu_seconds": [0.001],
    }
    assert [target.met for target in targets({"keeping": [row]})] == [False]
    assert [target.met for target in targets({"keeping": [row | {"changed_layers": 0}]})] == [True]
