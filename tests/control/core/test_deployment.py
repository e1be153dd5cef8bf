"""In any order of events, a deployment knows its ranks' layout, and the ranks' reports determine a plan's outcome."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import eplb_service
from eplb_core.wire.agent import PlanState, PlanStatus, decode_hello
from eplb_service.control.core.deployment import LayerCommitted, StreamsOutdated
from eplb_service.control.core.errors import RejectedError
from eplb_service.control.core.health import problems
from eplb_service.control.core.plan_tracker import Outcome, PlanTracker
from tests.control.core.story import PLAN_TIMEOUT, Story
from tests.control.fake_group import BYTES_PER_EXPERT, RANKS, first_placement, hello_of, live_of

ACCEPTED = PlanState.ACCEPTED
COMMITTED = PlanState.COMMITTED
ABORTED = PlanState.ABORTED
REFUSED = PlanState.REFUSED
CALLED_OFF = PlanState.CALLED_OFF


@pytest.fixture
def story() -> Story:
    return Story()


def version(story: Story) -> tuple[int, int]:
    assert story.deployment.live is not None
    return story.deployment.live.epoch, story.deployment.live.digest


# Disagreement between the ranks and the service


def test_ranks_that_agree_on_a_different_epoch_are_asked_for_a_new_hello(story: Story) -> None:
    story.joins()
    for rank in range(RANKS - 1):
        assert story.heartbeat(rank, 5, 55) == []
    assert "waiting for ranks 0, 1, 2 to reach epoch 0" in problems(story.deployment)[0]
    assert isinstance(story.heartbeat(RANKS - 1, 5, 55)[0], StreamsOutdated)
    assert story.deployment.live is None


def test_planning_stops_while_a_rank_reports_an_error(story: Story) -> None:
    story.joins()
    story.reports_heat(0, 4)
    assert story.deployment.obstacle() is None
    story.heartbeat(1, *version(story), error="transfer thread died")
    assert story.deployment.obstacle() == "balancing is halted on rank 1"
    assert problems(story.deployment) == ["rank 1: transfer thread died"]


# When a decision is due


def test_a_decision_is_due_after_every_interval_except_during_a_pause_or_a_plan(story: Story) -> None:
    deployment = story.deployment
    due = []
    story.joins()
    for first_step, steps in ((0, 4), (4, 4), (8, 8)):
        story.reports_heat(first_step, steps)
        due.append(deployment.is_due(8))
        if due[-1]:
            deployment.begin_decision()
            assert not deployment.is_due(8)
    assert due == [False, True, True]
    story.reports_heat(16, 8)
    deployment.set_paused(True)
    assert not deployment.is_due(8)
    deployment.set_paused(False)
    offer = story.offers(0)
    assert not deployment.is_due(8)
    story.commits(offer, 0)
    assert deployment.is_due(8)


@pytest.mark.parametrize("steps", [1, 0], ids=["ranks run steps", "ranks are idle"])
def test_missing_heat_is_a_problem_only_while_the_ranks_run_steps(story: Story, steps: int) -> None:
    story.joins()
    story.reports_heat(0, 4)
    for second in range(60):
        story.heartbeat(0, 0, story.live.digest, step=10 + second * steps)
        story.waits(1)
    assert (
        problems(story.deployment)
        == ["no heat has been assembled for 59 s, although the ranks are running steps"] * steps
    )
    story.reports_heat(4, 4)
    story.waits(1)
    assert problems(story.deployment) == []


def outcome_of(story: Story) -> Outcome | None:
    assert story.deployment.ended_plan is not None
    return story.deployment.ended_plan.outcome


def outcome_or_none(story: Story) -> Outcome | None:
    return None if story.deployment.ended_plan is None else story.deployment.ended_plan.outcome


def test_a_plan_that_all_ranks_carry_out_is_done(story: Story) -> None:
    story.joins()
    offer = story.offers(2, 0)
    for rank in range(RANKS):
        assert story.reports(rank, offer, ACCEPTED, 2) == []
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


NO_ANSWER = "did not answer in time"
ALL = dict.fromkeys(range(RANKS), (ABORTED, "link"))
SOME = {rank: (ABORTED, reason) for rank, reason in enumerate("aba")}


@pytest.mark.parametrize(
    ("committed", "objections", "outcome", "why"),
    [
        (1, ALL, Outcome.ABORTED, "ranks 0, 1, 2, 3: link"),
        (0, ALL | {2: (REFUSED, "stale")}, Outcome.REFUSED, "rank 2: stale"),
        (0, {}, Outcome.TIMED_OUT, f"ranks 0, 1, 2, 3 {NO_ANSWER}"),
        (0, {0: (ABORTED, "")}, Outcome.ABORTED, f"rank 0: no reason given; ranks 1, 2, 3 {NO_ANSWER}"),
        (0, SOME, Outcome.ABORTED, f"rank 1: b; ranks 0, 2: a; rank 3 {NO_ANSWER}"),
    ],
)
def test_a_failed_plan_reports_its_reason_and_keeps_the_committed_layers(
    story: Story, committed: int, objections: dict[int, tuple[PlanState, str]], outcome: Outcome, why: str
) -> None:
    story.joins()
    offer = story.offers(0, 1, 2)
    story.commits(offer, *range(committed))
    for rank, (state, reason) in objections.items():
        story.reports(rank, offer, state, committed, reason)
    assert story.steps_for(PLAN_TIMEOUT - 1) == []
    story.steps_for(2)
    assert outcome_of(story) is outcome
    assert version(story) == (offer.versions[0] if committed else (0, story.live.digest))
    assert problems(story.deployment) == [f"plan 1 {outcome.value.replace('_', ' ')}: {why}"]
    story.deployment.begin_decision()
    assert problems(story.deployment) == []


CHANGED = "heat changed while the plan was under way"


def call_off_plan(story: Story) -> None:
    """Call off the plan, as the service does when a check confirms an alarm."""
    story.deployment.call_off(CHANGED, story.now)


@pytest.mark.parametrize("committed", [0, 1, 2])
def test_a_called_off_plan_ends_once_all_ranks_have_answered(story: Story, committed: int) -> None:
    story.joins()
    story.reports_heat(0, 4)
    offer = story.offers(0, 1, 2)
    call_off_plan(story)
    assert story.deployment.obstacle() == "plan 1 is being called off"
    # The ranks had already committed these layers when the call-off arrived.
    story.commits(offer, *range(committed))
    for rank in range(RANKS):
        assert outcome_or_none(story) is None
        story.reports(rank, offer, CALLED_OFF, committed, "called off by the service")
    assert outcome_of(story) is Outcome.CALLED_OFF
    ended = story.deployment.ended_plan
    assert ended is not None
    assert (ended.reason, ended.committed) == (CHANGED, committed)
    assert version(story) == (offer.versions[committed - 1] if committed else (0, story.live.digest))
    assert problems(story.deployment) == []
    assert story.deployment.obstacle() is None


def test_a_plan_is_done_if_the_call_off_arrives_too_late(story: Story) -> None:
    """A rank that has committed all layers replies that it holds no plan, and reports its current version."""
    story.joins()
    offer = story.offers(0)
    call_off_plan(story)
    epoch, digest = offer.versions[0]
    for rank in range(RANKS):
        story.deployment.plan_status(rank, PlanStatus(1, CALLED_OFF, epoch=epoch, digest=digest), story.now)
    assert outcome_of(story) is Outcome.DONE
    assert version(story) == offer.versions[0]


@pytest.mark.parametrize(
    ("exceptions", "outcome", "why"),
    [
        ({1: (ABORTED, "link")}, Outcome.ABORTED, "rank 1: link"),
        ({1: (REFUSED, "stale")}, Outcome.REFUSED, "rank 1: stale"),
        ({3: None}, Outcome.TIMED_OUT, f"rank 3 {NO_ANSWER}"),
    ],
)
def test_a_plan_that_fails_during_a_call_off_reports_the_failure(
    story: Story, exceptions: dict[int, tuple[PlanState, str] | None], outcome: Outcome, why: str
) -> None:
    story.joins()
    offer = story.offers(0, 1)
    call_off_plan(story)
    for rank in range(RANKS):
        answer = exceptions.get(rank, (CALLED_OFF, "called off by the service"))
        if answer is not None:
            story.reports(rank, offer, answer[0], 0, answer[1])
            # When the plan is called off a second time, the rank replies that it no longer holds it.
            story.reports(rank, offer, CALLED_OFF)
    story.steps_for(PLAN_TIMEOUT + 1)
    assert story.deployment.ended_plan is not None
    assert (outcome_of(story), story.deployment.ended_plan.reason) == (outcome, why)


def test_every_commit_extends_the_deadline_of_the_plan(story: Story) -> None:
    story.joins()
    offer = story.offers(0, 1)
    story.steps_for(PLAN_TIMEOUT - 1)
    story.commits(offer, 0)
    assert story.steps_for(PLAN_TIMEOUT - 1) == []


def test_a_plan_does_not_time_out_while_no_steps_run(story: Story) -> None:
    """Traffic stops for an hour during a plan. This is not a problem, and the plan continues afterwards."""
    story.joins()
    offer = story.offers(0, 1)
    story.steps_for(3)
    for _ in range(3600):
        assert story.waits(1) == []
        assert problems(story.deployment) == []
    assert story.steps_for(PLAN_TIMEOUT - 4) == []
    story.commits(offer, 0, 1)
    assert outcome_of(story) is Outcome.DONE


@pytest.mark.parametrize("late", [0, 6], ids=["no message", "a status while idle"])
def test_a_plan_that_waited_for_steps_times_out_once_they_resume(story: Story, late: int) -> None:
    story.joins()
    offer = story.offers(0, 1)
    story.waits(late)
    story.reports(0, offer, ACCEPTED, 0)
    story.waits(100)
    story.steps_for(PLAN_TIMEOUT - 1)
    assert story.deployment.plan is not None
    story.steps_for(3)
    assert outcome_of(story) is Outcome.TIMED_OUT


def test_a_plan_times_out_without_steps_if_a_rank_has_left(story: Story) -> None:
    story.joins()
    story.offers(0, 1)
    story.leaves(3)
    story.waits(PLAN_TIMEOUT + 1)
    assert outcome_of(story) is Outcome.TIMED_OUT


def test_heartbeats_without_statuses_are_enough_to_commit_layers(story: Story) -> None:
    story.joins()
    offer = story.offers(0, 1)
    assert story.heartbeat(0, 7, offer.versions[1][1]) == [], (
        "the plan's digest at a different epoch commits nothing"
    )
    events = story.heartbeat(0, *offer.versions[1])
    assert [event.update.layer for event in events] == [0, 1]
    for rank in range(1, RANKS):
        story.heartbeat(rank, *offer.versions[1])
    assert outcome_of(story) is Outcome.DONE


def test_a_layer_committed_under_a_different_epoch_is_ignored(story: Story) -> None:
    """The placement is correct, but heat would be read under the wrong epoch."""
    story.joins()
    ((epoch, digest),) = story.offers(0).versions
    for rank in range(RANKS):
        status = PlanStatus(plan_id=1, layer=0, state=COMMITTED, epoch=epoch + 1, digest=digest)
        story.deployment.plan_status(rank, status, 0.0)
    assert version(story) == (0, story.live.digest)


def test_a_late_commit_of_an_aborted_plan_does_not_overwrite_the_next_plan(story: Story) -> None:
    story.joins()
    aborted = story.offers(0)
    for rank in range(RANKS):
        story.reports(rank, aborted, ABORTED)
    second = story.offers(1, 2, plan_id=2)
    story.commits(second, 1)
    story.reports(0, aborted, COMMITTED)
    assert version(story) == second.versions[0]


def test_a_status_for_an_unknown_plan_or_layer_changes_nothing(story: Story) -> None:
    story.joins()
    offer = story.offers(0)
    story.deployment.plan_status(0, PlanStatus(plan_id=99, state=ABORTED), 0.0)
    assert problems(story.deployment) == []
    story.deployment.plan_status(3, PlanStatus(plan_id=1, layer=0, state=COMMITTED, epoch=1, digest=7), 0.0)
    story.deployment.plan_status(3, PlanStatus(plan_id=1, layer=2, state=COMMITTED, epoch=1, digest=7), 0.0)
    assert story.new_events() == []
    assert version(story) == (0, story.live.digest)
    foreign, unknown = problems(story.deployment)
    assert "rank 3 committed layer 0 as epoch 1 (digest 0x7)" in foreign
    assert unknown == "rank 3 committed layer 2, which is not in its plan"
    assert offer.versions[0] != (1, 7)


def test_a_rejected_hello_can_still_prove_a_committed_layer(story: Story) -> None:
    story.joins()
    offer = story.offers(0)
    story.leaves(1)
    conflicting = live_of(first_placement().with_layers([(1, first_placement().phy2log_LRS[1][::-1])]))
    hello = hello_of(conflicting, 1)
    hello.placement.epoch, hello.placement.digest = offer.versions[0]
    with pytest.raises(RejectedError, match="rank 1 holds different experts in layer 0"):
        story.deployment.hello(decode_hello(hello))
    assert [type(event) for event in story.new_events()] == [LayerCommitted]
    assert story.deployment.connected[0].rank == 0
    assert "rank 1 was rejected" in problems(story.deployment)[1]


@pytest.mark.parametrize("end", ["aborted", "timed out"])
def test_an_ended_plan_still_commits_layers_that_ranks_report_late(story: Story, end: str) -> None:
    """A rank's last status may arrive after other ranks objected, or after the plan timed out."""
    story.joins()
    offer = story.offers(0, 1)
    if end == "aborted":
        for rank in range(RANKS):
            story.reports(rank, offer, ABORTED)
    else:
        story.steps_for(1)
        story.leaves(3)
        story.waits(PLAN_TIMEOUT + 1)
    ended = story.deployment.ended_plan
    assert (story.deployment.plan, ended is not None) == (None, True)
    (event,) = story.reports(0, offer, COMMITTED, 0)
    assert isinstance(event, LayerCommitted)
    assert version(story) == offer.versions[0]
    assert story.deployment.totals.layers_switched == 1
    # The other ranks' reports for the same layer do not change anything else.
    assert story.reports(1, offer, COMMITTED, 0) == []
    assert ended is not None
    assert story.deployment.ended_plan is not None
    assert story.deployment.ended_plan.outcome is ended.outcome


def test_an_outdated_service_makes_no_plan_until_it_leads(story: Story) -> None:
    deployment = story.deployment
    deployment.lead_with(5)
    for rank in range(RANKS):
        hello = decode_hello(hello_of(story.live, rank, highest_term=7 if rank == 2 else 3))
        deployment.hello(hello)
    story.reports_heat(0, 8)
    assert deployment.outdated is not None
    assert deployment.obstacle() == deployment.obstacle(needs_heat=False) == deployment.outdated
    assert not deployment.is_due(8)
    assert not deployment.may_begin
    assert "stop this service, or make it lead: `eplb lead decode`" in problems(deployment)[0]
    deployment.lead_with(8)
    assert deployment.outdated is None
    assert deployment.obstacle() is None
    assert deployment.is_due(8)


def test_a_second_model_with_the_same_deployment_name_is_a_problem_until_it_stops(story: Story) -> None:
    story.joins()
    story.waits(1)
    assert problems(story.deployment) == []
    for group_id in ("another", "first"):
        with pytest.raises(RejectedError):
            story.joins(1, group_id=group_id)
        (problem,) = problems(story.deployment)
        assert problem.startswith(
            "rank 1 was rejected: rank 1 is already connected; give each agent its own rank, "
        )
        assert "each model instance its own deployment" in problem
    assert version(story) == (0, story.live.digest)
    with pytest.raises(RejectedError):
        story.joins(0, group_id="another")
    assert len(problems(story.deployment)) == 2
    story.waits(1)
    story.waits(120)
    assert problems(story.deployment) == []


def test_a_rejection_is_no_longer_reported_once_the_rank_has_joined(
    story: Story,
) -> None:
    story.joins()
    with pytest.raises(RejectedError):
        story.joins(1, group_id="again")
    story.leaves()
    story.joins(group_id="again")
    assert problems(story.deployment) == []


def test_only_the_deployment_itself_assigns_its_fields() -> None:
    assignments = [
        f"{path.name}:{target.lineno}: {ast.unparse(target)}"
        for path in Path(eplb_service.__file__).parent.rglob("*.py")
        for target in ast.walk(ast.parse(path.read_text()))
        if isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store)
        if isinstance(target.value, ast.Name) and target.value.id == "deployment"
    ]
    assert assignments == []
