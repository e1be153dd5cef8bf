"""What a lease is to the service, whatever keeps it."""

from __future__ import annotations

from typing import Protocol


class LeaseError(Exception):
    """A lease that can be neither taken nor renewed at present; the message says which and why."""


class LeaseLostError(LeaseError):
    """The lease was held, and is another's to take now: a service that led must end."""


class Lease(Protocol):
    """Held by one service at a time. Calls may wait for disks or networks, and are made one at a time.

    ``described`` names it for operators.
    """

    described: str

    def attempt(self) -> bool:
        """Take it, or renew it; whether it is held now. Raises ``LeaseError`` where that cannot be said."""
        ...

    def highest_term(self) -> int:
        """Highest leader term of any holder so far, as it was when this one took it."""
        ...

    def announce(self, term: int) -> None:
        """Leave this holder's leader term for those after it, before any rank hears of it; raises ``LeaseError``."""
        ...

    def give_back(self) -> None:
        """Let the next one have it at once; never raises."""
        ...
