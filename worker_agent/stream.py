"""The agent's end of the control stream: a thread that reconnects for ever and never touches the model."""

from __future__ import annotations

import contextlib
import logging
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeAlias

import grpc

from eplb_service.wire.fields import WireError
from eplb_service.wire.generated import agent_pb2, agent_pb2_grpc
from eplb_service.wire.heat import HeatReport, encode_heat_report
from eplb_service.wire.hello import Welcome, decode_welcome, encode_hello
from eplb_service.wire.parts import in_parts
from eplb_service.wire.reporting import EVERYTHING, decode_reporting
from eplb_service.wire.status import Heartbeat, PlanState, PlanStatus, encode_heartbeat, encode_plan_status
from worker_agent.checked_plan import CheckedPlan, check_plan
from worker_agent.heartbeats import Heartbeats
from worker_agent.identity import Identity
from worker_agent.outbox import Outbox
from worker_agent.settings import AgentSettings
from worker_agent.swap.installed import Installed

_log = logging.getLogger("eplb.agent")

_FIRST_BACKOFF_SECONDS = 0.2
_LAST_BACKOFF_SECONDS = 10.0
_WELCOME_SECONDS = 10.0
_FIRST_BEAT_SECONDS = 1.0
_PLANS_KEPT = 16

Beat: TypeAlias = Callable[[], Heartbeat]


class ServiceStream:
    """Says Hello, sends what the outbox holds, and puts checked plans into ``plans``.

    ``welcome`` and ``reporting`` are what the service has asked for last.

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
        installed: Callable[[], Installed],
        highest_term: Callable[[], int],
        beat: Beat,
    ) -> None:
        self.plans: queue.SimpleQueue[CheckedPlan] = queue.SimpleQueue()
        self.welcome: Welcome | None = None
        self.reporting = EVERYTHING
        self.connected = False
        self._settings = settings
        self._identity = identity
        self._outbox = outbox
        self._installed = installed
        self._highest_term = highest_term
        self._welcomed_term = 0
        self._beat = beat
        self._closing = threading.Event()
        self._call: grpc.Call | None = None
        self._thread = self._started()

    def keep_alive(self) -> None:
        """Start the thread again where something has ended it: the service must not lose a rank for good."""
        if not self._thread.is_alive() and not self._closing.is_set():
            _log.error(
                "rank %d: the control stream's thread had died; it is started again", self._identity.rank
            )
            self.connected = False
            self._thread = self._started()

    def close(self, timeout: float) -> None:
        """End the stream and its thread, waiting at most ``timeout`` seconds."""
        self._closing.set()
        call = self._call
        if call is not None:
            call.cancel()
        self._outbox.wake()
        self._thread.join(timeout)

    def _started(self) -> threading.Thread:
        thread = threading.Thread(target=self._run, name="eplb-stream", daemon=True)
        thread.start()
        return thread

    def _run(self) -> None:
        backoff = _FIRST_BACKOFF_SECONDS
        while not self._closing.is_set():
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
                backoff = _FIRST_BACKOFF_SECONDS
            self.connected = False
            self._closing.wait(backoff * random.uniform(0.5, 1.5))  # noqa: S311 - jitter, not a secret
            backoff = min(2 * backoff, _LAST_BACKOFF_SECONDS)

    def _talk(self, stub: agent_pb2_grpc.AgentServiceStub) -> None:
        """One connection, from Hello to its end."""
        over = threading.Event()
        token = self._settings.token()
        metadata = [] if token is None else [("authorization", f"Bearer {token}")]
        call = stub.Connect(self._requests(over), metadata=metadata)
        self._call = call
        impatience = threading.Timer(_WELCOME_SECONDS, call.cancel)
        impatience.start()
        try:
            for response in call:
                impatience.cancel()
                self._hear(response)
        finally:
            impatience.cancel()
            call.cancel()
            over.set()
            self._outbox.wake()

    def _requests(self, over: threading.Event) -> Iterator[agent_pb2.ConnectRequest]:
        """What this side says, in messages that the service takes; runs on a thread of gRPC's."""
        for request in self._statements(over):
            yield from in_parts(request)

    def _statements(self, over: threading.Event) -> Iterator[agent_pb2.ConnectRequest]:
        """Heartbeats with any news go out however much else there is to say."""
        # The switch hears of a term at the model's next step, which may be late.
        term = max(self._highest_term(), self._welcomed_term)
        yield agent_pb2.ConnectRequest(hello=encode_hello(self._identity.hello(self._installed(), term)))
        heartbeats = Heartbeats(time.monotonic())
        while not over.is_set() and not self._closing.is_set():
            left = heartbeats.left(time.monotonic())
            if left <= 0:
                welcome = self.welcome
                interval = welcome.heartbeat_seconds if welcome else _FIRST_BEAT_SECONDS
                beat = self._beat()
                if heartbeats.look(time.monotonic(), beat, interval):
                    yield agent_pb2.ConnectRequest(heartbeat=encode_heartbeat(beat))
                continue
            item = self._outbox.take(timeout=left)
            if over.is_set():
                if item is not None:
                    self._outbox.restore(item)
                return
            if isinstance(item, HeatReport):
                report = replace(item, dropped_steps=self._outbox.dropped_steps)
                heartbeats.said_other()
                yield agent_pb2.ConnectRequest(heat_report=encode_heat_report(report))
            elif item is not None:
                yield agent_pb2.ConnectRequest(plan_status=encode_plan_status(item))

    def _hear(self, response: agent_pb2.ConnectResponse) -> None:
        kind = response.WhichOneof("message")
        if kind == "welcome":
            self.welcome = decode_welcome(response.welcome)
            self.reporting = self.welcome.reporting
            self._welcomed_term = max(self._welcomed_term, self.welcome.leader_term)
            self.connected = True
            _log.info("rank %d: connected to %s", self._identity.rank, self._settings.service)
        elif kind == "reporting":
            self.reporting = decode_reporting(response.reporting)
        elif kind == "plan":
            try:
                self._keep(check_plan(response.plan, self._identity, self._installed()))
            except WireError as error:
                self._outbox.put(PlanStatus(response.plan.plan_id, PlanState.REFUSED, reason=str(error)))

    def _keep(self, plan: CheckedPlan) -> None:
        """For the model's next step; the oldest goes where a model at rest takes none."""
        while self.plans.qsize() >= _PLANS_KEPT:
            with contextlib.suppress(queue.Empty):
                self.plans.get_nowait()
        self.plans.put(plan)

    def _log_lost(self, reason: str) -> None:
        if self._closing.is_set():
            return
        _log.warning("rank %d: no stream to %s: %s", self._identity.rank, self._settings.service, reason)
