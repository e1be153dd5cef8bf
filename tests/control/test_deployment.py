"""Whatever order things happen in, a deployment ends up knowing what its ranks serve, and says what is wrong."""

from __future__ import annotations

import pytest

from eplb_service.control.events import LayerCommitted, PlacementKnown, PlanEnded, StreamsOutdated
from eplb_service.control.hello import read_hello
from eplb_service.control.plan_life import Outcome
from eplb_service.control.readings import problems
from eplb_service.control.refusal import RefusedError
from eplb_service.wire.generated import agent_pb2
from tests.control.fake_group import BYTES_PER_EXPERT, RANKS, first_placement, hello_of, live_of
from tests.control.story import PLAN_TIMEOUT, Story

ACCEPTED = agent_pb2.PLAN_STATE_ACCEPTED
ABORTED = agent_pb2.PLAN_STATE_ABORTED
REFUSED = agent_pb2.PLAN_STATE_REFUSED
COMMITTED = agent_pb2.PLAN_STATE_COMMITTED


@pytest.fixture
def story() -> Story:
    return Story()


def outcome_of(story: Story) -> Outcome | None:
    assert story.deployment.ended_plan is not None
    return story.deployment.ended_plan.outcome


def version(story: Story) -> tuple[int, int]:
    assert story.deployment.live is not None
    return story.deployment.live.epoch, story.deployment.live.digest


# Ranks come and go


def test_only_all_ranks_together_make_a_placement(story: Story) -> None:
    assert story.joins(0, 1, 2) == []
    assert story.deployment.obstacle() == "not all ranks have said what they serve"
    assert story.joins(3) == [PlacementKnown(story.deployment.live)]
    assert version(story) == (0, story.live.digest)


def test_a_rank_that_left_before_the_others_came_has_to_come_again(story: Story) -> None:
    story.joins(0)
    story.leaves(0)
    assert story.joins(1, 2, 3) == []
    assert len(story.joins(0)) == 1


def test_a_rank_comes_back_to_what_it_left(story: Story) -> None:
    story.joins()
    story.leaves(2)
    assert story.deployment.obstacle() == "rank 2 not connected"
    assert story.joins(2) == []
    assert story.deployment.obstacle() == "no heat has been gathered yet"


def test_a_new_group_waits_until_the_old_one_is_gone(story: Story) -> None:
    story.joins()
    story.leaves(0, 1, 2)
    with pytest.raises(RefusedError, match="another forming of the group than rank 3"):
        story.joins(0, group_id="second")
    story.leaves(3)
    assert [type(event) for event in story.joins(group_id="second")] == [PlacementKnown]


def test_ranks_that_moved_on_unheard_are_believed(story: Story) -> None:
    story.joins()
    story.leaves()
    moved = story.live.with_layer(0, story.live.placement.phy2log_LRS[0][::-1], story.live.log2phy_RLE[:, 0])
    moved = type(moved).of(moved.placement, moved.placement.default_log2phy(), 1, moved.layer_epochs)
    story.joins(live=moved)
    assert version(story) == (1, moved.digest)


# A plan's life


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
    status = agent_pb2.PlanStatus(plan_id=1, layer=0, state=COMMITTED, epoch=1, digest=7)
    story.deployment.plan_status(3, status, 0.0)
    assert story.news() == []
    assert version(story) == (0, story.live.digest)
    assert "rank 3 committed layer 0 as epoch 1 digest 0x7" in problems(story.deployment)[0]
    assert offer.milestones[0].version != (1, 7)


def test_a_word_about_an_unknown_plan_is_of_no_use(story: Story) -> None:
    story.joins()
    status = agent_pb2.PlanStatus(plan_id=99, state=ABORTED)
    story.deployment.plan_status(0, status, 0.0)
    assert story.news() == []
    assert problems(story.deployment) == []


def test_a_group_formed_anew_interrupts_the_plan_of_the_old(story: Story) -> None:
    story.joins()
    story.offers(0)
    story.leaves()
    ended, known = story.joins(group_id="second")
    assert isinstance(ended, PlanEnded)
    assert ended.life.outcome is Outcome.INTERRUPTED
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
        story.deployment.hello(read_hello(hello))
    assert [type(event) for event in story.news()] == [LayerCommitted]
    assert story.deployment.connected[0].rank == 0
    assert "rank 1 was turned away" in problems(story.deployment)[1]


# Ranks and service disagree


def test_ranks_that_agree_against_the_service_are_asked_to_introduce_themselves(story: Story) -> None:
    story.joins()
    for rank in range(RANKS - 1):
        assert story.beats(rank, 5, 55) == []
    assert "ranks 0, 1, 2 not at epoch 0" in problems(story.deployment)[0]
    assert isinstance(story.beats(RANKS - 1, 5, 55)[0], StreamsOutdated)
    assert story.deployment.live is None


def test_a_rank_that_switched_while_others_were_still_to_come_has_to_come_again(story: Story) -> None:
    story.joins(0, 1)
    (event,) = story.beats(0, 1, 11)
    assert isinstance(event, StreamsOutdated)
    story.leaves(0, 1)
    after = story.live.with_layer(0, story.live.placement.phy2log_LRS[0], story.live.log2phy_RLE[:, 0])
    assert story.joins(live=after) == [PlacementKnown(story.deployment.live)]
    assert version(story) == (1, after.digest)


def test_ranks_that_are_all_there_and_were_not_all_heard_are_asked_again(story: Story) -> None:
    """A stream that was asked to end may go on: then nobody is still to come, and nothing would ever change."""
    story.joins()
    for rank in range(RANKS):
        story.beats(rank, 5, 55)
    story.leaves(0, 1, 2)
    after = story.live.with_layer(0, story.live.placement.phy2log_LRS[0], story.live.log2phy_RLE[:, 0])
    assert story.joins(0, 1, 2, live=after) == []
    (event,) = story.waits(1)
    assert isinstance(event, StreamsOutdated)
    assert "all ranks are here" in event.reason


def test_the_end_of_a_plan_of_an_earlier_service_is_believed(story: Story) -> None:
    story.joins()
    for rank in range(RANKS):
        status = agent_pb2.PlanStatus(plan_id=77, layer=0, state=COMMITTED, epoch=1, digest=11)
        story.deployment.plan_status(rank, status, 0.0)
    assert [type(event) for event in story.news()] == [StreamsOutdated]


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


def test_heat_of_a_switch_is_understood_once_a_rank_has_told_of_it(story: Story) -> None:
    story.joins()
    offer = story.offers(0)
    story.counts(0, 4, epochs=(1, 0, 0))
    assert story.deployment.totals.steps_received == 0
    story.says(2, offer, COMMITTED, 0)
    story.counts(4, 4, epochs=(1, 0, 0))
    assert story.deployment.totals.steps_received == 4


def test_heat_is_read_under_the_plan_that_was_switched_not_under_the_one_that_came_after_it(
    story: Story,
) -> None:
    """The first is given up for lost, the second would lead to the same epoch; the ranks switch the first after all."""
    story.joins()
    late = story.offers(0)
    story.waits(PLAN_TIMEOUT + 1)
    story.offers(1, plan_id=2)
    story.says(0, late, COMMITTED, 0)
    assert story.deployment.heat is not None
    story.counts(0, 4, epochs=(0, 1, 0))
    assert story.deployment.totals.steps_received == 0
    story.counts(4, 4, epochs=(1, 0, 0))
    assert story.deployment.totals.steps_received == 4


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
