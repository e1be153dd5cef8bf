"""An error at any line that a host's call runs stays within the agent; the model goes on, and balance comes back."""

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
    """Raise a ``MemoryError`` at the line of this number, counted over all lines of the agent that a call runs."""

    def __init__(self, number: int) -> None:
        self.number, self.lines = number, 0
        self.where: str | None = None

    def __enter__(self) -> FailAt:
        sys.settrace(self._entered)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _entered(self, frame: FrameType, *_: Any) -> Any:
        return self._line if "worker_agent" in frame.f_code.co_filename else None

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event != "line" or self.where is not None or leaves_a_with(frame):
            return self._line
        guard = frame.f_code.co_qualname == "_contained.<locals>.contain.<locals>.call"
        # Nothing that Python runs could catch an error in the first line of the guard itself.
        if guard and frame.f_lineno <= frame.f_code.co_firstlineno + 2:
            return self._line
        self.lines += 1
        if self.lines == self.number:
            self.where = f"{frame.f_code.co_qualname}:{frame.f_lineno}"
            raise MemoryError(f"simulated at {self.where}")
        return self._line


def _quick_votes() -> None:
    """Lost votes come back within a few calls, however often they were lost."""
    reformation._INITIAL_BACKOFF_SECONDS = reformation._MAX_DELAY_SECONDS = 0.001
    reformation._INITIAL_MARGIN = 2


def _failing_steps(steps: int, stride: int) -> dict[str, Any]:
    """Fail on rank 1 at every third call, at a line of ``step`` that is ``stride`` after the one before."""
    _quick_votes()
    agent, layers, still = live.start(1, vote_interval=1, vote_lag=1, vote_timeout_seconds=5)
    reached, number, calls, worst = [], 0, 0, 0.0
    step, lines = agent.step, set[str]()

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
        if fault.where is None:
            number = number % stride
        else:
            lines.add(fault.where)

    if agent.identity.rank == 1:
        agent.step = failing
    worst = live.drive(agent, layers, still, steps)
    agent.step = step
    before = agent.installed.epoch

    def between(at: int) -> None:
        if at % 8 == 0 and agent.installed.epoch == before and agent._switch.state.plan is None:
            live.offer(agent, {0: live.from_here(agent, 7)}, at + 1)

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
    ids=lambda part: getattr(part, "__name__", part),
)
def test_a_part_that_always_fails_keeps_the_model_going(owner: Any, name: str) -> None:
    (one,) = run_ranks(1, _steps_without, owner, name)
    assert one == {"reached": [], "halted": None}


def _steps_without(owner: Any, name: str) -> dict[str, Any]:
    """Run a rank whose agent has a part that raises at each call, and every call of a host."""
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


def _restored(fails: bool) -> str:
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


def test_a_host_learns_that_its_experts_were_not_restored() -> None:
    assert run_ranks(1, _restored, False) == ["restored"]
    (reported,) = run_ranks(1, _restored, True)
    assert reported.startswith("TypeError")
