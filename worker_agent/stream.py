"""The agent's end of the control stream: a thread that reconnects for ever and never touches the model."""

from __future__ import annotations

import contextlib
import logging
import queue
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeAlias

import grpc

from eplb_core.wire.agent import (
    EVERYTHING,
    CallOff,
    Heartbeat,
    PlanState,
    PlanStatus,
    Reporting,
    Welcome,
    decode_welcome,
)
from eplb_core.wire.codec import decode, encode, in_parts
from eplb_core.wire.fields import WireError
from eplb_core.wire.generated import agent_pb2, agent_pb2_grpc
from eplb_core.wire.heat import HeatReport
from worker_agent.runtime import REAL, Runtime
from worker_agent.settings import AgentSettings
from worker_agent.swap.rank_layout import Identity, Order, RankLayout, check_plan

_log = logging.getLogger("eplb.agent")

_INITIAL_BACKOFF_SECONDS = 0.2
_MAX_BACKOFF_SECONDS = 10.0
_INITIAL_SILENCE_SECONDS = 60.0
_MAX_REASONS = 8
_WELCOME_SECONDS = 10.0
_INITIAL_BEAT_SECONDS = 1.0
_PLANS_KEPT = 16
_STILL_SECONDS = 60.0
"""Longer than any wait of a stream that works: for a welcome, before another attempt, for other ranks' heat."""

_MAX_STATUSES = 4096
"""A group makes a handful of statuses per layer and plan; the bound only guards against a service gone for good."""
_MAX_LEFT_OUT = 4
"""Of five heartbeats in a row with nothing new at least one is sent."""

_Outgoing: TypeAlias = HeatReport | PlanStatus


class Outbox:
    """Queue between the model's thread, which never waits here, and the stream's: statuses first, never dropped.

    Parameters
    ----------
    heat_reports
        Reports kept; the oldest is dropped when one more comes.

    ``lost_steps`` are those whose heat never got as far as here.
    """

    def __init__(self, heat_reports: int = 64, runtime: Runtime = REAL) -> None:
        self.lost_steps = 0
        self._dropped_steps = 0
        self._heat: deque[HeatReport] = deque()
        self._most_heat = heat_reports
        self._statuses: deque[PlanStatus] = deque(maxlen=_MAX_STATUSES)
        self._changed = runtime.condition()

    @property
    def dropped_steps(self) -> int:
        """Steps that will not be reported."""
        return self._dropped_steps + self.lost_steps

    def put(self, item: _Outgoing) -> None:
        """Add, dropping the oldest heat where there is no room."""
        with self._changed:
            if isinstance(item, HeatReport):
                self._heat.append(item)
                if len(self._heat) > self._most_heat:
                    self._dropped_steps += self._heat.popleft().steps
            else:
                self._statuses.append(item)
            self._changed.notify()

    def restore(self, item: _Outgoing) -> None:
        """Put back, at the front, what could not be sent."""
        with self._changed:
            if not isinstance(item, HeatReport):
                self._statuses.appendleft(item)
            elif len(self._heat) < self._most_heat:
                self._heat.appendleft(item)
            else:
                self._dropped_steps += item.steps

    def thin(self, wanted: Callable[[HeatReport], bool]) -> None:
        """Remove heat that is no longer asked for; it does not count as dropped."""
        with self._changed:
            self._heat = deque(report for report in self._heat if wanted(report))

    def take(self, timeout: float) -> _Outgoing | None:
        """Return the next item to send; ``None`` after ``timeout`` seconds without any, or on ``wake``."""
        with self._changed:
            if not self._heat and not self._statuses:
                self._changed.wait(timeout)
            if self._statuses:
                return self._statuses.popleft()
            return self._heat.popleft() if self._heat else None

    def wake(self) -> None:
        """Let a waiting ``take`` return."""
        with self._changed:
            self._changed.notify_all()


class HeartbeatSchedule:
    """Decides when a rank sends a heartbeat; pure, times are seconds by any clock that never jumps.

    A service hears of a rank by its heat too, and many ranks' heartbeats cost it more than their heat. So a heartbeat
    with nothing new is left out where heat has gone out since the time before the last; but not for ever, lest a
    service that has missed something never learns it. No rank is silent for more than three intervals.
    """

    def __init__(self, now: float) -> None:
        self._next_at = now
        self._sent: tuple[int, int, str] | None = None
        self._heat_since = self._heat_before = False
        self._left_out = 0

    def seconds_left(self, now: float) -> float:
        """Seconds until ``is_due`` is to be asked."""
        return self._next_at - now

    def note_heat(self) -> None:
        """Note that heat was sent, which shows the service that the rank is alive, and at which step."""
        self._heat_since = True

    def is_due(self, now: float, beat: Heartbeat, interval: float) -> bool:
        """Return whether to send ``beat``; to be asked again ``interval`` seconds later."""
        self._next_at = now + interval
        heat = self._heat_since or self._heat_before
        self._heat_since, self._heat_before = False, self._heat_since
        content = (beat.epoch, beat.digest, beat.error)
        if content == self._sent and heat and self._left_out < _MAX_LEFT_OUT:
            self._left_out += 1
            return False
        self._sent, self._left_out = content, 0
        return True


class OutageLog:
    """Decides which failures to reach the service are logged; pure, times are seconds by a clock that never jumps.

    The first, then after one, two, four minutes and so on; a few reasons that are new at once.
    """

    def __init__(self) -> None:
        self._reasons = set[str]()
        self._next_at, self._wait = float("-inf"), _INITIAL_SILENCE_SECONDS
        self._logged = True

    def logs(self, now: float, reason: str) -> bool:
        """Return whether this failure is to be logged."""
        is_new = reason not in self._reasons and len(self._reasons) < _MAX_REASONS
        if now >= self._next_at:
            self._next_at, self._wait = now + self._wait, 2 * self._wait
        elif not is_new:
            return False
        self._reasons |= {reason} if is_new else set()
        self._logged = True
        return True

    def logs_return(self, now: float) -> bool:
        """Return whether it is to be logged that the service is there: where a failure was, and the first time."""
        self._next_at, self._wait = (
            min(self._next_at, now + _INITIAL_SILENCE_SECONDS),
            _INITIAL_SILENCE_SECONDS,
        )
        logged, self._logged = self._logged, False
        return logged


class ServiceStream:
    """Introduces the rank, sends what the outbox holds, and puts the service's orders into ``plans`` as they arrive.

    ``welcome`` and ``reporting`` are the last that the service has sent.

    Parameters
    ----------
    installed
        Returns what the rank serves now; read from this thread.
    highest_term
        Returns the highest leader term that the switch has heard of; read from this thread.
    beat
        Returns the heartbeat to send; read from this thread.
    """

    def __init__(
        self,
        settings: AgentSettings,
        identity: Identity,
        outbox: Outbox,
        installed: Callable[[], RankLayout],
        highest_term: Callable[[], int],
        beat: Callable[[], Heartbeat],
        runtime: Runtime = REAL,
    ) -> None:
        self.plans: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self.welcome: Welcome | None = None
        self.reporting = EVERYTHING
        self.connected = False
        self._settings = settings
        self._runtime = runtime
        self._identity = identity
        self._outbox = outbox
        self._installed = installed
        self._highest_term = highest_term
        self._welcomed_term = 0
        self._beat = beat
        self._closing = runtime.event()
        self._call: grpc.Call | None = None
        self._outages = OutageLog()
        self._receiving_since: float | None = None
        self._sending_since: float | None = None
        self._stands_still = False
        self._thread = self._started()

    def keep_alive(self) -> None:
        """Start the thread again where something has ended it: the service must not lose a rank for good.

        A thread that neither ends nor goes on is reported, once, and once more when it goes on.
        """
        if not self._thread.is_alive() and not self._closing.is_set():
            _log.error(
                "rank %d: the control stream's thread had died; it is started again", self._identity.rank
            )
            self.connected = False
            self._thread = self._started()
        now = self._runtime.now()
        sending_since = self._sending_since if self.connected else None
        still = max(now - (since or now) for since in (self._receiving_since, sending_since))
        if (still > _STILL_SECONDS) != self._stands_still:
            self._stands_still = not self._stands_still
            what = f"has stood still for {still:.0f} s: no heat goes out" if self._stands_still else "goes on"
            _log.warning("rank %d: the control stream %s", self._identity.rank, what)

    def close(self, timeout: float) -> None:
        """End the stream and its thread, waiting at most ``timeout`` seconds."""
        self._closing.set()
        call = self._call
        if call is not None:
            call.cancel()
        self._outbox.wake()
        self._thread.join(timeout)

    def _started(self) -> threading.Thread:
        return self._runtime.spawn("eplb-stream", self._run)

    def _run(self) -> None:
        backoff = _INITIAL_BACKOFF_SECONDS
        while not self._closing.is_set():
            self._receiving_since = self._runtime.now()
            try:
                with self._settings.security.open(self._settings.service) as channel:
                    self._talk(agent_pb2_grpc.AgentServiceStub(channel))
            except grpc.RpcError as error:
                self._log_lost(getattr(error, "details", error.__str__)())
            except OSError as error:
                self._log_lost(f"cannot read its credentials: {error}")
            except Exception:
                # A defect here must not end balancing for good, nor reach the model.
                _log.exception("rank %d: the control stream failed", self._identity.rank)
            if self.connected:
                backoff = _INITIAL_BACKOFF_SECONDS
            self.connected = False
            self._receiving_since = None
            self._closing.wait(backoff * random.uniform(0.5, 1.5))  # noqa: S311 - jitter, not a secret
            backoff = min(2 * backoff, _MAX_BACKOFF_SECONDS)

    def _talk(self, stub: agent_pb2_grpc.AgentServiceStub) -> None:
        """One connection, from Hello to its end."""
        over = self._runtime.event()
        token = self._settings.token()
        metadata = [] if token is None else [("authorization", f"Bearer {token}")]
        call = stub.Connect(self._requests(over), metadata=metadata)
        self._call = call
        impatience = self._runtime.later(_WELCOME_SECONDS, call.cancel)
        try:
            self._receiving_since = None
            for response in call:
                impatience.cancel()
                self._receiving_since = self._runtime.now()
                self._hear(response)
                self._receiving_since = None
        finally:
            impatience.cancel()
            call.cancel()
            over.set()
            self._sending_since = None
            self._outbox.wake()

    def _requests(self, over: threading.Event) -> Iterator[agent_pb2.ConnectRequest]:
        """Messages of this side, in parts that the service takes; runs on a thread of gRPC's."""
        for request in self._whole_requests(over):
            yield from in_parts(request)

    def _whole_requests(self, over: threading.Event) -> Iterator[agent_pb2.ConnectRequest]:
        """Heartbeats with any news go out however much else there is to send."""
        # The switch hears of a term at the model's next step, which may be late.
        term = max(self._highest_term(), self._welcomed_term)
        yield agent_pb2.ConnectRequest(hello=encode(self._identity.hello(self._installed(), term)))
        heartbeats = HeartbeatSchedule(self._runtime.now())
        while not over.is_set() and not self._closing.is_set():
            self._sending_since = self._runtime.now()
            left = heartbeats.seconds_left(self._runtime.now())
            if left <= 0:
                welcome = self.welcome
                interval = welcome.heartbeat_seconds if welcome else _INITIAL_BEAT_SECONDS
                beat = self._beat()
                if heartbeats.is_due(self._runtime.now(), beat, interval):
                    yield agent_pb2.ConnectRequest(heartbeat=encode(beat))
                continue
            item = self._outbox.take(timeout=left)
            if over.is_set():
                if item is not None:
                    self._outbox.restore(item)
                return
            if isinstance(item, HeatReport):
                report = replace(item, dropped_steps=self._outbox.dropped_steps)
                heartbeats.note_heat()
                yield agent_pb2.ConnectRequest(heat_report=encode(report))
            elif item is not None:
                yield agent_pb2.ConnectRequest(plan_status=encode(item))

    def _hear(self, response: agent_pb2.ConnectResponse) -> None:
        kind = response.WhichOneof("message")
        if kind == "welcome":
            self.welcome = decode_welcome(response.welcome)
            self.reporting = self.welcome.reporting
            self._welcomed_term = max(self._welcomed_term, self.welcome.leader_term)
            self.connected = True
            if self._outages.logs_return(self._runtime.now()):
                _log.info("rank %d: connected to %s", self._identity.rank, self._settings.service)
        elif kind == "reporting":
            self.reporting = decode(Reporting, response.reporting)
        elif kind == "plan":
            installed = self._installed()
            try:
                self._keep((check_plan(response.plan, self._identity, installed), installed.digest))
            except WireError as error:
                self._outbox.put(PlanStatus(response.plan.plan_id, PlanState.REFUSED, reason=str(error)))
        elif kind == "call_off":
            self._keep(decode(CallOff, response.call_off))

    def _keep(self, order: Order) -> None:
        """Queue the order for the model's next step; drop the oldest if an idle model has left the queue full."""
        while self.plans.qsize() >= _PLANS_KEPT:
            with contextlib.suppress(queue.Empty):
                self.plans.get_nowait()
        self.plans.put(order)

    def _log_lost(self, reason: str) -> None:
        if not self._closing.is_set() and self._outages.logs(self._runtime.now(), reason):
            _log.warning("rank %d: no stream to %s: %s", self._identity.rank, self._settings.service, reason)
