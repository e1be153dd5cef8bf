"""A service that starts later has a higher leader term.

A holder can renew its lease, and a rival can acquire an expired lease.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from eplb_core.wire.fields import MAX_VERSION
from eplb_service.control.core.errors import ConflictError
from eplb_service.control.core.leader import Claim, clock_of, term_above, term_at
from eplb_service.control.server.store import MEMORY, Store, StoredDeployment, higher_term

_IN_2106 = 1 << 32
"""Time that an unset clock may show, in seconds."""


def test_the_term_grows_with_every_start(path: str) -> None:
    terms = []
    for _ in range(3):
        store = Store(path)
        terms.append(store.leader_term)
        store.close()
    assert terms == sorted(set(terms))


def test_a_raised_deployment_term_is_kept_and_grows_with_every_start(path: str) -> None:
    store = Store(path)
    raised = higher_term(term_at(_IN_2106, 0))
    for name, term in (("decode", raised), ("last", MAX_VERSION - 1), ("prefill", store.leader_term)):
        store.save_deployment(StoredDeployment(name, leader_term=term))
    store.close()
    store = Store(path)
    decode, last, prefill = store.deployments()
    assert decode.leader_term > raised > store.leader_term
    assert last.leader_term == MAX_VERSION - 1, "the service starts even if there is no higher term"
    assert prefill.leader_term < store.leader_term, "a wrong clock does not affect other deployments"
    store.close()


def test_terms_combine_the_clock_with_random_bits_and_are_bounded() -> None:
    term = term_at(_IN_2106, 7)
    assert clock_of(term) == "2106-02-07 06:28:16 UTC"
    above = [term_above(term, chance) for chance in (0, 7, (1 << 20) - 1)]
    assert min(above) > term | ((1 << 20) - 1)
    assert term_at(1e300, 0) == term_at(1 << 36, 0) < MAX_VERSION
    assert "4147" in clock_of(MAX_VERSION - 1)
    with pytest.raises(ConflictError, match="restart the engines"):
        term_above(MAX_VERSION - 1, 0)


def test_services_started_in_the_same_second_have_different_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 1.8e9)
    terms = [Store(MEMORY).leader_term for _ in range(8)]
    assert len(set(terms)) == len(terms)
    assert all(term >> 20 == 1_800_000_000 for term in terms)


HELD = Claim(holder="a", renewed="2026-01-01T00:00:00Z", seconds=15, term=3)


def test_a_free_lease_can_be_acquired_immediately() -> None:
    assert Claim().may_be_taken(0, "b")
    assert Claim().followed_by(10, replace(HELD, holder="")).may_be_taken(10, "b")


def test_the_holder_can_always_renew() -> None:
    assert Claim().followed_by(10, HELD).may_be_taken(1000, "a")


def test_a_rivals_wait_starts_at_the_last_change_that_it_observed() -> None:
    claim = Claim().followed_by(10, HELD).followed_by(20, HELD)
    assert not claim.may_be_taken(25, "b")
    assert claim.may_be_taken(25.1, "b")
    renewed = claim.followed_by(24, replace(HELD, renewed="2026-01-01T00:00:10Z"))
    assert not renewed.may_be_taken(39, "b")
    assert renewed.may_be_taken(39.1, "b")
