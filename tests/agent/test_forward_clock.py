"""The forward clock: the agreed pass number applies to the current pass, regardless of missed or extra calls."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from worker_agent.forward_clock import ForwardClock


@pytest.mark.parametrize("number", [300, 301])
@pytest.mark.parametrize("passes", [6, 7])
@pytest.mark.parametrize("calls", [4, 5, 6, 7, 9])
def test_an_agreed_pass_number_does_not_depend_on_the_number_of_calls(
    number: int, passes: int, calls: int
) -> None:
    counter = torch.tensor(1000)
    clock = ForwardClock([SimpleNamespace(load_counter=counter)])
    for _ in range(calls):
        clock.called()
    counter += passes
    clock.trouble = "the counts differ"
    clock.agree(number)
    assert (clock.exact(), clock.now, clock.trouble) == (number, number, None)
    assert clock.base == 1000 + passes - number
    counter += 1
    assert clock.called() == clock.exact() == number + 1
