"""Agent side of the control stream. Its thread reconnects forever and never touches the model."""

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
    Balance,
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
"""Minimum time after a logged failure before a known reason is logged again. It doubles with each logged failure."""
_MAX_REASONS = 8
"""Maximum number of distinct reasons that are logged as soon as they first occur."""
_WELCOME_SECONDS = 10.0
_INITIAL_BEAT_SECONDS = 1.0
"""Heartbeat interval until the service specifies one."""
_SETTLING_SECONDS = 1.0
"""Minimum time without moves after which an observed engine's layout is announced.

Engines may move one layer at a time, over several seconds. Ranks that announced different layouts would be rejected.
"""
_PLANS_KEPT = 16
"""Maximum number of orders pending for the model's next step."""
_STALL_SECONDS = 60.0
"""Minimum duration of a reported stall. A healthy stream waits less, even for a welcome or for other ranks' heat."""

_MAX_STATUSES = 4096
"""Maximum number of queued statuses. A plan has few per layer, so the queue fills only during a very long outage."""
_HELLO_REQUEST = "send another Hello"
"""Suffix of the service's reason for ending a stream if the service only needs the rank's current layout."""
_MAX_SKIPPED_BEATS = 4
"""Maximum number of consecutive heartbeats without news that may be skipped."""

_Outgoing: TypeAlias = HeatReport | PlanStatus


class Outbox:
    """Queue from the model's thread to the stream's. Statuses are sent first. The model's thread is never blocked.

    Parameters
    ----------
    heat_reports
        Maximum number of queued heat reports. Adding one more drops the oldest.
    runtime
        Source of locks.

    Attributes
    ----------
    lost_steps
        Number of steps whose heat was lost before it reached the outbox.
    """

    def __init__(self, heat_reports: int = 64, runtime: Runtime = REAL) -> None:
        self.lost_steps = 0
        self._dropped_steps = 0
        self._heat: deque[HeatReport] = deque()
        self._max_heat = heat_reports
        self._statuses: deque[PlanStatus] = deque(maxlen=_MAX_STATUSES)
        self._changed = runtime.condition()

    @property
    def dropped_steps(self) -> int:
        """Number of steps that are not reported because their heat was dropped here or lost earlier."""
        return self._dropped_steps + self.lost_steps

    def put(self, item: _Outgoing) -> None:
        """Add an item. If there are too many heat reports, drop the oldest."""
        with self._changed:
            if isinstance(item, HeatReport):
                self._heat.append(item)
                if len(self._heat) > self._max_heat:
                    self._dropped_steps += self._heat.popleft().steps
            else:
                self._statuses.append(item)
            self._changed.notify()

    def restore(self, item: _Outgoing) -> None:
        """Put an unsent item back at the front of the queue."""
        with self._changed:
            if not isinstance(item, HeatReport):
                self._statuses.appendleft(item)
            elif len(self._heat) < self._max_heat:
                self._heat.appendleft(item)
            else:
                self._dropped_steps += item.steps

    def thin(self, is_requested: Callable[[HeatReport], bool]) -> None:
        """Remove heat reports that are no longer requested. Their steps do not count as dropped."""
        with self._changed:
            self._heat = deque(report for report in self._heat if is_requested(report))

    def take(self, timeout: float) -> _Outgoing | None:
        """Return the next item to send, or ``None`` if ``timeout`` seconds pass without one or ``wake`` is called."""
        with self._changed:
            if not self._heat and not self._statuses:
                self._changed.wait(timeout)
            if self._statuses:
                return self._statuses.popleft()
            return self._heat.popleft() if self._heat else None

    def wake(self) -> None:
        """Make a blocked ``take`` return."""
        with self._changed:
            self._changed.notify_all()


class HeartbeatSchedule:
    """Schedule for a rank's heartbeats. It does no I/O; the caller passes the monotonic time in seconds.

    Heat reports also show the service that a rank is alive, and with many ranks, heartbeats cost the service more than
    heat does. A heartbeat without news is therefore skipped if heat was sent in the current or previous interval. After
    four consecutive skips, the next heartbeat is always sent, so that a service that missed a message catches up. No
    rank is silent for more than three intervals.

    Parameters
    ----------
    now
        Current time. The first heartbeat is due immediately.
    """

    def __init__(self, now: float) -> None:
        self._next_at = now
        self._sent: tuple[int, int, str] | None = None
        self._heat_in_interval = False
        self._heat_in_previous = False
        self._skipped = 0

    def seconds_left(self, now: float) -> float:
        """Return the number of seconds until ``is_due`` should next be called."""
        return self._next_at - now

    def note_heat(self) -> None:
        """Record that heat was sent, which tells the service that the rank is alive and which step it has reached."""
        self._heat_in_interval = True

    def is_due(self, now: float, beat: Heartbeat, interval: float) -> bool:
        """Return True if ``beat`` must be sent, and schedule the next call in ``interval`` seconds."""
        self._next_at = now + interval
        heat_sent = self._heat_in_interval or self._heat_in_previous
        self._heat_in_previous = self._heat_in_interval
        self._heat_in_interval = False
        content = (beat.epoch, beat.digest, beat.error)
        if content == self._sent and heat_sent and self._skipped < _MAX_SKIPPED_BEATS:
            self._skipped += 1
            return False
        self._sent = content
        self._skipped = 0
        return True


class OutageLog:
    """Rate limiter for connection logs. It does no I/O; the caller passes the monotonic time in seconds.

    The first failure is logged. The next one is logged after at least a minute, the one after that after at least two
    more minutes, then four, and so on. The first few distinct failure reasons are logged as soon as they occur.
    """

    def __init__(self) -> None:
        self._reasons = set[str]()
        self._next_at = float("-inf")
        self._wait = _INITIAL_SILENCE_SECONDS
        self._logged = True

    def logs(self, now: float, reason: str) -> bool:
        """Return True if this failure must be logged."""
        is_new = reason not in self._reasons and len(self._reasons) < _MAX_REASONS
        if now >= self._next_at:
            self._next_at = now + self._wait
            self._wait *= 2
        elif not is_new:
            return False
        if is_new:
            self._reasons.add(reason)
        self._logged = True
        return True

    def logs_return(self, now: float) -> bool:
        """Return True if this connection must be logged, as the first one ever or the first since a logged failure."""
        self._next_at = min(self._next_at, now + _INITIAL_SILENCE_SECONDS)
        self._wait = _INITIAL_SILENCE_SECONDS
        logged = self._logged
        self._logged = False
        return logged


class ServiceStream:
    """Control stream to the service. It introduces the rank, sends the outbox's items, and queues incoming orders.

    Parameters
    ----------
    settings
        The agent's settings.
    identity
        This rank's identity within the deployment.
    outbox
        Queue of items to send.
    installed
        Callable that returns this rank's current layout. The stream's threads call it.
    highest_term
        Callable that returns the highest leader term that the switch has received. The stream's threads call it.
    beat
        Callable that returns the heartbeat to send. The stream's threads call it.
    runtime
        Clock, threads and locks to use.

    Attributes
    ----------
    plans
        Orders from the service that the model's thread has not processed yet.
    welcome
        Last welcome from the service; ``None`` before the first.
    reporting
        Heat that the service requests.
    balance
        Last balance from the service; ``None`` on ranks other than 0, and on a new connection until a balance arrives.
    connected
        True if the service has welcomed this rank and the stream is open.
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
        self.balance: Balance | None = None
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
        self._stalled = False
        self._thread = self._start_thread()

    def keep_alive(self) -> None:
        """Restart the thread if it has died, so that the service does not lose this rank permanently.

        A stall is logged once when it is detected and once when the thread resumes.
        """
        if not self._thread.is_alive() and not self._closing.is_set():
            _log.error("rank %d: the control stream's thread has died; restarting it", self._identity.rank)
            self.connected = False
            self._thread = self._start_thread()
        now = self._runtime.now()
        sending_since = self._sending_since if self.connected else None
        stall = max(now - (since or now) for since in (self._receiving_since, sending_since))
        if (stall > _STALL_SECONDS) != self._stalled:
            self._stalled = not self._stalled
            change = (
                f"has been stalled for {stall:.0f} s and is not sending heat"
                if self._stalled
                else "has resumed"
            )
            _log.warning("rank %d: the control stream %s", self._identity.rank, change)

    def close(self, timeout: float) -> None:
        """End the stream, and wait up to ``timeout`` seconds for its thread to finish."""
        self._closing.set()
        call = self._call
        if call is not None:
            call.cancel()
        self._outbox.wake()
        self._thread.join(timeout)

    def _start_thread(self) -> threading.Thread:
        return self._runtime.spawn("eplb-stream", self._run)

    def _run(self) -> None:
        backoff = _INITIAL_BACKOFF_SECONDS
        while not self._closing.is_set():
            self._receiving_since = self._runtime.now()
            try:
                with self._settings.security.open(self._settings.service) as channel:
                    self._run_connection(agent_pb2_grpc.AgentServiceStub(channel))
            except grpc.RpcError as error:
                self._log_lost(getattr(error, "details", error.__str__)())
            except OSError as error:
                self._log_lost(f"cannot read the credentials: {error}")
            except Exception:
                # A bug here must neither end balancing permanently nor reach the model.
                _log.exception("rank %d: the control stream failed", self._identity.rank)
            if self.connected:
                backoff = _INITIAL_BACKOFF_SECONDS
            self.connected = False
            self.balance = None
            self._receiving_since = None
            self._closing.wait(backoff * random.uniform(0.5, 1.5))  # noqa: S311 - jitter, not a secret
            backoff = min(2 * backoff, _MAX_BACKOFF_SECONDS)

    def _run_connection(self, stub: agent_pb2_grpc.AgentServiceStub) -> None:
        """Open a connection, and handle the service's messages until the connection ends."""
        ended = self._runtime.event()
        token = self._settings.token()
        metadata = [] if token is None else [("authorization", f"Bearer {token}")]
        call = stub.Connect(self._requests(ended), metadata=metadata)
        self._call = call
        welcome_timer = self._runtime.later(_WELCOME_SECONDS, call.cancel)
        try:
            self._receiving_since = None
            for response in call:
                welcome_timer.cancel()
                self._receiving_since = self._runtime.now()
                self._handle(response)
                self._receiving_since = None
        finally:
            welcome_timer.cancel()
            call.cancel()
            ended.set()
            self._sending_since = None
            self._outbox.wake()

    def _requests(self, ended: threading.Event) -> Iterator[agent_pb2.ConnectRequest]:
        """Yield this rank's messages, split into parts that are small enough for the service. Runs on a gRPC thread."""
        for message in self._messages(ended):
            yield from in_parts(message)

    def _messages(self, ended: threading.Event) -> Iterator[agent_pb2.ConnectRequest]:
        """Yield the hello, heartbeats and queued items. A long queue does not delay heartbeats that carry news."""
        # The switch learns of a new term only at the model's next step, which may be a long time away.
        term = max(self._highest_term(), self._welcomed_term)
        layout = self._installed()
        yield agent_pb2.ConnectRequest(hello=encode(self._identity.hello(layout, term)))
        heartbeats = HeartbeatSchedule(self._runtime.now())
        # The service learns the layouts of an observed engine only from Hellos. After a move, heartbeats therefore
        # report the new layout once all older heat has been sent, and newer heat waits for the next Hello.
        observed = self._identity.shape.observed
        has_moved = False
        newest_epoch = layout.epoch
        while not ended.is_set() and not self._closing.is_set():
            self._sending_since = self._runtime.now()
            seconds = heartbeats.seconds_left(self._runtime.now())
            if seconds <= 0:
                welcome = self.welcome
                interval = welcome.heartbeat_seconds if welcome else _INITIAL_BEAT_SECONDS
                beat = self._beat()
                if observed and (not has_moved or beat.epoch != newest_epoch):
                    newest_epoch = beat.epoch
                    beat = replace(beat, epoch=layout.epoch, digest=layout.digest)
                    if has_moved:
                        interval = min(interval, _SETTLING_SECONDS)
                if heartbeats.is_due(self._runtime.now(), beat, interval):
                    yield agent_pb2.ConnectRequest(heartbeat=encode(beat))
                continue
            if has_moved:
                ended.wait(seconds)
                continue
            item = self._outbox.take(timeout=seconds)
            has_moved = observed and isinstance(item, HeatReport) and max(item.layer_epochs) > layout.epoch
            if has_moved:
                heartbeats = HeartbeatSchedule(self._runtime.now())  # the next one is due immediately
                newest_epoch = layout.epoch
            if ended.is_set() or has_moved:
                if item is not None:
                    self._outbox.restore(item)
            elif isinstance(item, HeatReport):
                report = replace(item, dropped_steps=self._outbox.dropped_steps)
                heartbeats.note_heat()
                yield agent_pb2.ConnectRequest(heat_report=encode(report))
            elif item is not None:
                yield agent_pb2.ConnectRequest(plan_status=encode(item))

    def _handle(self, response: agent_pb2.ConnectResponse) -> None:
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
        elif kind == "balance":
            self.balance = decode(Balance, response.balance)
        elif kind == "plan":
            installed = self._installed()
            try:
                self._enqueue((check_plan(response.plan, self._identity, installed), installed.digest))
            except WireError as error:
                self._outbox.put(PlanStatus(response.plan.plan_id, PlanState.REFUSED, reason=str(error)))
        elif kind == "call_off":
            self._enqueue(decode(CallOff, response.call_off))

    def _enqueue(self, order: Order) -> None:
        """Queue an order for the model's next step. If the queue is full, drop the oldest order."""
        while self.plans.qsize() >= _PLANS_KEPT:
            with contextlib.suppress(queue.Empty):
                self.plans.get_nowait()
        self.plans.put(order)

    def _log_lost(self, reason: str) -> None:
        if reason.endswith(_HELLO_REQUEST):
            _log.debug("rank %d: %s", self._identity.rank, reason)
        elif not self._closing.is_set() and self._outages.logs(self._runtime.now(), reason):
            _log.warning(
                "rank %d: no control stream to %s: %s", self._identity.rank, self._settings.service, reason
            )
