"""Notices that no heat is put together any more though the ranks make steps; pure, told the time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class HeatWatchdog:
    """How long the ranks have made steps of which none was completed, in ``seconds``."""

    seconds: float = 0.0
    _completed: int = -1
    _step: int = -1
    _since: float = 0.0

    def look(self, now: float, step: int, completed: int) -> None:
        """The ranks are at ``step``, and the heat of ``completed`` steps has been put together."""
        if completed != self._completed or step == self._step:
            # Heat comes in, or the model rests: nothing is missing.
            if completed != self._completed or self.seconds == 0.0:
                self._since, self.seconds = now, 0.0
        else:
            self.seconds = now - self._since
        self._completed, self._step = completed, step
