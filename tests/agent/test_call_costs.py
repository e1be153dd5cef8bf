"""What calls of the agent take is summed, votes apart, whether or not a call ends well."""

from __future__ import annotations

import pytest

from worker_agent.call_costs import CallCosts


def test_calls_are_summed_with_the_votes_in_them() -> None:
    costs = CallCosts(iter([0, 10, 40, 100, 1000, 1007]).__next__)
    with costs.call(), costs.vote():
        pass
    with costs.call():
        pass
    assert (costs.calls, costs.nanoseconds, costs.vote_nanoseconds) == (2, 107, 30)


def test_a_call_that_fails_has_taken_its_time_too() -> None:
    costs = CallCosts(iter([0, 2, 5, 9]).__next__)
    with pytest.raises(RuntimeError, match="fatal"), costs.call(), costs.vote():
        raise RuntimeError("fatal")
    assert (costs.calls, costs.nanoseconds, costs.vote_nanoseconds) == (1, 9, 3)
