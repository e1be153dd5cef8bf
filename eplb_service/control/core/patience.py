"""How long a rank's heat is held back where it is ahead of what slower ranks have reported; a value.

What has piled up, say while the service stood still, may be read rank after rank. The first would then be as far ahead
as the backlog is long, and push out steps that the others are about to report. So it waits for as long as they get on.
A rank that stays behind, as a dead one does, holds the others up but once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

NOWHERE = -1
"""How far a rank has reported that has not come yet."""
HELD_SECONDS = 5.0
"""Longest that a rank is held back while slower ones report nothing; what it says of plans waits as long."""
MOST_HELD_SECONDS = 20.0
"""Longest that it is held back in a row: one that hardly gets on is not waited for."""


@dataclass(frozen=True)
class Patience:
    """That with one rank.

    Parameters
    ----------
    behind
        How far the slowest rank had reported; ``None`` where the rank was not ahead by its last report.
    until
        When it runs out if the slowest gets no further.
    at_last
        When it runs out in any case.
    """

    behind: int | None = None
    until: float = 0.0
    at_last: float = 0.0

    def after(self, now: float, behind: int | None) -> Patience:
        """By now, in seconds by any clock that never jumps, the slowest rank is this far, or the rank is not ahead."""
        if behind is None:
            return Patience()
        if self.behind is None:
            return Patience(behind, now + HELD_SECONDS, now + MOST_HELD_SECONDS)
        if behind > self.behind and self.holds(now):
            return replace(self, behind=behind, until=min(now + HELD_SECONDS, self.at_last))
        return self

    def holds(self, now: float) -> bool:
        """Whether the report waits for the others."""
        return self.behind is not None and now < self.until
