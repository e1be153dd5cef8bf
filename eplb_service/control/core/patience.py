"""How long a rank's heat is held back where it is ahead of what slower ranks have reported; a value.

What has piled up, say while the service stood still, may be read rank after rank. The first would then be as far ahead
as the backlog is long, and push out steps that the others are about to report. A rank that stays behind, as a dead one
does, holds the others up but once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

HELD_SECONDS = 2.0
"""Longest that a rank is held back in a row; its heartbeats and what it says of plans wait as long."""


@dataclass(frozen=True)
class Patience:
    """That with one rank.

    Parameters
    ----------
    until
        When it runs out; ``None`` where the rank was not ahead by its last report.
    """

    until: float | None = None

    def after(self, now: float, *, ahead: bool) -> Patience:
        """By now, in seconds by any clock that never jumps, the rank's report is ahead of the others or is not."""
        if not ahead:
            return Patience()
        return self if self.until is not None else replace(self, until=now + HELD_SECONDS)

    def holds(self, now: float) -> bool:
        """Whether the report waits for the others."""
        return self.until is not None and now < self.until
