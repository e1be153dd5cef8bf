"""When a rank says that it is alive: a pure machine, fed with what it would say and what else it has said.

A service hears of a rank by its heat too, and many ranks' heartbeats cost it more than their heat. So a heartbeat that
says nothing new is left out where heat has gone out since the look before the last; but not for ever, lest a service
that has missed something never hears it. No rank is silent for more than three intervals.
"""

from __future__ import annotations

from eplb_service.wire.status import Heartbeat

_MOST_LEFT_OUT = 4
"""In a row: of five heartbeats with nothing new at least one is said."""


class Heartbeats:
    """Those of one stream, which begins with one.

    Parameters
    ----------
    now
        Seconds, by any clock that never jumps.
    """

    def __init__(self, now: float) -> None:
        self._look_at = now
        self._said: Heartbeat | None = None
        self._other_now = self._other_before = False
        self._left_out = 0

    def left(self, now: float) -> float:
        """Seconds until the next look; 0 or less where it is due."""
        return self._look_at - now

    def said_other(self) -> None:
        """The rank has said something else, from which the service knows that it is alive, and at which step."""
        self._other_now = True

    def look(self, now: float, beat: Heartbeat, interval: float) -> bool:
        """Whether ``beat`` is to be said now; the next look is ``interval`` seconds later."""
        self._look_at = now + interval
        other = self._other_now or self._other_before
        self._other_now, self._other_before = False, self._other_now
        news = self._said is None or _content(beat) != _content(self._said)
        if not news and other and self._left_out < _MOST_LEFT_OUT:
            self._left_out += 1
            return False
        self._said, self._left_out = beat, 0
        return True


def _content(beat: Heartbeat) -> tuple[int, int, str]:
    """What other messages do not say."""
    return beat.epoch, beat.digest, beat.error
