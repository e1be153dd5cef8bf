"""A rank's state machine gives the reason when it rejects or drops a plan. The explorer tests several ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eplb_core.wire.agent import PlanState
from tests.swap.placed import INSTALLED, LINEAR
from tests.swap.tags import FIRST, plan_from
from worker_agent.swap.machine import Ballot, Progress, SwitchState, VoteOutcome, VoteResult

PLAN = plan_from(FIRST, 1, 2, 0)
NEW = SwitchState(FIRST, offer_deadline_steps=8)
HELD, _ = NEW.offer(PLAN, 0, FIRST.digest)


@pytest.mark.parametrize(
    ("machine", "plan", "reason"),
    [
        (NEW.with_term(7), PLAN, "leader term 2 is lower than 7"),
        (NEW.with_pause("the host sleeps"), PLAN, "paused on this rank: the host sleeps"),
        (replace(NEW, halted="no memory"), PLAN, "this rank has halted: no memory"),
        (NEW.lose_votes("a link broke")[0], PLAN, "the ranks are not voting: a link broke"),
        (HELD, plan_from(FIRST, 2, 2, 1), "plan 1 is still in progress"),
        (replace(NEW, transfer_runs=True), PLAN, "still running"),
        (NEW, plan_from(FIRST.with_layer(0, 1, 1), 2, 2, 0), "from epoch 1, but this rank is at epoch 0"),
        (
            NEW,
            PLAN._replace(base_digest=5),
            "starts from the placement with digest 0x5 in epoch 0, but this rank's placement has digest",
        ),
    ],
)
def test_a_rejection_states_its_reason(machine: SwitchState, plan: object, reason: str) -> None:
    _, (status,) = machine.offer(plan, 0, FIRST.digest)
    assert status.state is PlanState.REFUSED
    assert reason in status.reason


def test_a_plan_checked_against_a_stale_placement_is_rejected() -> None:
    """The epoch and digest match, but the moves may start from slots whose experts have changed."""
    after, (status,) = NEW.offer(PLAN, 0, FIRST.digest + 1)
    assert after.plan is None
    assert status.state is PlanState.REFUSED
    assert status.reason == "a layer was switched between this plan's check and its offer"


@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        (HELD, "another rank voted to abort"),
        (HELD.with_pause("the host sleeps"), "the host sleeps"),
        (HELD.at_step(9), "not all ranks received the plan within 8 steps"),
    ],
)
def test_the_status_of_a_dropped_plan_states_the_first_reason(machine: SwitchState, reason: str) -> None:
    assert machine.ballot.abort == (machine is not HELD)
    later = machine.with_pause("a later reason") if machine.ballot.abort else machine
    after, (status,) = later.decide(VoteOutcome.unanimous(PLAN.digest).with_abort())
    assert after.progress == Progress.IDLE
    assert (status.state, status.reason) == (PlanState.ABORTED, reason)


def outcome_of(*machines: SwitchState) -> VoteOutcome:
    """Return the outcome of a vote among these state machines."""
    return VoteOutcome.decode(
        [min(column) for column in zip(*(m.ballot.encode() for m in machines), strict=True)]
    )


TRANSFERRING, _ = HELD.decide(outcome_of(HELD))
READY = TRANSFERRING.with_transfer_ended(1)


@pytest.mark.parametrize("machine", [HELD, READY], ids=["offered", "ready"])
def test_a_called_off_plan_ends_at_the_next_vote_and_keeps_its_lane(machine: SwitchState) -> None:
    called, nothing = machine.call_off(PLAN.plan_id)
    assert nothing == ()
    # The other rank learns of the call-off only from the vote.
    for rank in (called, machine):
        after, (status,) = rank.decide(outcome_of(called, machine))
        assert after == replace(NEW, highest_term=2, generation=machine.generation)
        assert (status.plan_id, status.state, status.layer) == (1, PlanState.CALLED_OFF, 0)
        assert status.reason == "called off by the service"


def test_a_plan_that_only_some_ranks_hold_is_called_off_at_the_next_vote() -> None:
    called, _ = HELD.call_off(PLAN.plan_id)
    assert outcome_of(called, NEW).result is VoteResult.CALL_OFF


def test_a_called_off_plan_ends_only_after_its_transfer() -> None:
    called, _ = TRANSFERRING.call_off(PLAN.plan_id)
    assert called.decide(outcome_of(called, READY)) == (called, ())
    ready = called.with_transfer_ended(1)
    after, (status,) = ready.decide(outcome_of(ready, READY))
    assert (after.plan, after.lane, status.state) == (None, 0, PlanState.CALLED_OFF)


def test_a_layer_that_was_ready_in_a_vote_before_the_call_off_is_committed() -> None:
    """The plan ends at the next layer, after all ranks have started its transfer."""
    plan = plan_from(FIRST, 1, 2, 0, 1)
    held, _ = NEW.offer(plan, 0, FIRST.digest)
    started, _ = held.decide(outcome_of(held))
    ready = started.with_transfer_ended(1)
    voted = outcome_of(ready)
    called, _ = ready.call_off(1)
    after, (commit, _) = called.decide(voted)
    assert ([layer.layer for layer in commit.layers], after.index, after.called_off) == ([0], 1, True)
    staged = after.with_transfer_ended(2)
    ended, (status,) = staged.decide(outcome_of(staged))
    assert (ended.installed.tags, status.layer, status.state) == ((1, 0, 0), 1, PlanState.CALLED_OFF)


def test_one_vote_commits_all_layers_that_fit_in_staging() -> None:
    plan = plan_from(FIRST, 1, 2, 2, 0, 1)
    held, _ = SwitchState(FIRST, 8, staging_rows=2).offer(plan, 0, FIRST.digest)
    started, (start,) = held.decide(outcome_of(held))
    assert [layer.layer for layer in start.layers] == [2, 0]
    ready = started.with_transfer_ended(start.generation)
    after, (commit, start) = ready.decide(outcome_of(ready))
    assert [layer.layer for layer in commit.layers] == [2, 0]
    assert [installed.tags for installed in commit.installed] == [(0, 0, 1), (1, 0, 1)]
    assert [layer.layer for layer in start.layers] == [1]
    assert (after.installed.epoch, after.index) == (2, 2)
    ended, (commit,) = after.with_transfer_ended(2).decide(outcome_of(after.with_transfer_ended(2)))
    assert (ended.installed.tags, ended.plan, commit.before.epoch) == ((1, 1, 1), None, 2)


@pytest.mark.parametrize("machine", [NEW, HELD, READY], ids=["idle", "offered", "ready"])
def test_a_call_off_of_an_unknown_plan_changes_nothing(machine: SwitchState) -> None:
    after, (status,) = machine.call_off(99)
    assert after == machine
    assert (status.plan_id, status.state) == (99, PlanState.CALLED_OFF)


def test_an_abort_takes_precedence_over_a_call_off() -> None:
    failed = TRANSFERRING.with_transfer_ended(1, "link")
    called, _ = TRANSFERRING.call_off(PLAN.plan_id)
    after, (status,) = failed.decide(outcome_of(failed, called))
    assert (status.state, status.reason, after.lane) == (PlanState.ABORTED, "link", 1)


def test_layouts_that_differ_only_in_tables_have_different_ballots() -> None:
    changed = INSTALLED.with_layer(0, LINEAR.phy2log_LRS[0], INSTALLED.log2phy_LE[0])
    assert changed.digest == INSTALLED.digest
    assert SwitchState(changed, 8).ballot.installed != SwitchState(INSTALLED, 8).ballot.installed


BALLOTS = st.builds(
    Ballot,
    progress=st.sampled_from(Progress),
    plan=st.sampled_from([0, 5, 2**62]),
    installed=st.sampled_from([1, 2**62]),
    abort=st.booleans(),
    forward=st.sampled_from([0, 8, 2**62]),
    called_off=st.booleans(),
)


@given(st.lists(BALLOTS, min_size=1, max_size=5))
def test_an_outcome_summarises_its_ballots(ballots: list[Ballot]) -> None:
    outcome = VoteOutcome.decode([min(column) for column in zip(*(b.encode() for b in ballots), strict=True)])
    assert outcome.slowest == min(ballot.progress for ballot in ballots)
    assert outcome.abort == any(ballot.abort for ballot in ballots)
    assert outcome.called_off == any(ballot.called_off for ballot in ballots)
    assert outcome.installed_agree == (len({ballot.installed for ballot in ballots}) == 1)
    assert outcome.plans <= {ballot.plan for ballot in ballots}
    assert (outcome.forward_low == outcome.forward_high) == (len({ballot.forward for ballot in ballots}) == 1)
    if outcome.result is VoteResult.COMMIT:
        assert len({ballot.forward for ballot in ballots}) == 1
        assert len({ballot.plan for ballot in ballots}) == 1
        assert all(ballot.commits for ballot in ballots)


def test_a_ballot_of_the_wrong_width_is_rejected() -> None:
    with pytest.raises(ValueError, match="expected a ballot of 10 integers, got 2"):
        VoteOutcome.decode([1, 2])
