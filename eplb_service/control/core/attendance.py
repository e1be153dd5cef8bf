"""Who was turned away, who is waited for, and since when nobody is there: what only the clock shows of a group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

_REFUSALS_KEPT = 16
_REFUSAL_SECONDS = 60.0
"""How long a refusal is a problem: an agent that has a place here tries again within seconds."""
_FORMING_SECONDS = 60.0
"""How long ranks may wait for the others of their forming before another may take their place."""


@dataclass(frozen=True)
class Refusal:
    """Why a rank was turned away, and the first look at the clock since; ``None`` before it."""

    reason: str
    since: float | None = None


@dataclass(frozen=True)
class Attendance:
    """How long ranks have been missing, and which were refused.

    Parameters
    ----------
    refused
        Why ranks were turned away, by rank; what is not repeated is forgotten.
    forming_since
        Since when some ranks are connected and others have never come; ``None`` while all have.
    forming_overdue
        Whether that is so long that another forming of the group may take their place.
    departed_since
        Since when no rank is connected; ``None`` while one is.
    """

    refused: Mapping[int, Refusal] = field(default_factory=dict)
    forming_since: float | None = None
    forming_overdue: bool = False
    departed_since: float | None = None

    def turned_away(self, rank: int, reason: str) -> Attendance:
        """A rank was refused; only the last refusals are kept."""
        refused = {**self.refused, rank: Refusal(reason)}
        return replace(self, refused=dict(list(refused.items())[-_REFUSALS_KEPT:]))

    def taken_in(self, rank: int) -> Attendance:
        """A rank was not refused any more."""
        return replace(self, refused={other: why for other, why in self.refused.items() if other != rank})

    def formed_again(self) -> Attendance:
        """Another forming takes the group's place: nothing of the last one counts."""
        return Attendance(departed_since=self.departed_since)

    def after(self, now: float, *, connected: bool, waiting: bool) -> Attendance:
        """As of ``now`` (seconds); ``waiting``: some ranks are here, and others of their forming have never come."""
        refused = {
            rank: refusal if refusal.since is not None else replace(refusal, since=now)
            for rank, refusal in self.refused.items()
            if refusal.since is None or now - refusal.since < _REFUSAL_SECONDS
        }
        departed = None if connected else now if self.departed_since is None else self.departed_since
        if not waiting:
            return Attendance(refused, departed_since=departed)
        since = now if self.forming_since is None else self.forming_since
        overdue = self.forming_since is not None and now - since >= _FORMING_SECONDS
        return Attendance(refused, since, overdue, departed)
