"""Leadership among services: terms, by which ranks choose whom to follow, and claims to the lease.

A term is the clock in seconds, then random bits, so that no two services have the same. Ranks refuse plans of a term
lower than the highest of which they have heard. As in Kubernetes' leader election, nobody compares clocks: a lease
whose record has not changed for as long as its holder promised to renew it, by the clock of whoever looks, is given up.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field, replace

from eplb_core.wire.fields import MAX_VERSION
from eplb_service.control.core.errors import ConflictError

RANDOM_BITS = 20
"""Low bits of a term that are drawn at random."""
_MAX_CLOCK = 1 << 36
"""Bound on what a clock is taken to say, in seconds: the year 4147."""


def term_at(seconds: float, random_bits: int) -> int:
    """Return the term of a service that starts at ``seconds`` since 1970; ``random_bits`` are its low bits."""
    return min(max(int(seconds), 0), _MAX_CLOCK) << RANDOM_BITS | random_bits


def term_above(term: int, random_bits: int) -> int:
    """Return a term above ``term``, which ranks follow; raises ``ConflictError`` where there is none."""
    above = ((term >> RANDOM_BITS) + 1) << RANDOM_BITS | random_bits
    if above >= MAX_VERSION:
        raise ConflictError(
            f"there is no leader term above {term}: a service has claimed the last one; start the engines again, "
            "with which their agents forget it"
        )
    return above


def clock_of(term: int) -> str:
    """Return when the service of a term started, by its own clock."""
    seconds = term >> RANDOM_BITS
    if seconds > _MAX_CLOCK:
        return "past the year 4147"
    return f"{datetime.datetime.fromtimestamp(seconds, tz=datetime.timezone.utc):%Y-%m-%d %H:%M:%S} UTC"


@dataclass(frozen=True)
class Claim:
    """A lease's record, and since when it has been as it is.

    The holder, empty where it was given back, renews it within so many seconds, which changes ``renewed``; ``term`` is
    the highest leader term of any holder so far; the record was first seen at ``since``, by the clock of whoever looks.
    """

    holder: str = ""
    renewed: str = ""
    seconds: float = 0.0
    term: int = 0
    since: float = field(default=0.0, compare=False)

    def followed_by(self, now: float, claim: Claim) -> Claim:
        """Return what the record says now, seen since ``now`` where it has changed."""
        return self if claim == self else replace(claim, since=now)

    def may_be_taken(self, now: float, by: str) -> bool:
        """Return whether it is free, or ``by``'s own, or its holder has let it expire."""
        return self.holder in ("", by) or now - self.since > self.seconds
