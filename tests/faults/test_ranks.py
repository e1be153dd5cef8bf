"""Tests that the model keeps serving when a rank's threads, links or memory fail.

If balancing stops, the reason is reported.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.faults.scene import RANKS, Scene

pytestmark = [pytest.mark.faults, pytest.mark.e2e, pytest.mark.timeout(900)]


def test_all_ranks_abort_a_stalled_transfer_and_the_next_one_succeeds(tmp_path: Path) -> None:
    with Scene(tmp_path, transfer_timeout_seconds=5.0) as scene:
        scene.wait_for_switches()
        scene.ask("stall-next-transfer", 1)
        scene.wait_for_word("Connection closed", "Timed out", "did not finish within")
        scene.wait_for_metric("eplb_plans_total", 1, outcome="aborted")
        scene.wait_for_switches()
        facts = scene.end_well()
    assert all(fact.aborted >= 1 for fact in facts)


@pytest.mark.parametrize(
    ("fault", "ranks"), [("kill-stream-thread", [1]), ("lose-votes", [1]), ("sleep", range(RANKS))]
)
def test_balancing_resumes_after_lost_votes_a_sleep_or_a_dead_stream_thread(
    fault: str, ranks: Sequence[int], tmp_path: Path
) -> None:
    with Scene(tmp_path, vote_timeout_seconds=60) as scene:
        scene.wait_for_switches()
        for rank in ranks:
            scene.ask(fault, rank)
            time.sleep(2.0 / len(ranks))
        scene.wait_for_ranks()
        scene.wait_for_switches(2)
        # Steps take much less time than the timeout, which shows that ranks detect broken links instead of waiting for
        # the timeout.
        scene.end_well()


# By the time of the commit, the vote has passed, so peers use the layer's new layout even if this rank fails.
@pytest.mark.parametrize("fault", ["kill-transfer-thread", "break-heat-at-a-commit"])
def test_layers_switch_again_after_an_agent_error_on_one_rank(fault: str, tmp_path: Path) -> None:
    with Scene(tmp_path) as scene:
        scene.wait_for_switches()
        scene.ask(fault, 2)
        scene.wait_for_switches(3)
        scene.end_well()
