"""A lease is taken by its holder, where it is free, or once its record has long not changed."""

from __future__ import annotations

from dataclasses import replace

from eplb_service.control.core.leader import Claim

HELD = Claim(holder="a", renewed="2026-01-01T00:00:00Z", seconds=15, term=3)


def test_a_free_lease_may_be_taken_at_once() -> None:
    assert Claim().may_be_taken(0, "b")
    assert Claim().followed_by(10, replace(HELD, holder="")).may_be_taken(10, "b")


def test_a_holder_may_always_renew() -> None:
    assert Claim().followed_by(10, HELD).may_be_taken(1000, "a")


def test_another_waits_from_when_it_last_saw_the_record_change() -> None:
    claim = Claim().followed_by(10, HELD).followed_by(20, HELD)
    assert not claim.may_be_taken(25, "b")
    assert claim.may_be_taken(25.1, "b")
    renewed = claim.followed_by(24, replace(HELD, renewed="2026-01-01T00:00:10Z"))
    assert not renewed.may_be_taken(39, "b")
    assert renewed.may_be_taken(39.1, "b")
