"""Whatever part of the ranks' words reaches the service, in whatever order: it never believes more than is true."""

from __future__ import annotations

import copy
from collections import deque
from typing import Any, TypeAlias

import pytest

from eplb_service.control.core.live_placement import LivePlacement
from eplb_service.control.core.offer import Offer
from eplb_service.control.core.plan_tracker import Outcome, PlanTracker
from eplb_service.wire.status import PlanState, PlanStatus
from tests.control.core.story import decision_of
from tests.control.fake_group import first_placement, live_of

RANKS, LIMIT = 3, 10.0
Word: TypeAlias = PlanStatus


def _offer(base: LivePlacement) -> Offer:
    return Offer.of(7, base, decision_of(base, 0, 1))


def _words(offer: Offer, committed: int, refuses: bool) -> list[Word]:
    """What one rank says of a plan of which ``committed`` layers were switched."""
    if refuses:
        return [PlanStatus(plan_id=7, state=PlanState.REFUSED, reason="not now")]
    words = [PlanStatus(plan_id=7, state=PlanState.ACCEPTED)]
    for milestone in offer.milestones[:committed]:
        state = PlanState.COMMITTED
        words.append(
            PlanStatus(
                plan_id=7,
                state=state,
                layer=milestone.update.layer,
                epoch=milestone.epoch,
                digest=milestone.digest,
            )
        )
    if committed < len(offer.milestones):
        words.append(PlanStatus(plan_id=7, state=PlanState.ABORTED, reason="link"))
    return words


def _key(life: PlanTracker, said: tuple[int, ...]) -> tuple[Any, ...]:
    told = (tuple(life._progress), frozenset(life._refusals), frozenset(life._aborts))
    return (said, life.committed, life.outcome, told)


def _after(
    life: PlanTracker, event: str, rank: int, words: list[list[Word]], said: tuple[int, ...]
) -> PlanTracker:
    changed = copy.copy(life)
    changed._progress = life._progress.copy()
    changed._refusals, changed._aborts = life._refusals.copy(), life._aborts.copy()
    if event == "hear":
        changed.hear(rank, words[rank][said[rank]], 0.0)
    elif event == "hear again":
        changed.hear(rank, words[rank][said[rank] - 1], 0.0)
    elif event == "heartbeat":
        past = [word for word in words[rank][: said[rank]] if word.state == PlanState.COMMITTED]
        if past:
            changed.sees(rank, past[-1].epoch, past[-1].digest)
    else:
        changed.tick(2 * LIMIT, LIMIT)
    return changed


def _walk(committed: int, refusing: int | None) -> tuple[int, set[Outcome | None]]:
    """Every state that words delivered, lost, said twice, heartbeats and the deadline lead to."""
    offer = _offer(live_of(first_placement()))
    words = [_words(offer, committed, rank == refusing) for rank in range(RANKS)]
    first = PlanTracker(offer, RANKS, 0.0)
    start = (first, (0,) * RANKS)
    seen = {_key(*start)}
    waiting = deque([start])
    ends: set[Outcome | None] = set()
    while waiting:
        life, said = waiting.popleft()
        events = [("deadline", 0)]
        for rank in range(RANKS):
            events += [("hear", rank), ("lose", rank)] if said[rank] < len(words[rank]) else []
            events += [("hear again", rank)] if said[rank] else []
            events += [("heartbeat", rank)]
        for event, rank in events:
            after = life if event == "lose" else _after(life, event, rank, words, said)
            moved = list(said)
            if event in ("hear", "lose"):
                moved[rank] += 1
            assert life.committed <= after.committed <= committed
            assert life.outcome in (None, after.outcome), "an outcome was taken back"
            if after.outcome is Outcome.DONE:
                assert committed == len(offer.milestones)
                assert after._progress == [committed] * RANKS
            if event == "deadline":
                assert after.outcome is not None, "a plan outlived its deadline"
            reached = (after, tuple(moved))
            if all(place == len(told) for place, told in zip(reached[1], words, strict=True)):
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
