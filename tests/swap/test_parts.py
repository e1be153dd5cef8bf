"""The parts around the switch machine each keep their own promise."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.agent import live
from worker_agent.outbox import Outbox
from worker_agent.swap.ballot import Ballot, Decision, Outcome, Progress
from worker_agent.swap.budget import ByteBudget
from worker_agent.swap.schedule import rounds
from worker_agent.swap.staging import Staging


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 5)).filter(lambda pair: pair[0] != pair[1]), max_size=40
    )
)
def test_rounds_hold_every_move_once_and_never_double_a_rank(pairs: list[tuple[int, int]]) -> None:
    moves_M5 = np.array([(source, 0, target, 0, 0) for source, target in pairs], dtype=np.int32).reshape(
        -1, 5
    )
    planned = rounds(moves_M5)
    assert sorted(move for batch in planned for move in batch) == list(range(len(pairs)))
    for batch in planned:
        assert len({pairs[move][0] for move in batch}) == len(batch)
        assert len({pairs[move][1] for move in batch}) == len(batch)


BALLOTS = st.builds(
    Ballot,
    progress=st.sampled_from(Progress),
    plan=st.sampled_from([0, 5, 2**62]),
    installed=st.sampled_from([1, 2**62]),
    abort=st.booleans(),
)


@given(st.lists(BALLOTS, min_size=1, max_size=5))
def test_an_outcome_says_what_the_ballots_said(ballots: list[Ballot]) -> None:
    outcome = Outcome.decode([min(column) for column in zip(*(b.encode() for b in ballots), strict=True)])
    assert outcome.slowest == min(ballot.progress for ballot in ballots)
    assert outcome.abort == any(ballot.abort for ballot in ballots)
    assert outcome.installed_agree == (len({ballot.installed for ballot in ballots}) == 1)
    assert outcome.plans <= {ballot.plan for ballot in ballots}
    if outcome.decision is Decision.COMMIT:
        assert len({ballot.plan for ballot in ballots}) == 1
        assert all(ballot.progress == Progress.READY and not ballot.abort for ballot in ballots)


def test_a_ballot_of_the_wrong_width_is_refused() -> None:
    with pytest.raises(ValueError, match="a ballot has 7 integers, got 2"):
        Outcome.decode([1, 2])


def test_staging_is_reused_while_it_fits_and_given_up_when_dropped() -> None:
    staging = Staging()
    weights = [torch.zeros(4, 3, 2), torch.zeros(4, 5)]
    first = staging.reserve(weights, 3)
    again = staging.reserve(weights, 2)
    assert [buffer.data_ptr() for buffer in first] == [buffer.data_ptr() for buffer in again]
    assert [tuple(buffer.shape) for buffer in again] == [(2, 3, 2), (2, 5)]
    staging.drop()
    fresh = staging.reserve(weights, 2)
    assert all(new.data_ptr() != old.data_ptr() for new, old in zip(fresh, first, strict=True))


def test_a_budget_admits_what_the_steps_allow() -> None:
    budget = ByteBudget(100)
    assert not budget.draw(10, timeout=0.01)
    budget.refill()
    assert budget.draw(250, timeout=0.01)
    budget.refill()
    assert not budget.draw(1, timeout=0.01)
    waited = threading.Thread(target=lambda: (time.sleep(0.05), budget.refill(), budget.refill()))
    waited.start()
    assert budget.draw(1, timeout=5)
    waited.join()


def test_no_budget_never_waits() -> None:
    assert ByteBudget(None).draw(1 << 40, timeout=0)


def test_a_full_outbox_drops_the_oldest_heat_and_counts_its_steps() -> None:
    outbox = Outbox(heat_segments=2)
    segments = [live.segment(first_step=step, steps=4) for step in (0, 4, 8)]
    for segment in segments:
        outbox.put(segment)
    assert outbox.dropped_steps == 4
    taken = outbox.take(timeout=0)
    assert taken is segments[1]
    assert taken is not None
    outbox.restore(taken)
    assert outbox.take(timeout=0) is segments[1]
    assert outbox.take(timeout=0) is segments[2]
    assert outbox.take(timeout=0) is None
