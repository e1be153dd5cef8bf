"""The real service in a simulated process. Only gRPC, threads, the clock and the disk are simulated."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from eplb_core.wire.agent import CallOff
from eplb_core.wire.fields import WireError
from eplb_service.control.core.deployment import Deployment
from eplb_service.control.core.errors import RejectedError
from eplb_service.control.core.plan_tracker import Outcome, PlanTracker
from eplb_service.control.server import agents, service, store, store_file
from eplb_service.control.server.access import gate
from eplb_service.control.server.access.quotas import Quotas
from eplb_service.control.server.deciding import decider, snapshot
from eplb_service.control.server.listening import CallError
from eplb_service.control.server.outgoing import streams
from eplb_service.control.server.plane import control_plane, deployments
from eplb_service.control.server.settings import ServiceSettings
from eplb_service.telemetry import logs
from eplb_service.telemetry.metrics import Metrics
from tests.simulation.scheduler import Process, Scheduler
from tests.simulation.stream import NAME, Call

DEPLOYMENT = "simulated"
_EPOCH = 1_800_000_000.0
"""Start time of a run as a Unix timestamp."""
_MODULES = (agents, service, store, decider, snapshot, streams, control_plane, deployments, logs)


class Disk:
    """A host's disk, which holds the store. It outlives services and may be full."""

    def __init__(self) -> None:
        self.file = sqlite3.connect(store.MEMORY)

    def lose(self) -> None:
        self.file.close()
        self.file = sqlite3.connect(store.MEMORY)

    def fill(self, *, full: bool) -> None:
        (pages,) = self.file.execute("PRAGMA page_count").fetchone()
        self.file.execute(f"PRAGMA max_page_count = {pages if full else 1 << 30}")


class Task(asyncio.Task[Any]):
    """A simulated service's task. Sets of tasks are iterated in the same order in every run."""

    def __init__(self, coroutine: Any, loop: Loop, number: int, **named: Any) -> None:
        self.number = number
        super().__init__(coroutine, loop=loop, **named)

    def __hash__(self) -> int:
        return self.number


class Loop(asyncio.BaseEventLoop):
    """A process's event loop, on the scheduler's clock. All its tasks end with the process."""

    def __init__(self, process: Process) -> None:
        super().__init__()
        self._process = process
        self._scheduler = process.scheduler
        self._selector = SimpleNamespace(select=lambda _: ())
        self._due = False
        numbers = itertools.count()
        self.set_task_factory(lambda _, coroutine, **named: Task(coroutine, self, next(numbers), **named))

    def __del__(self) -> None:
        return None

    def time(self) -> float:
        return self._scheduler.now

    def call_soon(self, *call: Any, **named: Any) -> asyncio.Handle:
        handle = super().call_soon(*call, **named)
        self._run_soon()
        return handle

    call_soon_threadsafe = call_soon

    def call_at(self, when: float, *call: Any, **named: Any) -> asyncio.TimerHandle:
        self._scheduler.at(max(when, self._scheduler.now), self._run_soon)
        return super().call_at(when, *call, **named)

    def run_in_executor(self, _: Any, function: Any, *args: Any) -> asyncio.Future[Any]:
        return asyncio.wrap_future(_done(function, *args), loop=self)

    def end(self) -> None:
        for task in sorted(asyncio.all_tasks(self), key=hash):
            task.cancel()
        while self._ready:
            self._turn()

    def _process_events(self, _: Any) -> None:
        return None

    def _run_soon(self) -> None:
        if not self._due and self._process.alive:
            self._due = True
            self._scheduler.at(max(self._scheduler.now, self._process.frozen_until), self._turn)

    def _turn(self) -> None:
        self._due = False
        if self._scheduler.now < self._process.frozen_until and self._process.alive:
            self._run_soon()
            return
        asyncio._set_running_loop(self)
        try:
            self._run_once()
        finally:
            asyncio._set_running_loop(None)
        if self._ready:
            self._run_soon()


def _done(function: Callable[..., Any], *arguments: Any) -> Future[Any]:
    future: Future[Any] = Future()
    try:
        future.set_result(function(*arguments))
    except Exception as error:
        future.set_exception(error)
    return future


class Service(control_plane.ControlPlane):
    """One life of the service. ``done`` counts the plans that were carried out completely."""

    def __init__(self, scheduler: Scheduler, settings: ServiceSettings) -> None:
        self.writer = store.StoreWriter(store.Store(store.MEMORY), lambda: None)
        self.process = Process(scheduler, NAME)
        self.done = 0
        self.withheld = 0.0
        self._loop = Loop(self.process)
        metrics = Metrics()
        self.writer._thread = SimpleNamespace(submit=self._submit)
        super().__init__(settings, self.writer, metrics)
        self._agents = agents.AgentService(self, Quotas(64, 64))
        self._loop.create_task(self._tick(metrics))
        self.process.on_end.append(self._loop.end)

    def serve(self, call: Call) -> None:
        self._loop.create_task(self._answer(call))

    def call_off(self) -> bool:
        """Call off the plan in progress, as if heat had changed. Return False if no plan is in progress."""
        deployment = self.deployments.get(DEPLOYMENT)
        if deployment is None or deployment.plan is None or deployment.plan.called_off:
            return False
        deployment.call_off("simulated", self.process.scheduler.now + _EPOCH)
        self.streams.call_off(DEPLOYMENT, CallOff(deployment.plan.plan_id))
        return True

    def withholds(self) -> bool:
        return bool(self.withheld) and self.process.scheduler.random.random() < self.withheld

    async def _tick(self, metrics: Metrics) -> None:
        await self.resume()
        self.decider._warm.set()
        await service._tick(self, SimpleNamespace(refresh=lambda: None), metrics, None)

    async def _answer(self, call: Call) -> None:
        gate.CALLER.set(gate.Caller(gate._ANYONE, "a host"))
        try:
            await self._agents.Connect(None, call)
        except (CallError, RejectedError, WireError) as error:
            self.process.scheduler.note(NAME, f"a stream ends: {error}")
        finally:
            call.end()

    def _submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Run a disk operation, unless the process has exited."""
        return _done(function, *arguments) if self.process.alive else _done(int)

    def _plan_ended(self, deployment: Deployment, plan: PlanTracker) -> None:
        super()._plan_ended(deployment, plan)
        # A plan that was called off has still balanced the layers that it had switched by then.
        self.done += plan.outcome is Outcome.DONE or (plan.was_called_off and plan.committed > 0)
        self.process.scheduler.note(NAME, plan.summary)


@contextlib.contextmanager
def simulated(scheduler: Scheduler, disk: Disk, breach: Callable[[str], None]) -> Iterator[None]:
    """Give services in the context the simulation's clock, disk and threads, and report their errors as breaches."""

    def now() -> float:
        return _EPOCH + scheduler.now

    def computed(function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        done = _done(function, *arguments)
        answer = Future[Any]()
        give = answer.set_exception if done.exception() else answer.set_result
        outcome: Any = done.exception() or done.result()
        scheduler.at(scheduler.now + scheduler.random.uniform(0.01, 0.3), lambda: give(outcome))
        return answer

    def failed(event: str, **facts: Any) -> None:
        breach(f"the service logged an error: {event} {facts}")

    clock = SimpleNamespace(monotonic=now, time=now, perf_counter=now, process_time=now)
    quiet = SimpleNamespace(
        **dict.fromkeys(("info", "warning", "error"), lambda *_, **__: None), exception=failed
    )
    with contextlib.ExitStack() as stack:
        for module in _MODULES:
            for name, replacement in (("time", clock), ("_log", quiet)):
                if hasattr(module, name):
                    stack.enter_context(patch.object(module, name, replacement))
        secrets = SimpleNamespace(randbits=scheduler.random.getrandbits)
        stack.enter_context(patch.object(store, "secrets", secrets))
        stack.enter_context(patch.object(store_file, "connect", lambda _: (disk.file, "")))
        stack.enter_context(patch.object(decider, "_on_thread", computed))
        yield
        disk.file.close()
