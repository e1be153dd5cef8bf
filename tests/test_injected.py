"""Tests of error injection: errors arise only at lines where a program could raise them, so no lock stays held."""

from __future__ import annotations

import contextlib
import sys
import threading
from types import FrameType
from typing import Any

from tests.injected import leaves_a_with


def _locked(lock: threading.Lock) -> int:
    total = 0
    for number in range(2):
        with lock:
            total += number
    return total


def test_no_injected_error_leaves_a_lock_held() -> None:
    tried = 0
    for failing in range(1, 30):
        lock = threading.Lock()
        lines = 0

        def line(frame: FrameType, event: str, _: Any, failing: int = failing) -> Any:
            nonlocal lines
            if event == "line" and not leaves_a_with(frame):
                lines += 1
                if lines == failing:
                    raise MemoryError
            return line

        with contextlib.suppress(MemoryError):
            sys.settrace(lambda frame, *_: line if frame.f_code is _locked.__code__ else None)
            try:
                _locked(lock)
            finally:
                sys.settrace(None)
        tried += lines == failing
        assert not lock.locked()
    # Two lines in each of two iterations, three visits to the loop head, and the first and the last line.
    assert tried == 2 * 2 + 3 + 2
