"""A plan ends as its ranks say it does, whatever statuses of theirs are lost, late or wrong."""

from __future__ import annotations

import pytest

from eplb_service.control.core.errors import RefusedError
from eplb_service.control.core.events import LayerCommitted, PlacementKnown, PlanEnded
from eplb_service.control.core.health import problems
from eplb_service.control.core.plan_tracker import Outcome
from eplb_service.wire.hello import decode_hello
from eplb_service.wire.status import PlanState, PlanStatus
from tests.control.core.story import PLAN_TIMEOUT, Story
from tests.control.fake_group import BYTES_PER_EXPERT, RANKS, first_placement, hello_of, live_of

ACCEPTED = PlanState.ACCEPTED
ABORTED = PlanState.ABORTED
REFUSED = PlanState.REFUSED
COMMITTED = PlanState.COMMITTED


@pytest.fixture
def story() -> Story:
    return Story()


def outcome_of(story: Story) -> Outcome | None:
    assert story.deployment.ended_plan is not None
    return story.deployment.ended_plan.outcome


def version(story: Story) -> tuple[int, int]:
    assert story.deployment.live is not None
    return story.deployment.live.epoch, story.deployment.live.digest


def test_a_plan_that_all_ranks_carry_out_is_done(story: Story) -> None:
    story.joins()
    offer = story.offers(2, 0)
    for rank in range(RANKS):
        assert story.says(rank, offer, ACCEPTED, 2) == []
    events = story.commits(offer, 2, 0)
    assert [type(event) for event in events] == [LayerCommitted, LayerCommitted, PlanEnded]
    assert [event.update.layer for event in events[:2]] == [2, 0]
    assert outcome_of(story) is Outcome.DONE
    assert version(story) == offer.milestones[-1].version
    assert story.deployment.live.layer_epochs == (2, 0, 1)
    assert story.deployment.planned_par == {2: 1.1, 0: 1.1}
    totals = story.deployment.totals
    assert (totals.layers_switched, totals.experts_moved, totals.bytes_moved) == (2, 4, 4 * BYTES_PER_EXPERT)
    assert problems(story.deployment) == []


def test_one_word_of_commit_is_enough_to_know_it_and_all_are_needed_to_end(story: Story) -> None:
    story.joins()
    offer = story.offers(1)
    assert len(story.says(0, offer, COMMITTED, 1)) == 1
    assert version(story) == offer.milestones[0].version
    assert story.deployment.plan is not None
    story.commits(offer, 1, ranks=range(1, RANKS))
    assert outcome_of(story) is Outcome.DONE


def test_an_abort_keeps_the_layers_before_it(story: Story) -> None:
    story.joins()
    offer = story.offers(0, 1, 2)
    story.commits(offer, 0)
    for rank in range(RANKS):
        story.says(rank, offer, ABORTED, 1, "transfer timed out")
    assert outcome_of(story) is Outcome.ABORTED
    assert version(story) == offer.milestones[0].version
    assert problems(story.deployment) == ["plan 1 aborted: ranks 0, 1, 2, 3: transfer timed out"]


def test_the_next_decision_clears_the_problems_of_the_last_plan(story: Story) -> None:
    story.joins()
    story.offers(0)
    story.waits(PLAN_TIMEOUT + 1)
    assert problems(story.deployment)
    story.deployment.deciding()
    assert problems(story.deployment) == []


def test_one_refusal_refuses_the_plan(story: Story) -> None:
    story.joins()
    offer = story.offers(0)
    story.says(2, offer, REFUSED, 0, "stale epoch")
    for rank in (0, 1, 3):
        story.says(rank, offer, ABORTED, 0, "another rank refused")
    assert outcome_of(story) is Outcome.REFUSED
    assert problems(story.deployment) == ["plan 1 refused: rank 2: stale epoch"]


def test_a_plan_that_nobody_answers_is_given_up_and_says_who_was_silent(story: Story) -> None:
    story.joins()
    story.offers(0)
    assert story.waits(PLAN_TIMEOUT - 1) == []
    assert [type(event) for event in story.waits(2)] == [PlanEnded]
    assert outcome_of(story) is Outcome.TIMED_OUT
    assert problems(story.deployment) == ["plan 1 timed out: ranks 0, 1, 2, 3 did not answer in time"]


def test_a_plan_that_only_some_abort_is_aborted_and_says_who_was_silent(story: Story) -> None:
    story.joins()
    offer = story.offers(0)
    story.says(0, offer, ABORTED, 0, "offer deadline")
    story.waits(PLAN_TIMEOUT + 1)
    assert outcome_of(story) is Outcome.ABORTED
    assert problems(story.deployment) == [
        "plan 1 aborted: rank 0: offer deadline; ranks 1, 2, 3 did not answer in time"
    ]


def test_any_word_puts_the_deadline_off(story: Story) -> None:
    story.joins()
    offer = story.offers(0, 1)
    story.waits(PLAN_TIMEOUT - 1)
    story.commits(offer, 0)
    assert story.waits(PLAN_TIMEOUT - 1) == []


def test_a_commit_after_the_deadline_still_counts_for_what_is_served(story: Story) -> None:
    story.joins()
    offer = story.offers(0)
    story.waits(PLAN_TIMEOUT + 1)
    story.commits(offer, 0)
    assert outcome_of(story) is Outcome.TIMED_OUT
    assert version(story) == offer.milestones[0].version


def test_heartbeats_alone_prove_a_switch(story: Story) -> None:
    story.joins()
    offer = story.offers(0, 1)
    events = story.beats(0, *offer.milestones[1].version)
    assert [event.update.layer for event in events] == [0, 1]
    for rank in range(1, RANKS):
        story.beats(rank, *offer.milestones[1].version)
    assert outcome_of(story) is Outcome.DONE


def test_a_rank_that_comes_back_proves_a_switch(story: Story) -> None:
    story.joins()
    offer = story.offers(0)
    story.leaves(1)
    update = offer.milestones[0].update
    after = story.live.with_layer(0, update.phy2log_RS, update.log2phy_RE)
    assert [type(event) for event in story.joins(1, live=after)] == [LayerCommitted]
    assert version(story) == (1, after.digest)


def test_a_commit_that_is_not_the_plans_is_a_problem_and_changes_nothing(story: Story) -> None:
    story.joins()
    offer = story.offers(0)
    status = PlanStatus(plan_id=1, layer=0, state=COMMITTED, epoch=1, digest=7)
    story.deployment.plan_status(3, status, 0.0)
    assert story.news() == []
    assert version(story) == (0, story.live.digest)
    assert "rank 3 committed layer 0 as epoch 1 digest 0x7" in problems(story.deployment)[0]
    assert offer.milestones[0].version != (1, 7)


def test_a_word_about_an_unknown_plan_is_of_no_use(story: Story) -> None:
    story.joins()
    status = PlanStatus(plan_id=99, state=ABORTED)
    story.deployment.plan_status(0, status, 0.0)
    assert story.news() == []
    assert problems(story.deployment) == []


def test_a_group_formed_again_interrupts_the_plan_of_the_old(story: Story) -> None:
    story.joins()
    story.offers(0)
    story.leaves()
    ended, known = story.joins(group_id="second")
    assert isinstance(ended, PlanEnded)
    assert ended.plan.outcome is Outcome.INTERRUPTED
    assert isinstance(known, PlacementKnown)
    assert version(story) == (0, story.live.digest)


def test_what_a_refused_rank_proved_is_not_lost(story: Story) -> None:
    story.joins()
    offer = story.offers(0)
    story.leaves(1)
    other = live_of(first_placement().with_layer(1, first_placement().phy2log_LRS[1][::-1]))
    hello = hello_of(other, 1)
    hello.placement.epoch, hello.placement.digest = offer.milestones[0].version
    with pytest.raises(RefusedError, match="rank 1 holds other experts in layer 0"):
        story.deployment.hello(decode_hello(hello))
    assert [type(event) for event in story.news()] == [LayerCommitted]
    assert story.deployment.connected[0].rank == 0
    assert "rank 1 was turned away" in problems(story.deployment)[1]
