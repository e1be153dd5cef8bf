"""Errors in the model thread while the votes re-form delay the new vote link but never prevent it."""

from __future__ import annotations

import sys
import time
from types import FrameType, SimpleNamespace
from typing import Any, cast

import pytest

from tests.injected import leaves_a_with
from worker_agent.swap import reformation as module
from worker_agent.swap.reformation import Reformation
from worker_agent.swap.vote_link import Kind

_DEADLINE_SECONDS = 20


class _FailAt:
    """Context manager that raises a ``MemoryError`` at the ``number``-th executed line of ``Reformation.rest``."""

    def __init__(self, number: int) -> None:
        self.remaining = number

    def __enter__(self) -> None:
        sys.settrace(self._enter_frame)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _enter_frame(self, frame: FrameType, *_: Any) -> Any:
        return self._count_line if frame.f_code is Reformation.rest.__code__ else None

    def _count_line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line" and self.remaining > 0 and not leaves_a_with(frame):
            self.remaining -= 1
            if self.remaining == 0:
                raise MemoryError(f"simulated at line {frame.f_lineno}")
        return self._count_line


class _Link:
    """Vote link whose first comparison looks as if a peer has queued one more forward pass."""

    queues_compared = 0

    def __init__(self, *_: object) -> None:
        pass

    def begin(self, kind: Kind, _: int, values: list[int]) -> Any:
        if kind is Kind.AT_REST:
            _Link.queues_compared += 1
            if _Link.queues_compared == 1:
                values = [module._QUEUED]
        return SimpleNamespace(wait=lambda _: list(values))

    def leave(self) -> None:
        pass

    def ended(self) -> bool:
        return False


def _reformation() -> Reformation:
    """Return one rank's reformation in which pass numbers differ, so that the model thread must renumber a pass."""
    group = SimpleNamespace(
        rank=0,
        peer_left=False,
        peers=SimpleNamespace(others={}),
        store=SimpleNamespace(set=lambda *_: None),
        register=SimpleNamespace(may_commit=lambda _, *, has_outcome: has_outcome),
        process_group=lambda name: None,
    )
    state = SimpleNamespace(generation=0, lane=0, installed=SimpleNamespace(version_digest=0))
    return Reformation(
        cast(Any, group),
        cast(Any, state),
        vote=0,
        attempts=0,
        early_losses=0,
        current_pass=lambda: 0,
        astray=True,
    )


@pytest.mark.parametrize("line", range(1, 31))
def test_an_error_while_agreeing_on_a_pass_number_only_delays_the_new_vote_link(
    monkeypatch: pytest.MonkeyPatch, line: int
) -> None:
    monkeypatch.setattr(module, "_INITIAL_BACKOFF_SECONDS", 0.001)
    monkeypatch.setattr(module, "VoteLink", _Link)
    monkeypatch.setattr(_Link, "queues_compared", 0)
    clock: Any = SimpleNamespace(at_rest=lambda _: True, reached=0, agree=lambda _: None)
    reformation = _reformation()
    failing = _FailAt(line)
    errors = 0
    deadline = time.monotonic() + _DEADLINE_SECONDS
    while reformation.poll() is None and time.monotonic() < deadline:
        if reformation._rest_request is None and not errors:
            time.sleep(0.001)
            continue
        try:
            with failing:
                reformation.rest(clock, 1.0)
        except MemoryError:
            errors += 1
        time.sleep(0.001)
    reformation.close()
    assert reformation.poll() is not None
    assert errors == (failing.remaining == 0)
