"""What the ranks voted is what the outcome says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker_agent.swap.ballot import Ballot, Outcome, Progress, VoteResult

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
    outcome = Outcome.decode([min(column) for column in zip(*(b.encode() for b in ballots), strict=True)])
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
        Outcome.decode([1, 2])
