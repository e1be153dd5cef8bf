"""Tests that no plan from a service can corrupt a token, and that each rejection gives a reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from eplb_core.wire.codec import MAX_MESSAGE_BYTES
from eplb_core.wire.generated import agent_pb2
from tests.faults.rogue import RogueService
from tests.faults.scene import RANKS, RankCrew
from tests.faults.serving import check_served

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

ACCEPTED = agent_pb2.PLAN_STATE_ACCEPTED
REFUSED = agent_pb2.PLAN_STATE_REFUSED
COMMITTED = agent_pb2.PLAN_STATE_COMMITTED
ABORTED = agent_pb2.PLAN_STATE_ABORTED


def test_stale_duplicate_partial_and_malformed_plans_do_no_harm(tmp_path: Path) -> None:
    with (
        RogueService(RANKS, term=5) as service,
        RankCrew(tmp_path, service.address, offer_deadline_steps=30) as crew,
    ):
        first = service.wait_for_hellos()
        good = service.plans(first, 0, 1)
        service.send(good)
        service.send(good)
        service.hear(COMMITTED, 2 * RANKS)

        service.send(good)
        assert all("starts from epoch 0" in status.reason for _, status in service.hear(REFUSED, RANKS))

        service.disconnect()
        second = service.wait_for_hellos()
        assert second.epoch == 2
        service.send(service.plans(second, 0, seed=7), 0, 2)
        assert {rank for rank, _ in service.hear(ACCEPTED, 2)} == {0, 2}
        reasons = [status.reason for _, status in service.hear(ABORTED, 2)]
        assert "not all ranks received the plan within 30 steps" in reasons

        service.send(service.plans(second, 0, seed=8), 0, 1)
        service.send(service.plans(second, 1, seed=9), 2)
        service.hear(ABORTED, RANKS)

        broken = service.plans(second, 0, seed=10)
        for plan in broken:
            plan.layers[0].sources.shape[0] = 1 << 30
        service.send(broken)
        assert all("sources" in status.reason for _, status in service.hear(REFUSED, RANKS))

        service.term = 4
        service.send(service.plans(second, 0, seed=11))
        reasons = [status.reason for _, status in service.hear(REFUSED, RANKS)]
        assert all("leader term 4 is lower than 5" in reason for reason in reasons)
        facts = crew.stop()
    check_served(facts, tmp_path)
    assert [fact.epoch for fact in facts] == [2] * RANKS
    assert [fact.halted for fact in facts] == [None] * RANKS


@pytest.mark.faults
def test_ranks_reconnect_after_an_oversized_plan_ends_their_streams(tmp_path: Path) -> None:
    with RogueService(RANKS) as service, RankCrew(tmp_path, service.address) as crew:
        first = service.wait_for_hellos()
        huge = service.plans(first, 0)
        for plan in huge:
            plan.layers[0].sources.data = bytes(MAX_MESSAGE_BYTES + 1)
        service._hellos.clear()
        service.send(huge)
        again = service.wait_for_hellos()
        service.send(service.plans(again, 0))
        service.hear(COMMITTED, RANKS)
        facts = crew.stop()
    check_served(facts, tmp_path)
    assert [fact.epoch for fact in facts] == [1] * RANKS


@pytest.mark.faults
def test_continually_replaced_plans_leave_all_ranks_with_the_same_placement(tmp_path: Path) -> None:
    """Some of the plans are carried out, and each of these completely."""
    with (
        RogueService(RANKS) as service,
        RankCrew(tmp_path, service.address, offer_deadline_steps=8, bytes_per_step=2000) as crew,
    ):
        for seed in range(25):
            base = service.wait_for_hellos()
            service.send(service.plans(base, 0, 1, seed=seed), *([0, 1], [1, 2], [0, 1, 2])[seed % 3])
            service.send(service.plans(base, 1, seed=100 + seed), seed % RANKS)
            service.disconnect()
        crew.end_well()
