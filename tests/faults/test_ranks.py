"""A rank's own threads, links and memory fail: balancing may stop, and says so; the model does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.scene import RANKS, Scene, pause
from tests.faults.serving import check_served

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


@pytest.mark.faults
def test_a_dead_transfer_thread_stops_balancing_and_is_reported(tmp_path: Path) -> None:
    with Scene(tmp_path, store=False) as scene:
        scene.wait_for_switches()
        scene.ask("kill-transfer-thread", 2)
        scene.wait_for_problem("rank 2: the transfer thread has died")
        facts = scene.stop()
    check_served(facts, tmp_path)
    assert [fact.halted for fact in facts] == [None, None, "the transfer thread has died"]


@pytest.mark.faults
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("fail-next-transfer", "no room to stage"),
        ("stall-next-transfer", "Connection closed|Timed out|not done within"),
        ("corrupt-next-transfer", "checksum"),
    ],
)
def test_a_transfer_that_goes_wrong_is_aborted_by_all_and_the_next_succeeds(
    fault: str, said: str, tmp_path: Path
) -> None:
    with Scene(tmp_path, transfer_timeout_seconds=5.0, verify_transfers=True) as scene:
        scene.wait_for_switches()
        scene.ask(fault, 1)
        scene.wait_for_word(*said.split("|"))
        scene.wait_for_metric("eplb_plans_total", 1, outcome="aborted")
        scene.wait_for_switches()
        facts = scene.stop()
    check_served(facts, tmp_path)
    assert [fact.halted for fact in facts] == [None] * RANKS
    assert all(fact.aborted >= 1 for fact in facts)


@pytest.mark.faults
def test_a_rank_that_sleeps_for_seconds_holds_nothing_up_but_the_model(tmp_path: Path) -> None:
    with Scene(tmp_path, bytes_per_step=3000) as scene:
        scene.wait_for_switches()
        for rank in range(RANKS):
            scene.ask("sleep", rank)
            pause(0.5)
        scene.wait_for_switches(2)
        facts = scene.stop()
    # A rank may wait in its vote for one that sleeps, as it would in the model's next collective.
    check_served(facts, tmp_path)
    assert [fact.halted for fact in facts] == [None] * RANKS


@pytest.mark.faults
def test_a_dead_stream_thread_is_started_again(tmp_path: Path) -> None:
    with Scene(tmp_path) as scene:
        scene.wait_for_switches()
        scene.ask("kill-stream-thread", 0)
        pause(1.0)
        scene.wait_for_ranks()
        scene.wait_for_switches()
        facts = scene.stop()
    check_served(facts, tmp_path)
    assert [fact.halted for fact in facts] == [None] * RANKS


@pytest.mark.faults
def test_an_agent_that_fails_in_a_commit_installs_it_first(tmp_path: Path) -> None:
    """The layer is voted in: other ranks route to it whatever breaks here."""
    with Scene(tmp_path) as scene:
        scene.wait_for_switches()
        scene.ask("break-heat-at-a-commit", 0)
        scene.wait_for_problem("the heat cannot be cut")
        facts = scene.stop()
    check_served(facts, tmp_path)
    assert facts[0].halted == "OSError: the heat cannot be cut"


@pytest.mark.faults
def test_ranks_whose_votes_are_lost_form_them_again(tmp_path: Path) -> None:
    with Scene(tmp_path, vote_timeout_seconds=60) as scene:
        scene.wait_for_switches()
        scene.ask("lose-votes", 1)
        pause(2.0)
        scene.wait_for_switches(2)
        facts = scene.stop()
    # Far below the timeout: broken links are seen, not waited for.
    check_served(facts, tmp_path)
    assert [fact.halted for fact in facts] == [None] * RANKS
