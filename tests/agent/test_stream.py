"""The control stream reports the truth, refuses what is malformed, and comes back for as long as it takes."""

from __future__ import annotations

import queue
import re
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest

from eplb_service.placement import Placement
from eplb_service.wire.codec import PROTOCOL_VERSION, unpack
from eplb_service.wire.generated import agent_pb2, agent_pb2_grpc
from eplb_service.wire.plan import encode_plan
from eplb_service.wire.reporting import EVERYTHING, Reporting
from eplb_service.wire.status import Heartbeat
from tests.agent import live
from tests.swap.world import EXPERTS, LAYERS, LINEAR, RANKS, SLOTS, World
from worker_agent.identity import Identity
from worker_agent.outbox import Outbox
from worker_agent.stream import ServiceStream
from worker_agent.swap.installed import Installed


class FakeService(agent_pb2_grpc.AgentServiceServicer):
    """Welcomes whoever says Hello, keeps what it hears, and says what it is given."""

    def __init__(self) -> None:
        self.heard: queue.SimpleQueue[agent_pb2.ConnectRequest] = queue.SimpleQueue()
        self.to_say: queue.SimpleQueue[agent_pb2.ConnectResponse | None] = queue.SimpleQueue()
        self.metadata: dict[str, Any] = {}
        self.leader_term = 0

    def Connect(self, requests: Iterator[agent_pb2.ConnectRequest], context: grpc.ServicerContext) -> Any:
        self.metadata = dict(context.invocation_metadata())
        self.heard.put(next(requests))
        welcome = agent_pb2.Welcome(
            protocol_version=PROTOCOL_VERSION,
            leader_term=self.leader_term,
            report_steps=4,
            heartbeat_seconds=0.1,
        )
        yield agent_pb2.ConnectResponse(welcome=welcome)
        listening = futures.ThreadPoolExecutor(1)
        listening.submit(lambda: [self.heard.put(request) for request in requests])
        while (message := self.to_say.get()) is not None:
            yield message
        context.abort(grpc.StatusCode.UNAVAILABLE, "going away")


class Scene:
    """A fake service and one agent's stream to it."""

    def __init__(self, **settings: Any) -> None:
        self.service = FakeService()
        self.server = grpc.server(futures.ThreadPoolExecutor(4))
        agent_pb2_grpc.add_AgentServiceServicer_to_server(self.service, self.server)
        port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()
        self.outbox = Outbox(heat_segments=2)
        self.installed = Installed.first(1, LINEAR, LINEAR.default_log2phy()[1])
        self.highest_term = 0
        self.identity = Identity("default", "group", 1, RANKS, "here", (0, 1, 2), LAYERS, EXPERTS, SLOTS, 64)
        self.stream = ServiceStream(
            live.settings(service=f"127.0.0.1:{port}", **settings),
            self.identity,
            self.outbox,
            lambda: self.installed,
            lambda: self.highest_term,
            lambda: Heartbeat(step=5, error="tired"),
        )

    def __enter__(self) -> Scene:
        return self

    def __exit__(self, *_: object) -> None:
        self.service.to_say.put(None)
        self.stream.close(5)
        self.server.stop(0).wait()

    def hear(self, kind: str) -> Any:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            request = self.service.heard.get(timeout=60)
            if request.WhichOneof("message") == kind:
                return getattr(request, kind)
        raise AssertionError(f"no {kind}")

    def wait_for_reporting(self, reporting: Reporting) -> None:
        deadline = time.monotonic() + 60
        while self.stream.reporting != reporting:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def say_plan(self, plan: agent_pb2.Plan) -> None:
        self.service.to_say.put(agent_pb2.ConnectResponse(plan=plan))


def _plan(rank: int = 1) -> agent_pb2.Plan:
    """A plan of the world that changes one layer's tables only: it needs no moves."""
    return encode_plan(World().plan(1, [(0, 0)])[rank])


def test_hello_says_who_is_there_and_what_is_installed() -> None:
    with Scene(auth_token="sesame") as scene:
        hello = scene.hear("hello")
        assert (hello.deployment, hello.rank, hello.ep_size, hello.token_group) == ("default", 1, RANKS, 1)
        assert hello.placement.digest == LINEAR.digest()
        local_LS = unpack(hello.placement.local_physical_to_logical, (LAYERS, SLOTS), "slots")
        assert np.array_equal(local_LS, LINEAR.phy2log_LRS[:, 1])
        assert scene.service.metadata["authorization"] == "Bearer sesame"


def test_hello_has_the_highest_leader_term_that_the_rank_has_seen() -> None:
    with Scene() as scene:
        assert scene.hear("hello").highest_term == 0
        scene.service.leader_term = 7
        scene.service.to_say.put(None)
        scene.hear("hello")
        scene.service.leader_term = 5
        scene.service.to_say.put(None)
        # The switch has not heard of it yet: the model has made no step.
        assert scene.hear("hello").highest_term == 7
        scene.highest_term = 9
        scene.service.to_say.put(None)
        assert scene.hear("hello").highest_term == 9


def test_heat_goes_out_and_heartbeats_fill_the_silence() -> None:
    with Scene() as scene:
        scene.outbox.put(live.segment(first_step=8, steps=4))
        report = scene.hear("heat_report")
        assert report.first_step == 8
        assert list(report.step_phases) == [2, 2, 2, 2]
        assert scene.hear("heartbeat").error == "tired"


def test_what_the_service_asks_for_is_followed_until_it_asks_otherwise() -> None:
    with Scene() as scene:
        scene.hear("heartbeat")
        assert scene.stream.reporting == EVERYTHING
        reporting = agent_pb2.Reporting(source_sums=True, one_in=4, report_steps=64)
        scene.service.to_say.put(agent_pb2.ConnectResponse(reporting=reporting))
        scene.wait_for_reporting(Reporting(source_sums=True, one_in=4, report_steps=64))
        # The next service is of a release that asks for nothing.
        scene.service.to_say.put(None)
        scene.wait_for_reporting(EVERYTHING)


def test_heartbeats_go_out_however_much_heat_there_is() -> None:
    """A busy rank that has halted must not look healthy."""
    with Scene() as scene:
        scene.hear("hello")
        stop = threading.Event()

        def flood() -> None:
            step = 0
            while not stop.wait(0.005):
                scene.outbox.put(live.segment(first_step=step, steps=1))
                step += 1

        flooding = threading.Thread(target=flood)
        flooding.start()
        try:
            beats = [scene.hear("heartbeat").error for _ in range(3)]
        finally:
            stop.set()
            flooding.join()
        assert beats == ["tired"] * 3


def test_a_valid_plan_arrives_and_a_malformed_one_is_refused_by_name() -> None:
    with Scene() as scene:
        scene.say_plan(_plan())
        assert scene.stream.plans.get(timeout=60).plan.plan_id == 1
        broken = _plan()
        broken.plan_id = 2
        scene.say_plan(broken)
        status = scene.hear("plan_status")
        assert (status.plan_id, status.state) == (2, agent_pb2.PLAN_STATE_REFUSED)
        assert "digest" in status.reason
        assert scene.stream.plans.empty()


def test_moves_that_do_not_start_from_what_is_installed_are_refused() -> None:
    with Scene() as scene:
        scene.say_plan(encode_plan(World().plan(1, [(0, 1)])[1]))
        status = scene.hear("plan_status")
        assert status.state == agent_pb2.PLAN_STATE_REFUSED
        assert "has no move to change" in status.reason


def test_ranks_that_share_tokens_must_get_one_table() -> None:
    with Scene() as scene:
        scene.stream._identity = Identity(
            "default", "group", 1, RANKS, "here", (0, 0, 0), LAYERS, EXPERTS, SLOTS, 64
        )
        scene.say_plan(_plan())
        status = scene.hear("plan_status")
        assert "ranks 0 and 1 see the same tokens but would get different tables" in status.reason


def test_experts_that_are_bound_to_their_rank_must_stay_there() -> None:
    with Scene() as scene:
        scene.stream._identity = replace(scene.stream._identity, rank_bound=True)
        assert scene.stream._identity.hello(scene.installed).shape.rank_bound
        scene.say_plan(encode_plan(World().plan(1, [(0, 1)])[1]))
        status = scene.hear("plan_status")
        assert status.state == agent_pb2.PLAN_STATE_REFUSED
        assert re.search(
            r"rank \d would get expert \d, but grouped experts stay on their ranks", status.reason
        )


def test_the_agent_comes_back_when_the_stream_is_cut() -> None:
    with Scene() as scene:
        scene.hear("hello")
        scene.installed = scene.installed.with_layer(0, LINEAR.phy2log_LRS[0], scene.installed.log2phy_LE[0])
        scene.service.to_say.put(None)
        assert scene.hear("hello").placement.epoch == 1


class Refusing(agent_pb2_grpc.AgentServiceServicer):
    """Turns everybody away without a look at what they say."""

    def Connect(self, _: Iterator[agent_pb2.ConnectRequest], context: grpc.ServicerContext) -> Any:
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is wrong")


def test_the_reason_of_a_refusal_is_reported_however_it_crosses_the_hello(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("worker_agent.stream._FIRST_BACKOFF_SECONDS", 0.001)
    monkeypatch.setattr("worker_agent.stream._LAST_BACKOFF_SECONDS", 0.001)
    server = grpc.server(futures.ThreadPoolExecutor(1))
    agent_pb2_grpc.add_AgentServiceServicer_to_server(Refusing(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    placement = Placement.linear(1, 4, 1, 4)
    installed = Installed.first(0, placement, placement.default_log2phy()[0])
    # A large one is on its way for longer.
    identity = Identity("default", "x" * 200_000, 0, 1, "here", (0,), 1, 4, 4, 64)
    service = f"127.0.0.1:{port}"
    with caplog.at_level("WARNING", logger="eplb.agent"):
        stream = ServiceStream(
            live.settings(service=service), identity, Outbox(1), lambda: installed, int, Heartbeat
        )
        deadline = time.monotonic() + 60
        while len(caplog.records) < 40 and time.monotonic() < deadline:
            time.sleep(0.01)
        stream.close(5)
    server.stop(0).wait()
    said = {record.getMessage() for record in caplog.records}
    assert said == {f"rank 0: no stream to {service}: the token is wrong"}
    assert len(caplog.records) >= 40


def test_a_service_that_is_not_there_costs_the_model_nothing() -> None:
    outbox = Outbox(heat_segments=1)
    placement = Placement.linear(1, 4, 1, 4)
    installed = Installed.first(0, placement, placement.default_log2phy()[0])
    identity = Identity("default", "group", 0, 1, "here", (0,), 1, 4, 4, 64)
    stream = ServiceStream(live.settings(), identity, outbox, lambda: installed, int, Heartbeat)
    began = time.monotonic()
    for step in range(1000):
        outbox.put(live.segment(first_step=step, steps=1))
    # Far below what waiting for a service would take.
    assert time.monotonic() - began < 10.0
    assert outbox.dropped_steps == 999
    assert not stream.connected
    stream.close(5)
