"""Whatever order things happen in, a deployment ends up knowing what its ranks serve, and says what is wrong."""

from __future__ import annotations

import pytest

from eplb_service.control.core.errors import RefusedError
from eplb_service.control.core.events import PlacementKnown, StreamsOutdated
from eplb_service.control.core.health import problems
from eplb_service.placement import default_log2phy
from eplb_service.wire.status import PlanState, PlanStatus
from tests.control.core.story import PLAN_TIMEOUT, Story
from tests.control.fake_group import EXPERTS, RANKS

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
    moved_RS = story.live.placement.phy2log_LRS[0][::-1]
    moved = story.live.with_layer(0, moved_RS, default_log2phy(moved_RS, EXPERTS))
    story.joins(live=moved)
    assert version(story) == (1, moved.digest)


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
        status = PlanStatus(plan_id=77, layer=0, state=COMMITTED, epoch=1, digest=11)
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


def test_heat_of_a_switch_is_understood_once_a_rank_has_reported_it(story: Story) -> None:
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
