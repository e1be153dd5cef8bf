"""Tests that outputs do not change, no rank exits and layers switch again if hosts, links or ranks misbehave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eplb_lab.history.check import read_histories, violations
from tests.agent import live
from tests.faults.misbehaving import EXPERIMENTS, live_through_all
from tests.faults.serving import AHEAD
from tests.ranks import run_ranks

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1500)]

RANKS = 3
# In seconds. At worst, a call waits for a frozen peer or for the vote deadline; the rest of the time allows for a busy
# machine.
LONGEST_CALL = 30.0


@pytest.fixture(scope="module", params=[(), AHEAD], ids=["hosts that wait", "hosts ahead of their devices"])
def survived(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[Any]]:
    """Start the ranks once for all experiments. Return the directory with their histories, and each rank's results."""
    history = tmp_path_factory.mktemp("history")
    return history, run_ranks(RANKS, live_through_all, str(history), request.param, deadline=1400)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_after_a_fault_outputs_do_not_change_and_layers_switch_again(
    experiment: str, survived: tuple[Path, list[Any]]
) -> None:
    ranks = [of_rank[experiment] for of_rank in survived[1]]
    live.check_together(ranks)
    assert min(rank["switched"] for rank in ranks) >= 2
    assert max(rank["longest"] for rank in ranks) < LONGEST_CALL


def test_the_histories_of_all_experiments_violate_no_guarantee(survived: tuple[Path, list[Any]]) -> None:
    (ranks,) = read_histories(survived[0]).values()
    assert list(violations(ranks)) == []
    assert len(ranks[0].of("commit")) == survived[1][0]["an expert that arrives damaged"]["epoch"]
