"""Structured logs on stderr: for people on a terminal, JSON lines for machines."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
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
    """Log at most 256 lines at once and 10 per second after that; call ``on_left_out`` for each line beyond.

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
        """Log a rejected call."""
        if self._may_log():
            _log.warning(event, **facts)

    def error(self, event: str, **facts: Any) -> None:
        """Log an error; ``exc_info`` adds the traceback of an exception."""
        if self._may_log():
            _log.error(event, **facts)

    def _may_log(self) -> bool:
        now = self._clock()
        self._left = min(float(_BURST), self._left + (now - self._at) * _PER_SECOND)
        self._at = now
        if self._left < 1:
            self._on_left_out()
            return False
        self._left -= 1
        return True


@contextlib.contextmanager
def bounding_library_logs(log: BoundedLog) -> Iterator[None]:
    """Send the errors of the event loop and of libraries to ``log``. Needs a running event loop.

    Otherwise, asyncio writes the exception of a task that is no longer awaited directly to stderr. A client that
    cancels many calls could fill the disk with those tracebacks.
    """
    loop = asyncio.get_running_loop()
    handler = _LibraryLines(log)
    before = loop.get_exception_handler()
    loop.set_exception_handler(lambda _, context: _log_context(log, context))
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        loop.set_exception_handler(before)


class _LibraryLines(logging.Handler):
    """Writes the warnings and errors of libraries to a bounded log."""

    def __init__(self, log: BoundedLog) -> None:
        super().__init__(logging.WARNING)
        self._bounded = log

    def emit(self, record: logging.LogRecord) -> None:
        """Log one record with its exception, if it has one."""
        facts: dict[str, Any] = {"exc_info": record.exc_info} if record.exc_info else {}
        self._bounded.warning("library_warning", library=record.name, message=record.getMessage(), **facts)


def _log_context(log: BoundedLog, context: dict[str, Any]) -> None:
    """Log what asyncio says of an exception that reached no caller."""
    error = context.get("exception")
    facts: dict[str, Any] = {} if error is None else {"exc_info": (type(error), error, error.__traceback__)}
    log.error("task_failed", message=context.get("message", ""), **facts)
