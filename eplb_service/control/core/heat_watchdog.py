"""Notices that no heat is put together any more though the ranks make steps."""

from __future__ import annotations

from dataclasses import dataclass


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
