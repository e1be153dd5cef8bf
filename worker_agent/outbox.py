"""What waits to be sent to the service: statuses, never dropped, and heat, of which the oldest goes when it is full."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from eplb_service.wire.heat import HeatReport
from eplb_service.wire.status import PlanStatus

Outgoing: TypeAlias = HeatReport | PlanStatus

_MOST_STATUSES = 4096


class Outbox:
    """A bounded queue between the model's thread, which never waits here, and the stream's.

    Parameters
    ----------
    heat_segments
        Segments kept; the oldest is dropped, and its steps counted in ``dropped_steps``, when one more comes.
    """

    def __init__(self, heat_segments: int) -> None:
        self.dropped_steps = 0
        self._heat: deque[HeatReport] = deque()
        self._heat_limit = heat_segments
        # A group makes a handful of statuses per layer and plan; the bound only guards against a service gone for good.
        self._statuses: deque[PlanStatus] = deque(maxlen=_MOST_STATUSES)
        self._changed = threading.Condition()

    def put(self, item: Outgoing) -> None:
        """Add, dropping the oldest heat where there is no room."""
        with self._changed:
            if isinstance(item, HeatReport):
                self._heat.append(item)
                if len(self._heat) > self._heat_limit:
                    self.dropped_steps += self._heat.popleft().steps
            else:
                self._statuses.append(item)
            self._changed.notify()

    def restore(self, item: Outgoing) -> None:
        """Put back, at the front, what could not be sent."""
        with self._changed:
            if not isinstance(item, HeatReport):
                self._statuses.appendleft(item)
            elif len(self._heat) < self._heat_limit:
                self._heat.appendleft(item)
            else:
                self.dropped_steps += item.steps

    def thin(self, wanted: Callable[[HeatReport], bool]) -> None:
        """Throw away heat that waits and is not asked for any more; it does not count as dropped."""
        with self._changed:
            self._heat = deque(report for report in self._heat if wanted(report))

    def count_lost(self, steps: int) -> None:
        """Count steps whose heat never got as far as here."""
        with self._changed:
            self.dropped_steps += steps

    def take(self, timeout: float) -> Outgoing | None:
        """The next thing to send, statuses first; ``None`` after ``timeout`` seconds without any, or on ``wake``."""
        with self._changed:
            if not self._heat and not self._statuses:
                self._changed.wait(timeout)
            if self._statuses:
                return self._statuses.popleft()
            return self._heat.popleft() if self._heat else None

    def wake(self) -> None:
        """Let a waiting ``take`` return."""
        with self._changed:
            self._changed.notify_all()
