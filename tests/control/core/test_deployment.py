"""Whatever order things happen in, a deployment knows what its ranks serve, and a plan ends as they say it does."""

from __future__ import annotations

import pytest

from eplb_service.control.core.deployment import LayerCommitted, StreamsOutdated
from eplb_service.control.core.errors import RefusedError
from eplb_service.control.core.health import problems
from eplb_service.control.core.live_placement import LivePlacement
from eplb_service.control.core.plan_tracker import Outcome, PlanTracker
from eplb_service.wire.agent import PlanState, PlanStatus, decode_hello
from tests.control.core.story import PLAN_TIMEOUT, Story
from tests.control.fake_group import BYTES_PER_EXPERT, RANKS, first_placement, hello_of, live_of

ACCEPTED = PlanState.ACCEPTED
ABORTED = PlanState.ABORTED
REFUSED = PlanState.REFUSED
COMMITTED = PlanState.COMMITTED


@pytest.fixture
def story() -> Story:
    return Story()


def version(story: Story) -> tuple[int, int]:
    assert story.deployment.live is not None
    return story.deployment.live.epoch, story.deployment.live.digest


# Ranks come and go


def test_only_all_ranks_together_make_a_placement(story: Story) -> None:
    assert story.joins(0, 1, 2) == []
    assert story.deployment.obstacle() == "not all ranks have reported what they serve"
    assert story.joins(3) == [story.deployment.live]
    assert version(story) == (0, story.live.digest)


def test_a_new_group_waits_until_the_old_one_is_gone(story: Story) -> None:
    story.joins()
    story.leaves(0, 1, 2)
    with pytest.raises(RefusedError, match="another forming of the group than rank 3"):
        story.joins(0, group_id="second")
    story.leaves(3)
    assert [type(event) for event in story.joins(group_id="second")] == [LivePlacement]


# Ranks and service disagree


def test_ranks_that_agree_against_the_service_are_asked_to_introduce_themselves(story: Story) -> None:
    story.joins()
    for rank in range(RANKS - 1):
        assert story.beats(rank, 5, 55) == []
    assert "ranks 0, 1, 2 not at epoch 0" in problems(story.deployment)[0]
    assert isinstance(story.beats(RANKS - 1, 5, 55)[0], StreamsOutdated)
    assert story.deployment.live is None


def test_a_rank_that_no_longer_takes_part_stops_planning(story: Story) -> None:
    story.joins()
    story.counts(0, 4)
    assert story.deployment.obstacle() is None
    story.beats(1, *version(story), error="transfer thread died")
    assert story.deployment.obstacle() == "rank 1 no longer takes part"
    assert problems(story.deployment) == ["rank 1: transfer thread died"]


# When to decide


def test_a_decision_is_due_after_every_interval(story: Story) -> None:
    story.joins()
    story.counts(0, 4)
    assert not story.deployment.is_due(8)
    story.counts(4, 4)
    assert story.deployment.is_due(8)
    story.deployment.deciding()
    assert not story.deployment.is_due(8)
    story.counts(8, 8)
    assert story.deployment.is_due(8)


def test_nothing_is_due_while_paused_or_while_a_plan_is_under_way(story: Story) -> None:
    story.joins()
    story.counts(0, 8)
    story.deployment.paused = True
    assert not story.deployment.is_due(8)
    story.deployment.paused = False
    offer = story.offers(0)
    assert not story.deployment.is_due(8)
    story.commits(offer, 0)
    assert story.deployment.is_due(8)


def test_heat_that_stops_while_the_ranks_make_steps_is_a_problem(story: Story) -> None:
    story.joins()
    story.counts(0, 4)
    for second in range(60):
        story.beats(0, 0, story.live.digest, step=10 + second)
        story.waits(1)
    (problem,) = problems(story.deployment)
    assert problem.startswith("no step's heat has been put together for 5")
    story.counts(4, 4)
    story.waits(1)
    assert problems(story.deployment) == []


def test_a_model_at_rest_is_no_problem(story: Story) -> None:
    story.joins()
    story.counts(0, 4)
    for _ in range(60):
        story.beats(0, 0, story.live.digest)
        story.waits(1)
    assert problems(story.deployment) == []


def outcome_of(story: Story) -> Outcome | None:
    assert story.deployment.ended_plan is not None
    return story.deployment.ended_plan.outcome


def test_a_plan_that_all_ranks_carry_out_is_done(story: Story) -> None:
    story.joins()
    offer = story.offers(2, 0)
    for rank in range(RANKS):
        assert story.says(rank, offer, ACCEPTED, 2) == []
    events = story.commits(offer, 2, 0)
    assert [type(event) for event in events] == [LayerCommitted, LayerCommitted, PlanTracker]
    assert [event.update.layer for event in events[:2]] == [2, 0]
    assert outcome_of(story) is Outcome.DONE
    assert version(story) == offer.versions[-1]
    assert story.deployment.live.layer_epochs == (2, 0, 1)
    assert story.deployment.planned_par == {2: 1.1, 0: 1.1}
    totals = story.deployment.totals
    assert (totals.layers_switched, totals.experts_moved, totals.bytes_moved) == (2, 4, 4 * BYTES_PER_EXPERT)
    assert problems(story.deployment) == []


def test_an_abort_keeps_the_layers_before_it(story: Story) -> None:
    story.joins()
    offer = story.offers(0, 1, 2)
    story.commits(offer, 0)
    for rank in range(RANKS):
        story.says(rank, offer, ABORTED, 1, "transfer timed out")
    assert outcome_of(story) is Outcome.ABORTED
    assert version(story) == offer.versions[0]
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
    assert [type(event) for event in story.waits(2)] == [PlanTracker]
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


def test_heartbeats_alone_prove_a_switch(story: Story) -> None:
    story.joins()
    offer = story.offers(0, 1)
    events = story.beats(0, *offer.versions[1])
    assert [event.update.layer for event in events] == [0, 1]
    for rank in range(1, RANKS):
        story.beats(rank, *offer.versions[1])
    assert outcome_of(story) is Outcome.DONE


def test_a_commit_that_is_not_the_plans_is_a_problem_and_changes_nothing(story: Story) -> None:
    story.joins()
    offer = story.offers(0)
    status = PlanStatus(plan_id=1, layer=0, state=COMMITTED, epoch=1, digest=7)
    story.deployment.plan_status(3, status, 0.0)
    assert story.news() == []
    assert version(story) == (0, story.live.digest)
    assert "rank 3 committed layer 0 as epoch 1 digest 0x7" in problems(story.deployment)[0]
    assert offer.versions[0] != (1, 7)


def test_a_word_about_an_unknown_plan_is_of_no_use(story: Story) -> None:
    story.joins()
    status = PlanStatus(plan_id=99, state=ABORTED)
    story.deployment.plan_status(0, status, 0.0)
    assert story.news() == []
    assert problems(story.deployment) == []


def test_what_a_refused_rank_proved_is_not_lost(story: Story) -> None:
    story.joins()
    offer = story.offers(0)
    story.leaves(1)
    other = live_of(first_placement().with_layers([(1, first_placement().phy2log_LRS[1][::-1])]))
    hello = hello_of(other, 1)
    hello.placement.epoch, hello.placement.digest = offer.versions[0]
    with pytest.raises(RefusedError, match="rank 1 holds other experts in layer 0"):
        story.deployment.hello(decode_hello(hello))
    assert [type(event) for event in story.news()] == [LayerCommitted]
    assert story.deployment.connected[0].rank == 0
    assert "rank 1 was turned away" in problems(story.deployment)[1]
