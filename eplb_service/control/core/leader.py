"""Leadership among services: leader terms, and claims on a lease.

Ranks reject plans whose term is lower than the highest one that they have received. A term combines its service's start
time with random bits, so that no two services have the same term.

Leases work as in Kubernetes leader election, which never compares the clocks of two machines. A service uses its own
clock to measure how long the lease record has been unchanged. The lease has expired once this time exceeds the
renewal time that the holder promised.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field, replace

from eplb_core.wire.fields import MAX_VERSION
from eplb_service.control.core.errors import ConflictError

RANDOM_BITS = 20
"""Number of low bits of a term that are drawn at random."""
_MAX_CLOCK = 1 << 36
"""Maximum time in a new term, in seconds since 1970 (the year 4147)."""


def term_at(seconds: float, random_bits: int) -> int:
    """Return the term of a service that starts at ``seconds`` since 1970, with ``random_bits`` as its low bits."""
    return min(max(int(seconds), 0), _MAX_CLOCK) << RANDOM_BITS | random_bits


def term_above(term: int, random_bits: int) -> int:
    """Return a higher term than ``term``. Raises ``ConflictError`` if there is no higher term."""
    higher_term = ((term >> RANDOM_BITS) + 1) << RANDOM_BITS | random_bits
    if higher_term >= MAX_VERSION:
        raise ConflictError(
            f"a service has already claimed {term}, the highest possible leader term; restart the engines to "
            "reset the term that their agents follow"
        )
    return higher_term


def clock_of(term: int) -> str:
    """Return the start time of the service with this term, according to its own clock."""
    seconds = term >> RANDOM_BITS
    if seconds > _MAX_CLOCK:
        return "after the year 4147"
    return f"{datetime.datetime.fromtimestamp(seconds, tz=datetime.timezone.utc):%Y-%m-%d %H:%M:%S} UTC"


@dataclass(frozen=True)
class Claim:
    """Lease record as observed by one service (immutable).

    Parameters
    ----------
    holder
        Identity of the service that holds the lease; empty if the lease was released.
    renewed
        String that the holder changes at each renewal.
    seconds
        Time within which the holder promises to renew the lease.
    term
        Highest leader term of any holder so far.
    since
        Time at which this record was first observed, according to the observer's clock.

    Examples
    --------
    The lease expires when its record has not changed for more than the promised 15 seconds:

    >>> record = Claim(holder="eplb-0", renewed="12:00:00", seconds=15.0)
    >>> claim = Claim().followed_by(100.0, record).followed_by(110.0, record)
    >>> [claim.may_be_taken(now, "eplb-1") for now in (115.0, 115.1)]
    [False, True]
    """

    holder: str = ""
    renewed: str = ""
    seconds: float = 0.0
    term: int = 0
    since: float = field(default=0.0, compare=False)

    def followed_by(self, now: float, claim: Claim) -> Claim:
        """Return the claim after a record is read at ``now``. If the record has changed, ``since`` becomes ``now``."""
        return self if claim == self else replace(claim, since=now)

    def may_be_taken(self, now: float, identity: str) -> bool:
        """Return True if the lease is free, has expired, or is already held by ``identity``."""
        return self.holder in ("", identity) or now - self.since > self.seconds
