"""Structured logs on stderr: readable lines on a terminal, JSON lines otherwise."""

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
    """Configure logging to stderr, as readable lines on a terminal and as JSON lines otherwise.

    Parameters
    ----------
    level
        Lowest level that is logged.
    """
    renderer: Any = structlog.processors.JSONRenderer()
    if sys.stderr.isatty():
        # Rich tracebacks would print local variables, which can be thousands of lines of heat.
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
"""Maximum number of lines logged in a burst."""
_PER_SECOND = 10.0
"""Maximum sustained number of lines per second."""


class BoundedLog:
    """Rate-limited log for events that clients without credentials can cause.

    It is a token bucket that allows a burst of up to 256 lines and 10 lines per second after that.

    Parameters
    ----------
    on_dropped
        Function that is called for each dropped line.
    clock
        Function that returns the time in seconds.

    Examples
    --------
    >>> dropped = []
    >>> log = BoundedLog(lambda: dropped.append(1), clock=lambda: 0.0)
    >>> sum(log._may_log() for _ in range(300)), len(dropped)
    (256, 44)
    """

    def __init__(self, on_dropped: Callable[[], object], clock: Callable[[], float] = time.monotonic) -> None:
        self._on_dropped = on_dropped
        self._clock = clock
        self._allowance = float(_BURST)
        self._updated_at = clock()

    def info(self, event: str, **facts: Any) -> None:
        """Log an event at level info."""
        if self._may_log():
            _log.info(event, **facts)

    def warning(self, event: str, **facts: Any) -> None:
        """Log an event at level warning, such as a rejected call."""
        if self._may_log():
            _log.warning(event, **facts)

    def error(self, event: str, **facts: Any) -> None:
        """Log an error. ``exc_info`` in ``facts`` adds the traceback of an exception."""
        if self._may_log():
            _log.error(event, **facts)

    def _may_log(self) -> bool:
        now = self._clock()
        self._allowance = min(float(_BURST), self._allowance + (now - self._updated_at) * _PER_SECOND)
        self._updated_at = now
        if self._allowance < 1:
            self._on_dropped()
            return False
        self._allowance -= 1
        return True


@contextlib.contextmanager
def bounding_library_logs(log: BoundedLog) -> Iterator[None]:
    """Redirect errors from the running event loop and from libraries to ``log``.

    By default, asyncio writes the exception of a task that is no longer awaited directly to stderr. A client that
    cancels many calls could fill the disk with those tracebacks.
    """
    loop = asyncio.get_running_loop()
    handler = _LibraryHandler(log)
    before = loop.get_exception_handler()
    loop.set_exception_handler(lambda _, context: _log_context(log, context))
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        loop.set_exception_handler(before)


class _LibraryHandler(logging.Handler):
    """Handler that forwards library warnings and errors to a bounded log."""

    def __init__(self, log: BoundedLog) -> None:
        super().__init__(logging.WARNING)
        self._bounded = log

    def emit(self, record: logging.LogRecord) -> None:
        """Log one record, with its exception if it has one."""
        facts: dict[str, Any] = {"exc_info": record.exc_info} if record.exc_info else {}
        self._bounded.warning("library_warning", library=record.name, message=record.getMessage(), **facts)


def _log_context(log: BoundedLog, context: dict[str, Any]) -> None:
    """Log the context that asyncio reports for an unhandled exception."""
    error = context.get("exception")
    facts: dict[str, Any] = {} if error is None else {"exc_info": (type(error), error, error.__traceback__)}
    log.error("task_failed", message=context.get("message", ""), **facts)
