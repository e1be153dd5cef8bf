"""A rank that is ahead waits for the others a while; one that has waited in vain waits no more until it is in step."""

from __future__ import annotations

from eplb_service.control.core.patience import HELD_SECONDS, Patience


def test_a_rank_in_step_is_not_held_back() -> None:
    assert not Patience().after(5.0, ahead=False).holds(5.0)


def test_a_rank_ahead_is_held_back_until_patience_runs_out_or_the_others_are_there() -> None:
    held = Patience().after(5.0, ahead=True)
    assert held.holds(5.0)
    assert held.after(5.5, ahead=True).holds(5.5)
    assert not held.after(5.5, ahead=False).holds(5.5)
    assert not held.after(5.0 + HELD_SECONDS, ahead=True).holds(5.0 + HELD_SECONDS)


def test_one_that_has_waited_in_vain_waits_no_more_until_it_is_in_step() -> None:
    spent = Patience().after(0.0, ahead=True).after(10 * HELD_SECONDS, ahead=True)
    assert not spent.after(11 * HELD_SECONDS, ahead=True).holds(11 * HELD_SECONDS)
    assert spent.after(12.0, ahead=False).after(13.0, ahead=True).holds(13.0)
