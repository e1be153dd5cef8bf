"""Notices what has silently stopped: heat is put together no more, decisions never come, steps are lost."""

from __future__ import annotations

from dataclasses import dataclass

_MINUTE = 60.0


@dataclass(frozen=True)
class HeatWatchdog:
    """What was last seen of the ranks' heat.

    Parameters
    ----------
    silent_seconds
        How long the ranks have made steps of which none was completed.
    completed, step
        Steps whose heat had been put together, and the step that the ranks were at; -1 before the first look.
    since
        When heat was last put together, or the ranks last rested.
    """

    silent_seconds: float = 0.0
    completed: int = -1
    step: int = -1
    since: float = 0.0

    def after(self, now: float, step: int, completed: int) -> HeatWatchdog:
        """The ranks are at ``step``, and the heat of ``completed`` steps has been put together."""
        heat_came = completed != self.completed
        if heat_came or (step == self.step and self.silent_seconds == 0.0):
            return HeatWatchdog(0.0, completed, step, now)
        if step == self.step:
            return HeatWatchdog(self.silent_seconds, completed, step, self.since)
        return HeatWatchdog(now - self.since, completed, step, self.since)


@dataclass(frozen=True)
class Undecided:
    """Since when no decision has been made.

    Parameters
    ----------
    seconds, steps
        How long that is, and how many steps the ranks have made meanwhile.
    decided_at
        What the deployment called the last decision by.
    since, first_step
        When it was made, and the step that the ranks were at; ``None`` before all ranks had come together.
    """

    seconds: float = 0.0
    steps: int = 0
    decided_at: int = 0
    since: float | None = None
    first_step: int = 0

    def after(self, now: float, step: int, decided_at: int, known: bool) -> Undecided:
        """The ranks are at ``step``; the last decision is ``decided_at``; ``known``: one could be made."""
        if not known:
            return Undecided(decided_at=decided_at)
        if self.since is None or decided_at != self.decided_at or step < self.first_step:
            return Undecided(0.0, 0, decided_at, now, step)
        return Undecided(now - self.since, step - self.first_step, decided_at, self.since, self.first_step)


@dataclass(frozen=True)
class Losses:
    """Which share of the steps was lost in the last whole minute.

    Parameters
    ----------
    share
        0 to 1; 0 before the first minute is over.
    since, received, lost
        When the minute at hand began, and what had been counted by then.
    """

    share: float = 0.0
    since: float | None = None
    received: int = 0
    lost: int = 0

    def after(self, now: float, received: int, lost: int) -> Losses:
        """So many steps have been received and lost since the start."""
        if self.since is None:
            return Losses(0.0, now, received, lost)
        if now - self.since < _MINUTE:
            return self
        steps = received - self.received + lost - self.lost
        return Losses((lost - self.lost) / steps if steps else 0.0, now, received, lost)
