"""Threads that the planner runs on: each computes one thing, and one that is given up still takes its thread."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

_MOST_STUCK = 4
"""Decisions that were given up and still take a thread each; beyond, no more are made."""
_NICER = 5
"""Of Linux' nice levels: where cores are scarce the event loop has three times the share of a planner's thread."""


class PlannerThreads:
    """What is being computed, and what was given up."""

    def __init__(self) -> None:
        self._stuck: dict[str, Future[Any]] = {}
        self._computing: set[Future[Any]] = set()

    @property
    def busy(self) -> bool:
        """Whether a thread is at work; kernels cannot be interrupted."""
        return any(not one.done() for one in self._computing)

    def may_begin(self, name: str) -> bool:
        """Whether no thread is taken by what was given up for ``name``, or too many others."""
        self._stuck = {stuck: computing for stuck, computing in self._stuck.items() if not computing.done()}
        return name not in self._stuck and len(self._stuck) < _MOST_STUCK

    def give_up(self, name: str, computing: Future[Any]) -> None:
        """Nobody waits for it any more; its thread goes on by itself."""
        self._stuck[name] = computing

    def compute(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        """On a thread of its own, which ends with it."""
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="eplb-planner", initializer=step_back)
        computing = thread.submit(function, *arguments)
        thread.shutdown(wait=False)
        self._computing = {one for one in self._computing if not one.done()} | {computing}
        return computing


def step_back() -> None:
    """Let the process's other threads, the event loop's above all, run before this one; on Linux, elsewhere nothing."""
    if sys.platform == "linux":
        # There each thread has a nice level of its own, which those that it starts begin with.
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICER)


async def outcome_of(computing: Future[T]) -> T:
    """Wait for it; who stops waiting does not stop it."""
    return await asyncio.shield(asyncio.wrap_future(computing))
