"""A rank's machine names why it refuses or drops a plan; what machines do together the explorer walks through."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eplb_service.wire.agent import PlanState
from tests.swap.placed import INSTALLED, LINEAR
from tests.swap.tags import FIRST, plan_from
from worker_agent.swap.machine import Ballot, Progress, SwitchState, VoteOutcome, VoteResult

PLAN = plan_from(FIRST, 1, 2, 0)
NEW = SwitchState(FIRST, offer_deadline_steps=8)
HELD, _ = NEW.offer(PLAN, 0, FIRST.digest)


@pytest.mark.parametrize(
    ("machine", "plan", "reason"),
    [
        (NEW.with_term(7), PLAN, "leader term 2 is older than 7"),
        (NEW.with_pause("the host sleeps"), PLAN, "paused on this rank: the host sleeps"),
        (replace(NEW, halted="no memory"), PLAN, "this rank serves no more: no memory"),
        (NEW.lose_votes("a link broke")[0], PLAN, "do not vote at present: a link broke"),
        (HELD, plan_from(FIRST, 2, 2, 1), "plan 1 is still under way"),
        (replace(NEW, transfer_runs=True), PLAN, "still running out"),
        (NEW, plan_from(FIRST.with_layer(0, 1, 1), 2, 2, 0), "from epoch 1, this rank serves epoch 0"),
    ],
)
def test_a_refusal_names_its_reason(machine: SwitchState, plan: object, reason: str) -> None:
    _, (said,) = machine.offer(plan, 0, FIRST.digest)
    assert said.state is PlanState.REFUSED
    assert reason in said.reason


def test_a_plan_whose_sources_were_checked_for_another_placement_is_refused() -> None:
    """Its epoch and digest fit, yet its moves might start from slots that hold other experts by now."""
    after, (said,) = NEW.offer(PLAN, 0, FIRST.digest + 1)
    assert after.plan is None
    assert said.state is PlanState.REFUSED
    assert said.reason == "a layer was switched between this plan's check and its offer"


@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        (HELD, "another rank voted to abort"),
        (HELD.with_pause("the host sleeps"), "the host sleeps"),
        (HELD.at_step(9), "not all ranks held the plan within 8 steps"),
    ],
)
def test_a_plan_is_dropped_for_the_first_reason_that_the_rank_had(machine: SwitchState, reason: str) -> None:
    assert machine.ballot.abort == (machine is not HELD)
    later = machine.with_pause("a later reason") if machine.ballot.abort else machine
    after, (said,) = later.decide(VoteOutcome.unanimous(PLAN.digest).with_abort())
    assert after.progress == Progress.IDLE
    assert (said.state, said.reason) == (PlanState.ABORTED, reason)


def test_ranks_that_differ_by_tables_alone_serve_different_placements() -> None:
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
)


@given(st.lists(BALLOTS, min_size=1, max_size=5))
def test_an_outcome_says_what_the_ballots_said(ballots: list[Ballot]) -> None:
    outcome = VoteOutcome.decode([min(column) for column in zip(*(b.encode() for b in ballots), strict=True)])
    assert outcome.slowest == min(ballot.progress for ballot in ballots)
    assert outcome.abort == any(ballot.abort for ballot in ballots)
    assert outcome.installed_agree == (len({ballot.installed for ballot in ballots}) == 1)
    assert outcome.plans <= {ballot.plan for ballot in ballots}
    assert (outcome.forward_low == outcome.forward_high) == (len({ballot.forward for ballot in ballots}) == 1)
    if outcome.result is VoteResult.COMMIT:
        assert len({ballot.forward for ballot in ballots}) == 1
        assert len({ballot.plan for ballot in ballots}) == 1
        assert all(ballot.progress == Progress.READY and not ballot.abort for ballot in ballots)


def test_a_ballot_of_the_wrong_width_is_refused() -> None:
    with pytest.raises(ValueError, match="a ballot has 9 integers, got 2"):
        VoteOutcome.decode([1, 2])
