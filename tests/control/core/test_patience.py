"""A rank that is ahead waits while the others get on; one that has waited in vain waits no more until it is in step."""

from __future__ import annotations

from eplb_service.control.core.patience import HELD_SECONDS, MOST_HELD_SECONDS, NOWHERE, Patience


def test_a_rank_in_step_is_not_held_back() -> None:
    assert not Patience().after(5.0, None).holds(5.0)


def test_a_rank_ahead_is_held_back_until_patience_runs_out_or_the_others_are_there() -> None:
    held = Patience().after(5.0, 100)
    assert held.holds(5.0)
    assert held.after(5.5, 100).holds(5.5)
    assert not held.after(5.5, None).holds(5.5)
    assert not held.after(5.0 + HELD_SECONDS, 100).holds(5.0 + HELD_SECONDS)


def test_it_waits_longer_for_ranks_that_get_on_but_not_for_ever() -> None:
    held, now = Patience().after(0.0, NOWHERE), 0.0
    while now + HELD_SECONDS / 2 < MOST_HELD_SECONDS:
        now += HELD_SECONDS / 2
        held = held.after(now, int(now))
        assert held.holds(now)
    assert not held.after(MOST_HELD_SECONDS, 1000).holds(MOST_HELD_SECONDS)


def test_one_that_has_waited_in_vain_waits_no_more_until_it_is_in_step() -> None:
    spent = Patience().after(0.0, 7).after(10 * HELD_SECONDS, 7)
    assert not spent.after(11 * HELD_SECONDS, 7).holds(11 * HELD_SECONDS)
    # A rank that was given up gets a little further: too late for what it is waited for.
    assert not spent.after(11 * HELD_SECONDS, 8).holds(11 * HELD_SECONDS)
    assert spent.after(12.0, None).after(13.0, 8).holds(13.0)
