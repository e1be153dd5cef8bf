"""A service that sends arbitrary messages to chosen ranks and records their replies."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import numpy as np

from eplb_core.placement import default_log2phy
from eplb_core.planner.plan import LayerPlan, Plan
from eplb_core.wire.agent import Hello, decode_hello
from eplb_core.wire.codec import MAX_MESSAGE_BYTES, PROTOCOL_VERSION, encode
from eplb_core.wire.generated import agent_pb2, agent_pb2_grpc
from eplb_service.control.core.deployed_layout import DeployedLayout
from eplb_service.control.core.plan_tracker import PlanTracker
from tests.agent.live import keep_staying_slots
from worker_agent.swap.rank_layout import _restoring_moves

_PATIENCE = 180.0


class RogueService(agent_pb2_grpc.AgentServiceServicer):
    """Service that welcomes every rank that sends a Hello, with leader term ``term``."""

    def __init__(self, ranks: int, term: int = 1) -> None:
        self.ranks = ranks
        self.term = term
        self.statuses: queue.SimpleQueue[tuple[int, agent_pb2.PlanStatus]] = queue.SimpleQueue()
        self._hellos: dict[int, Hello] = {}
        self._say: dict[int, queue.SimpleQueue[agent_pb2.ConnectResponse | None]] = {}
        self._plan_id = 0
        self._threads = futures.ThreadPoolExecutor(4 * ranks)
        options = [("grpc.max_send_message_length", 4 * MAX_MESSAGE_BYTES)]
        self._server = grpc.server(self._threads, options=options)
        agent_pb2_grpc.add_AgentServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> RogueService:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        for responses in self._say.values():
            responses.put(None)
        self._server.stop(0).wait()

    def Connect(self, requests: Iterator[agent_pb2.ConnectRequest], context: grpc.ServicerContext) -> Any:
        hello = decode_hello(next(requests).hello)
        responses: queue.SimpleQueue[agent_pb2.ConnectResponse | None] = queue.SimpleQueue()
        self._hellos[hello.rank] = hello
        self._say[hello.rank] = responses
        self._threads.submit(self._listen, hello.rank, requests, responses)
        welcome = agent_pb2.Welcome(
            protocol_version=PROTOCOL_VERSION, leader_term=self.term, report_steps=8, heartbeat_seconds=0.1
        )
        yield agent_pb2.ConnectResponse(welcome=welcome)
        while (message := responses.get()) is not None:
            yield message

    def disconnect(self) -> None:
        """End every stream, so that the ranks reconnect and send a new Hello."""
        self._hellos.clear()
        for responses in self._say.values():
            responses.put(None)

    def wait_for_hellos(self) -> DeployedLayout:
        """Wait for a Hello from every rank and return the layout that the ranks serve."""
        deadline = time.monotonic() + _PATIENCE
        while len(self._hellos) < self.ranks:
            assert time.monotonic() < deadline, f"only ranks {sorted(self._hellos)} have sent a Hello"
            time.sleep(0.02)
        return DeployedLayout.assembled(dict(self._hellos))

    def plans(self, base: DeployedLayout, *layers: int, seed: int = 0) -> list[agent_pb2.Plan]:
        """Return one plan per rank that shuffles ``layers``, in the real service's format."""
        self._plan_id += 1
        updates = tuple(_shuffled(base, layer, seed + layer) for layer in layers)
        plan = PlanTracker.of(self._plan_id, base, Plan(updates, ()))
        return [encode(plan.rank_plan(self.term, rank, range(self.ranks))) for rank in range(self.ranks)]

    def send(self, plans: list[agent_pb2.Plan], *ranks: int) -> None:
        """Send each of ``ranks`` its own plan. An empty ``ranks`` means all ranks."""
        for rank in ranks or range(self.ranks):
            self._say[rank].put(agent_pb2.ConnectResponse(plan=plans[rank]))

    def hear(self, state: int, times: int) -> list[tuple[int, agent_pb2.PlanStatus]]:
        """Return the next ``times`` statuses with this state, each with the rank that sent it. Drop other statuses."""
        matching_statuses: list[tuple[int, agent_pb2.PlanStatus]] = []
        deadline = time.monotonic() + _PATIENCE
        while len(matching_statuses) < times:
            rank, status = self.statuses.get(timeout=max(0.01, deadline - time.monotonic()))
            if status.state == state:
                matching_statuses.append((rank, status))
        return matching_statuses

    def _listen(self, rank: int, requests: Iterator[Any], responses: queue.SimpleQueue[Any]) -> None:
        try:
            for request in requests:
                if request.WhichOneof("message") == "plan_status":
                    self.statuses.put((rank, request.plan_status))
        except grpc.RpcError:
            pass
        responses.put(None)


def _shuffled(base: DeployedLayout, layer: int, seed: int) -> LayerPlan:
    """Shuffle the experts. An expert that stays on its rank keeps its slot."""
    old_RS = base.placement.phy2log_LRS[layer]
    order = np.random.default_rng(seed).permutation(base.placement.experts)
    new_RS = keep_staying_slots(old_RS, order[old_RS].astype(np.int32))
    tables_RE = default_log2phy(new_RS, base.placement.experts)
    return LayerPlan(layer, new_RS, tables_RE, _restoring_moves(old_RS, new_RS))
