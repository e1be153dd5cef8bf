"""Who holds a lease, by what its record says, and when it may be taken; values, no clock.

As in Kubernetes' leader election, nobody compares clocks: a record that has not changed for as long as its holder
promised to renew it, by the clock of whoever looks, is given up.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Claim:
    """What a lease's record says.

    Parameters
    ----------
    holder
        Who holds it; empty where it was given back.
    renewed
        Changes with every renewal.
    seconds
        Within which the holder renews it.
    term
        Highest leader term of any holder so far.
    """

    holder: str = ""
    renewed: str = ""
    seconds: float = 0.0
    term: int = 0


@dataclass(frozen=True)
class Watched:
    """A claim, and since when it has been as it is."""

    claim: Claim = Claim()
    since: float = 0.0

    def after(self, now: float, claim: Claim) -> Watched:
        """The record says ``claim``."""
        return self if claim == self.claim else Watched(claim, now)

    def may_be_taken(self, now: float, by: str) -> bool:
        """Whether it is free, or ``by``'s own, or its holder has let it expire."""
        return self.claim.holder in ("", by) or now - self.since > self.claim.seconds
