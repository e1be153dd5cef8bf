"""Raise errors between any two lines of agent code, on a simulated model's thread."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from greenlet import getcurrent

from tests.injected import leaves_a_with
from tests.simulation.scheduler import Process

_GUARD = "_contained.<locals>.contain.<locals>.call"
"""Name of the function that contains errors.

No errors are raised in its own lines, because no Python code could catch an error in the first line.
"""


@contextmanager
def failing_lines(process: Process) -> Iterator[None]:
    """Within the context, raise a ``MemoryError`` at the n-th line of agent code; n is ``process.failing_line``."""
    if not process.failing_line:
        yield
        return

    model = getcurrent()

    def entered(frame: FrameType, *_: Any) -> Any:
        if "worker_agent" not in frame.f_code.co_filename:
            return None
        guard = frame.f_code.co_qualname == _GUARD
        return None if guard else line

    def line(frame: FrameType, event: str, _: Any) -> Any:
        if (
            event == "line"
            and process.failing_line > 0
            and getcurrent() is model
            and not leaves_a_with(frame)
        ):
            process.failing_line -= 1
            if process.failing_line == 0:
                where = f"{frame.f_code.co_qualname}, line {frame.f_lineno}"
                process.scheduler.note(process.name, f"MemoryError in {where}")
                raise MemoryError("simulated")
        return line

    sys.settrace(entered)
    try:
        yield
    finally:
        sys.settrace(None)
