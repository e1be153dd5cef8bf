"""Whoever plans steps back behind the event loop, which goes on at its own priority."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from eplb_service.control.server.deciding.planner_threads import PlannerThreads


def nice_level() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def nice_levels() -> tuple[int, int]:
    """Of this thread, and of one that it starts."""
    with ThreadPoolExecutor(1) as pool:
        return nice_level(), pool.submit(nice_level).result()


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux alone")
def test_a_planner_and_its_helpers_run_behind_the_event_loop() -> None:
    before = nice_level()
    planner, helper = PlannerThreads().compute(nice_levels).result(timeout=60)
    assert planner == helper == min(before + 5, 19)
    assert nice_level() == before


def test_a_thread_that_may_not_step_back_plans_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", refused)
    assert PlannerThreads().compute(int, "7").result(timeout=60) == 7
