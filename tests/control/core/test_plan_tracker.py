"""Whatever part of the ranks' statuses reaches the service, in whatever order: it never believes more than is true."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import pytest

from eplb_service.control.core.plan_tracker import Outcome, PlanTracker
from eplb_service.wire.agent import PlanState, PlanStatus
from tests.control.core.story import decision_of
from tests.control.fake_group import first_placement, live_of

RANKS, LIMIT = 3, 10.0


def _statuses(offer: PlanTracker, committed: int, refuses: bool) -> list[PlanStatus]:
    """What one rank says of a plan of which ``committed`` layers were switched."""
    if refuses:
        return [PlanStatus(plan_id=7, state=PlanState.REFUSED, reason="not now")]
    statuses = [PlanStatus(plan_id=7, state=PlanState.ACCEPTED)]
    for update, (epoch, digest) in list(zip(offer.decision.layers, offer.versions, strict=True))[:committed]:
        state = PlanState.COMMITTED
        statuses.append(PlanStatus(plan_id=7, state=state, layer=update.layer, epoch=epoch, digest=digest))
    if committed < len(offer.versions):
        statuses.append(PlanStatus(plan_id=7, state=PlanState.ABORTED, reason="link"))
    return statuses


def _key(plan: PlanTracker, said: tuple[int, ...]) -> tuple[Any, ...]:
    return (
        said,
        plan.committed,
        plan.outcome,
        plan.progress,
        frozenset(plan.refusals),
        frozenset(plan.aborts),
    )


def _after(
    plan: PlanTracker, event: str, rank: int, statuses: list[list[PlanStatus]], said: tuple[int, ...]
) -> PlanTracker:
    if event == "hear":
        return plan.after_status(rank, statuses[rank][said[rank]], 0.0)
    if event == "hear again":
        return plan.after_status(rank, statuses[rank][said[rank] - 1], 0.0)
    if event == "heartbeat":
        past = [status for status in statuses[rank][: said[rank]] if status.state is PlanState.COMMITTED]
        after = plan.after_version(rank, (past[-1].epoch, past[-1].digest)) if past else None
        return after or plan
    return plan.after_time(2 * LIMIT, LIMIT)


def _walk(committed: int, refusing: int | None) -> tuple[int, set[Outcome | None]]:
    """Every state that statuses delivered, lost, sent twice, heartbeats and the deadline lead to."""
    live = live_of(first_placement())
    first = replace(PlanTracker.of(7, live, decision_of(live, 0, 1)), progress=(0,) * RANKS)
    statuses = [_statuses(first, committed, rank == refusing) for rank in range(RANKS)]
    start = (first, (0,) * RANKS)
    seen = {_key(*start)}
    waiting = deque([start])
    ends: set[Outcome | None] = set()
    while waiting:
        plan, said = waiting.popleft()
        events = [("deadline", 0)]
        for rank in range(RANKS):
            events += [("hear", rank), ("lose", rank)] if said[rank] < len(statuses[rank]) else []
            events += [("hear again", rank)] if said[rank] else []
            events += [("heartbeat", rank)]
        for event, rank in events:
            after = plan if event == "lose" else _after(plan, event, rank, statuses, said)
            moved = list(said)
            if event in ("hear", "lose"):
                moved[rank] += 1
            assert plan.committed <= after.committed <= committed
            assert plan.outcome in (None, after.outcome), "an outcome was taken back"
            if after.outcome is Outcome.DONE:
                assert committed == len(first.versions)
                assert after.progress == (committed,) * RANKS
            if event == "deadline":
                assert after.outcome is not None, "a plan outlived its deadline"
            reached = (after, tuple(moved))
            if all(place == len(reported) for place, reported in zip(reached[1], statuses, strict=True)):
                ends.add(after.outcome)
            if _key(*reached) not in seen:
                seen.add(_key(*reached))
                waiting.append(reached)
    return len(seen), ends


@pytest.mark.parametrize("committed", [0, 1, 2])
def test_the_service_never_believes_more_than_the_ranks_did(committed: int) -> None:
    states, ends = _walk(committed, refusing=None)
    assert states > 150
    assert (Outcome.DONE in ends) == (committed == 2)


def test_a_refusal_is_never_taken_for_a_success() -> None:
    states, ends = _walk(0, refusing=1)
    assert states > 100
    assert ends <= {Outcome.REFUSED, Outcome.ABORTED, Outcome.TIMED_OUT, None}
