"""Tests that the emulated benchmark compares balancers with the unbalanced model and counts the agent's own time."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from benchmarks.emulated.__main__ import _BALANCERS, LEFT_ALONE, _figures, table
from eplb_core.planner.settings import POLICIES
from tests.demo.scored_board import scored_board


def test_the_agents_time_counts_only_for_the_balanced_model() -> None:
    board = scored_board()
    live = _figures(board, "live")
    still = _figures(board, "still")
    assert live["mean_ms"] == pytest.approx(6.0 + 0.6)
    assert live["agent_ms"] == pytest.approx(0.6)
    assert still["mean_ms"] == pytest.approx(10.0)
    assert live["tokens_per_second"] / still["tokens_per_second"] == pytest.approx(10.0 / 6.6)
    assert (live["moves"], still["moves"]) == (1.0, 0.0)


def test_a_row_has_the_median_and_the_range_over_the_seeds() -> None:
    def row(ms: float) -> dict[str, float]:
        figures = dict.fromkeys(("p50_ms", "p99_ms", "par"), ms)
        return figures | {"mean_ms": ms, "agent_ms": 1.0, "tokens_per_second": 6000.0 / ms, "moves": 3.0}

    rows = {LEFT_ALONE: [row(100.0)], "eplb-service": [row(80.0), row(75.0), row(90.0)]}
    out = io.StringIO()
    Console(file=out, width=160).print(table(rows))
    assert "80.0 (75.0 to 90.0)" in out.getvalue()
    assert "+25.0%" in out.getvalue()


def test_balancers_are_policies_of_the_service() -> None:
    assert {how["policy"] for how in _BALANCERS.values()} <= set(POLICIES)
