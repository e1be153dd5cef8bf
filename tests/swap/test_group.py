"""What the members of a formation learn of each other by asking: where each is, and what each has in place."""

from __future__ import annotations

import threading

import pytest

from tests.swap.peered import joined
from worker_agent.swap.commit_register import FatalSwitchError


def test_ranks_say_how_many_calls_and_forward_passes_they_have_made() -> None:
    one, two, three = joined(3)
    two.position, three.position = lambda: (7, 5), lambda: (9, 0)
    assert one.positions() == {1: (7, 5), 2: (9, 0)}


def test_an_install_that_takes_others_a_while_is_waited_for() -> None:
    one, two, three = joined(3, patience=60.0)
    two.installed = 4
    late = threading.Timer(0.3, setattr, (three, "installed", 4))
    late.start()
    one.wait_for_installs(4)
    assert three.installed == 4
    late.join()


def test_an_install_that_never_comes_is_fatal_and_names_the_rank() -> None:
    one, two, _ = joined(3, patience=0.2)
    two.installed = 4
    with pytest.raises(FatalSwitchError, match=r"ranks \[2\] have not installed within 0.2 s"):
        one.wait_for_installs(4)


def test_the_reason_of_a_rank_that_failed_ends_the_wait() -> None:
    one, two = joined(2, patience=60.0)
    two.failure = "a copy failed"
    with pytest.raises(FatalSwitchError, match="a copy failed"):
        one.wait_for_installs(4)
    assert one.failure == "a copy failed"
