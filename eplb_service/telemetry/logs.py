"""Structured logs on stderr: for people on a terminal, JSON lines for machines."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import Any

import structlog


def configure_logs(level: str = "info") -> None:
    """Log to stderr from ``level`` on: readable lines on a terminal, JSON otherwise."""
    renderer: Any = structlog.processors.JSONRenderer()
    if sys.stderr.isatty():
        # Plain tracebacks: local variables would fill thousands of lines with heat.
        renderer = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
        cache_logger_on_first_use=False,
    )


_log = structlog.get_logger(__name__)

_BURST = 256
_PER_SECOND = 10.0


class BoundedLog:
    """Logs at most 256 lines at once, and 10 per second from then on; ``on_left_out`` is called for each further one.

    For lines that clients without credentials can cause as often as they like.
    """

    def __init__(
        self, on_left_out: Callable[[], object], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._on_left_out = on_left_out
        self._clock = clock
        self._left = float(_BURST)
        self._at = clock()

    def info(self, event: str, **facts: Any) -> None:
        """Log an event."""
        if self._may_log():
            _log.info(event, **facts)

    def warning(self, event: str, **facts: Any) -> None:
        """Log a refusal."""
        if self._may_log():
            _log.warning(event, **facts)

    def _may_log(self) -> bool:
        now = self._clock()
        self._left = min(float(_BURST), self._left + (now - self._at) * _PER_SECOND)
        self._at = now
        if self._left < 1:
            self._on_left_out()
            return False
        self._left -= 1
        return True
