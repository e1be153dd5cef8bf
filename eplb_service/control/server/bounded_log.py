"""Log lines that strangers can cause, at a bounded rate: what is left out is counted."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import structlog

_log = structlog.get_logger(__name__)

_BURST = 256
_PER_SECOND = 10.0


class BoundedLog:
    """Logs at most 256 lines at once, and 10 per second from then on.

    Parameters
    ----------
    on_left_out
        Called for each line that is left out.
    """

    def __init__(
        self, on_left_out: Callable[[], object], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._on_left_out = on_left_out
        self._clock = clock
        self._left = float(_BURST)
        self._at = clock()
        self._left_out = 0

    def info(self, event: str, **facts: Any) -> None:
        """Something that strangers can make happen as often as they like."""
        if self._may_log():
            _log.info(event, **facts)

    def warning(self, event: str, **facts: Any) -> None:
        """The same, where it is a refusal."""
        if self._may_log():
            _log.warning(event, **facts)

    def _may_log(self) -> bool:
        now = self._clock()
        self._left = min(float(_BURST), self._left + (now - self._at) * _PER_SECOND)
        self._at = now
        if self._left < 1:
            self._left_out += 1
            self._on_left_out()
            return False
        self._left -= 1
        if self._left_out:
            _log.warning("log_lines_left_out", lines=self._left_out)
            self._left_out = 0
        return True
