"""An error at any line of agent code in a host's call is contained: the model keeps serving and balancing recovers."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest

from tests.agent import live
from tests.injected import leaves_a_with
from tests.ranks import run_ranks
from worker_agent.agent import RestoreError
from worker_agent.forward_clock import ForwardClock, StepTimer, Stopwatch
from worker_agent.heat import HeatRecorder
from worker_agent.swap import reformation
from worker_agent.swap.commit_register import FatalSwitchError
from worker_agent.swap.driver import SwitchDriver
from worker_agent.swap.transfer import ByteBudget


class FailAt:
    """Context manager that raises a ``MemoryError`` at the ``number``-th executed line of agent code."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.lines = 0
        self.location: str | None = None

    def __enter__(self) -> FailAt:
        sys.settrace(self._enter_frame)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _enter_frame(self, frame: FrameType, *_: Any) -> Any:
        return self._count_line if "worker_agent" in frame.f_code.co_filename else None

    def _count_line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event != "line" or self.location is not None or leaves_a_with(frame):
            return self._count_line
        guard = frame.f_code.co_qualname == "_contained.<locals>.contain.<locals>.call"
        # An error in the first line of the guard itself cannot be caught.
        if guard and frame.f_lineno <= frame.f_code.co_firstlineno + 2:
            return self._count_line
        self.lines += 1
        if self.lines == self.number:
            self.location = f"{frame.f_code.co_qualname}:{frame.f_lineno}"
            raise MemoryError(f"simulated at {self.location}")
        return self._count_line


def _quick_votes() -> None:
    """Make ranks re-form lost votes within a few calls, without exponential backoff."""
    reformation._INITIAL_BACKOFF_SECONDS = reformation._MAX_DELAY_SECONDS = 0.001
    reformation._INITIAL_MARGIN = 2


def _failing_steps(steps: int, stride: int) -> dict[str, Any]:
    """Fail at every third call on rank 1, each time ``stride`` lines further into ``step`` than at the last failure."""
    _quick_votes()
    agent, layers, still = live.start(1, vote_interval=1, vote_lag=1, vote_timeout_seconds=5)
    reached = []
    number = 0
    calls = 0
    step = agent.step
    lines = set[str]()

    def failing(*arguments: Any) -> None:
        nonlocal number, calls
        calls += 1
        if calls % 3:
            step(*arguments)
            return
        number += stride
        fault = FailAt(number)
        try:
            with fault:
                step(*arguments)
        except FatalSwitchError:
            raise
        except Exception as error:
            reached.append(repr(error))
        if fault.location is None:
            number = number % stride
        else:
            lines.add(fault.location)

    if agent.identity.rank == 1:
        agent.step = failing
    worst = live.drive(agent, layers, still, steps)
    agent.step = step
    before = agent.installed.epoch

    def between(step_number: int) -> None:
        if step_number % 8 == 0 and agent.installed.epoch == before and agent._switch.state.plan is None:
            live.offer(agent, {0: live.from_here(agent, 7)}, step_number + 1)

    worst = max(worst, live.drive(agent, layers, still, 1, between, epoch=before + 1))
    return live.facts(agent, worst, lines=len(lines), reached=reached)


@pytest.mark.parametrize(
    ("steps", "stride"),
    [(90, 7), pytest.param(800, 1, marks=pytest.mark.slow)],
    ids=["some lines", "every line"],
)
def test_an_error_at_any_line_of_a_step_does_not_reach_the_model(steps: int, stride: int) -> None:
    ranks = run_ranks(2, _failing_steps, steps, stride)
    live.check_together(ranks, epoch=1)
    assert ranks[1]["reached"] == []
    assert ranks[1]["lines"] > steps // 6


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (ByteBudget, "refill"),
        (ForwardClock, "called"),
        (StepTimer, "lap"),
        (Stopwatch, "__enter__"),
        (Stopwatch, "__exit__"),
        (SwitchDriver, "stumble"),
        (HeatRecorder, "take"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_method_that_always_fails_does_not_stop_the_model(owner: Any, name: str) -> None:
    (result,) = run_ranks(1, _steps_without, owner, name)
    assert result == {"reached": [], "halted": None}


def _steps_without(owner: Any, name: str) -> dict[str, Any]:
    """Make each kind of host call on a rank whose agent fails whenever the method ``name`` of ``owner`` is called."""
    live.SLOTS = live.EXPERTS
    agent, _, _ = live.start(1)
    reached = []

    def fail(*_: Any) -> None:
        raise RuntimeError(f"{name} fails")

    setattr(owner, name, fail)
    calls = [agent.step, agent.step, agent.drain, agent.resume, agent.step, agent.close]
    for call in calls:
        try:
            call()
        except Exception as error:
            reached.append(f"{call.__name__}: {error!r}")
    return {"reached": reached, "halted": agent.halted}


def _restore_error(fails: bool) -> str:
    live.SLOTS = live.EXPERTS
    agent, _, _ = live.start(1)
    first = agent.installed.placement
    if fails:
        agent._timer.pause = None
    try:
        agent.restore(first)
    except RestoreError as error:
        return str(error)
    return "restored"


def test_a_host_learns_whether_its_experts_were_restored() -> None:
    assert run_ranks(1, _restore_error, False) == ["restored"]
    (reported,) = run_ranks(1, _restore_error, True)
    assert reported.startswith("TypeError")
