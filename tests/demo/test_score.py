"""Tests that the demo's score matches the ranks' reports, over the same steps for both sets of layers."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from eplb_lab.demo.scoreboard import Scoreboard
from eplb_lab.demo.stage import DEVICE_TOKENS, Stage
from eplb_lab.demo.summary import complaint, summarise, table
from eplb_lab.demo.view import Screen
from tests.demo.scored_board import LAYERS, RANKS, STEPS, rank_line, scored_board

STAGE = Stage(
    STEPS, LAYERS, 2, RANKS, 0, "all2allv", "tables", window=2, interval=2, policy="flashlb", seed=0
)


def test_a_step_counts_once_all_ranks_have_reported_it() -> None:
    board = Scoreboard(RANKS, LAYERS)
    board.add(rank_line(0, range(0, 4)))
    assert board.steps == 0
    board.add(rank_line(1, range(0, 2)))
    assert board.steps == 2
    assert board.loads("live").shape == (2, LAYERS, RANKS)


def test_both_pars_are_scored_over_the_steps_after_the_first_switch() -> None:
    figures = summarise(scored_board(), STAGE)
    assert figures["scored_from_step"] == 2
    assert figures["par_static"] == pytest.approx(2.0)
    assert figures["par_balanced"] == pytest.approx(1.0)
    assert figures["step_ms"]["with_agent"]["p50"] == pytest.approx(6.0)
    assert figures["step_ms"]["without_agent"]["p50"] == pytest.approx(10.0)
    assert figures["agent_ms"]["p50"] == pytest.approx(0.6)
    assert figures["gain_ms"] == pytest.approx(10.0 - 6.0 - 0.6)
    rate = figures["tokens_per_second"]
    assert rate["without_agent"] == pytest.approx(DEVICE_TOKENS * 16 / 0.010)
    assert rate["with_agent"] == pytest.approx(DEVICE_TOKENS * 16 / 0.0066)
    assert (figures["experts_moved"], figures["bytes_moved"]) == (1, 100)
    assert complaint(scored_board(), STAGE) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"worst_difference": 0.5}, "outputs differ from the unbalanced layers' by 0.5"),
        ({"halted": "link down"}, "a rank stopped balancing: link down"),
        ({"layers_switched": 0}, "no layer was switched"),
    ],
)
def test_an_unsuccessful_run_states_the_reason(changes: dict[str, Any], message: str) -> None:
    assert message in str(complaint(scored_board(**changes), STAGE))


def test_a_run_with_grouped_experts_needs_no_switch() -> None:
    grouped = replace(STAGE, dispatcher="moge")
    assert complaint(scored_board(layers_switched=0), grouped) is None
    assert "outputs differ" in str(complaint(scored_board(worst_difference=0.5), grouped))


def test_steps_without_tokens_have_no_par() -> None:
    assert math.isnan(scored_board().par("live", STEPS))
    assert scored_board().par("live", 2) == pytest.approx(1.0)


@pytest.mark.parametrize("split", ["tables", "step"])
def test_the_view_and_the_summary_show_the_figures(split: str) -> None:
    console = Console(record=True, width=140, file=io.StringIO())
    console.print(Screen(console, None, STEPS).view(scored_board(), "serving"))
    console.print(table(summarise(scored_board(), replace(STAGE, split=split))))
    text = console.export_text()
    for shown in ("4/4", "1 experts", "PAR balanced", "█", "serving", "while serving"):
        assert shown in text
    assert ("token noise" in text) == (split == "tables")
