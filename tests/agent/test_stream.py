"""The control stream: its reports, its validation of messages, and its reconnection to the service."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from eplb_core.wire.agent import EVERYTHING, Balance, CallOff, Heartbeat, Reporting, Shape
from eplb_core.wire.codec import PROTOCOL_VERSION, encode, unpack
from eplb_core.wire.fields import WireError
from eplb_core.wire.generated import agent_pb2, agent_pb2_grpc
from tests.agent import live
from tests.swap.placed import EXPERTS, INSTALLED, LAYERS, LINEAR, RANKS, SLOTS, plan_of
from worker_agent.stream import HeartbeatSchedule, OutageLog, Outbox, ServiceStream
from worker_agent.swap.rank_layout import Identity, check_plan

SHAPE = Shape(RANKS, LAYERS, EXPERTS, SLOTS, 64)
IDENTITY = Identity("default", "group", 1, "here", (0, 1, 2), SHAPE)


class FakeService(agent_pb2_grpc.AgentServiceServicer):
    """Service that welcomes every agent, records its messages in ``heard``, and sends the messages in ``to_say``."""

    def __init__(self) -> None:
        self.heard: queue.SimpleQueue[agent_pb2.ConnectRequest] = queue.SimpleQueue()
        self.to_say: queue.SimpleQueue[agent_pb2.ConnectResponse | None] = queue.SimpleQueue()
        self.metadata: dict[str, Any] = {}
        self.leader_term = 0

    def Connect(self, requests: Iterator[agent_pb2.ConnectRequest], context: grpc.ServicerContext) -> Any:
        self.metadata = dict(context.invocation_metadata())
        self.heard.put(next(requests))
        welcome = agent_pb2.Welcome(protocol_version=PROTOCOL_VERSION, leader_term=self.leader_term)
        welcome.report_steps = 4
        welcome.heartbeat_seconds = 0.1
        yield agent_pb2.ConnectResponse(welcome=welcome)
        listening = futures.ThreadPoolExecutor(1)
        listening.submit(lambda: [self.heard.put(request) for request in requests])
        while (message := self.to_say.get()) is not None:
            yield message
        context.abort(grpc.StatusCode.UNAVAILABLE, "going away")


class Scene:
    """A fake service and one agent's stream to it."""

    def __init__(
        self, service: FakeService | None = None, identity: Identity = IDENTITY, **settings: Any
    ) -> None:
        self.service = service or FakeService()
        self.server = grpc.server(futures.ThreadPoolExecutor(4))
        agent_pb2_grpc.add_AgentServiceServicer_to_server(self.service, self.server)
        port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()
        self.outbox = Outbox(heat_reports=2)
        self.installed = INSTALLED
        self.highest_term = 0
        self.beat = Heartbeat(step=5, error="tired")
        self.address = f"127.0.0.1:{port}"
        states = (lambda: self.installed, lambda: self.highest_term, lambda: self.beat)
        settings = live.settings(service=self.address, **settings)
        self.stream = ServiceStream(settings, identity, self.outbox, *states)

    def __enter__(self) -> Scene:
        return self

    def __exit__(self, *_: object) -> None:
        self.service.to_say.put(None)
        self.stream.close(5)
        self.server.stop(0).wait()

    def hear(self, kind: str) -> Any:
        while (request := self.service.heard.get(timeout=60)).WhichOneof("message") != kind:
            pass
        return getattr(request, kind)

    def wait_for_reporting(self, reporting: Reporting) -> None:
        while self.stream.reporting != reporting:
            time.sleep(0.01)

    def say_plan(self, plan: agent_pb2.Plan) -> None:
        self.service.to_say.put(agent_pb2.ConnectResponse(plan=plan))


def test_hello_contains_the_identity_and_the_placement() -> None:
    with Scene(auth_token="sesame") as scene:
        hello = scene.hear("hello")
        assert (hello.deployment, hello.rank, hello.ep_size, hello.token_group) == ("default", 1, RANKS, 1)
        assert hello.placement.digest == LINEAR.digest()
        local_LS = unpack(hello.placement.local_physical_to_logical, (LAYERS, SLOTS), "slots")
        assert np.array_equal(local_LS, LINEAR.phy2log_LRS[:, 1])
        assert scene.service.metadata["authorization"] == "Bearer sesame"


def test_hello_after_a_reconnect_has_the_current_layout_and_the_highest_term() -> None:
    with Scene() as scene:
        assert scene.hear("hello").highest_term == 0
        scene.service.leader_term = 7
        scene.service.to_say.put(None)
        scene.hear("hello")
        scene.service.leader_term = 5
        scene.service.to_say.put(None)
        # The switch does not know term 7 yet, because the model has not run a step.
        assert scene.hear("hello").highest_term == 7
        scene.highest_term = 9
        scene.installed = scene.installed.with_layer(0, LINEAR.phy2log_LRS[0], scene.installed.log2phy_LE[0])
        scene.service.to_say.put(None)
        hello = scene.hear("hello")
        assert (hello.highest_term, hello.placement.epoch) == (9, 1)


def test_reporting_options_apply_until_the_next_service_changes_them() -> None:
    with Scene() as scene:
        scene.hear("heartbeat")
        assert scene.stream.reporting == EVERYTHING
        reporting = agent_pb2.Reporting(source_sums=True, one_in=4, report_steps=64)
        scene.service.to_say.put(agent_pb2.ConnectResponse(reporting=reporting))
        scene.wait_for_reporting(Reporting(source_sums=True, one_in=4, report_steps=64))
        # The next service runs a release that sends no reporting options.
        scene.service.to_say.put(None)
        scene.wait_for_reporting(EVERYTHING)


def test_a_flood_of_heat_does_not_suppress_heartbeats() -> None:
    """A rank that reports a lot of heat must not look healthy after it has halted."""
    with Scene() as scene:
        scene.hear("hello")
        stop = threading.Event()

        def flood() -> None:
            while not stop.wait(0.005):
                scene.outbox.put(live.segment(first_step=8, steps=1))

        flooding = threading.Thread(target=flood)
        flooding.start()
        try:
            assert [scene.hear("heartbeat").error for _ in range(3)] == ["tired"] * 3
            report = scene.hear("heat_report")
            assert (report.first_step, list(report.step_phases)) == (8, [2])
        finally:
            stop.set()
            flooding.join()


def test_heat_under_a_newer_layout_waits_until_the_next_hello_of_an_observed_rank() -> None:
    observed = replace(IDENTITY, shape=replace(SHAPE, observed=True))
    with Scene(identity=observed) as scene:
        assert scene.hear("hello").placement.epoch == 0
        # The engine moves experts while a report under the old layout is still on its way.
        scene.installed = scene.installed.with_layer(0, LINEAR.phy2log_LRS[0], scene.installed.log2phy_LE[0])
        scene.beat = Heartbeat(epoch=1, digest=scene.installed.digest)
        assert [scene.hear("heartbeat").epoch for _ in range(2)] == [0, 0]
        for step, epochs in ((8, (0,) * LAYERS), (9, scene.installed.layer_epochs)):
            scene.outbox.put(replace(live.segment(first_step=step, steps=1), layer_epochs=epochs))
        assert scene.hear("heat_report").first_step == 8
        kinds = []
        asked = False
        while kinds[-1:] != ["hello"]:
            request = scene.service.heard.get(timeout=60)
            kinds.append(request.WhichOneof("message"))
            if kinds[-1] == "heartbeat" and request.heartbeat.epoch == 1 and not asked:
                scene.service.to_say.put(None)
                asked = True
        assert "heat_report" not in kinds
        assert request.hello.placement.epoch == 1
        report = scene.hear("heat_report")
        assert (report.first_step, report.dropped_steps) == (9, 0)


def test_an_observed_layout_is_announced_once_no_expert_has_moved_between_two_heartbeats() -> None:
    """Ranks that announce different layouts are rejected, and engines may move one layer at a time."""
    final = 10
    moves = itertools.chain(range(1, final), itertools.repeat(final))
    observed = replace(IDENTITY, shape=replace(SHAPE, observed=True))
    with Scene(identity=observed) as scene:
        scene.hear("hello")
        scene.outbox.put(replace(live.segment(first_step=8, steps=1), layer_epochs=(1,) * LAYERS))
        scene.stream._beat = lambda: Heartbeat(epoch=next(moves))
        announced = 0
        while announced == 0:
            announced = scene.hear("heartbeat").epoch
        assert announced == final


def test_a_valid_plan_is_queued_and_a_malformed_one_is_rejected() -> None:
    with Scene() as scene:
        scene.say_plan(encode(plan_of(0)))
        assert scene.stream.plans.get(timeout=60)[0].plan_id == 1
        broken = encode(plan_of(0))
        broken.plan_id = 2
        scene.say_plan(broken)
        status = scene.hear("plan_status")
        assert (status.plan_id, status.state) == (2, agent_pb2.PLAN_STATE_REFUSED)
        assert "digest" in status.reason
        assert scene.stream.plans.empty()


def test_a_call_off_is_queued_after_its_plan() -> None:
    with Scene() as scene:
        scene.say_plan(encode(plan_of(0)))
        scene.service.to_say.put(agent_pb2.ConnectResponse(call_off=agent_pb2.CallOff(plan_id=1)))
        assert scene.stream.plans.get(timeout=60)[0].plan_id == 1
        assert scene.stream.plans.get(timeout=60) == CallOff(1)


def test_the_balance_is_known_until_the_stream_ends() -> None:
    with Scene() as scene:
        scene.service.to_say.put(agent_pb2.ConnectResponse(balance=agent_pb2.Balance(par=1.25, steps=32)))
        while scene.stream.balance is None:
            time.sleep(0.01)
        assert scene.stream.balance == Balance(1.25, 32)
        scene.service.to_say.put(None)
        while scene.stream.balance is not None:
            time.sleep(0.01)


@pytest.mark.parametrize(
    ("turn", "token_groups", "plan_groups", "bound", "message"),
    [
        (
            1,
            (0, 1, 2),
            (0, 1, 2),
            False,
            "rank 0 slot 0 gets its weights from slot 0, which does not hold its expert in layer 0",
        ),
        (0, (0, 0, 0), (0, 0, 0), False, "does not match the digest of token group 0"),
        (0, (0, 1, 1), (0, 1, 2), False, "a digest for each of the 1 token groups with several ranks, got 0"),
        (1, (0, 1, 2), (0, 1, 2), True, r"rank \d would get expert \d, but grouped experts must stay"),
    ],
)
def test_a_plan_that_does_not_fit_this_rank_is_rejected(
    turn, token_groups, plan_groups, bound, message
) -> None:
    """Each plan has one of three defects.

    Its moves do not match the layout, its tables differ within a token group, or it moves rank-bound experts.
    """
    identity = replace(IDENTITY, token_groups=token_groups, shape=replace(SHAPE, rank_bound=bound))
    with pytest.raises(WireError, match=message):
        check_plan(encode(plan_of(turn, token_groups=plan_groups)), identity, INSTALLED)


class RejectingService(FakeService):
    """Service that rejects every connection before it reads a message."""

    calls = 0

    def Connect(self, _: Iterator[agent_pb2.ConnectRequest], context: grpc.ServicerContext) -> Any:
        self.calls += 1
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is wrong")


def test_the_reason_for_a_rejection_is_logged_even_while_the_hello_is_being_sent(monkeypatch) -> None:
    monkeypatch.setattr("worker_agent.stream._INITIAL_BACKOFF_SECONDS", 0.001)
    monkeypatch.setattr("worker_agent.stream._MAX_BACKOFF_SECONDS", 0.001)
    # The rank is still sending its large Hello when the rejection arrives.
    large = replace(IDENTITY, group_id="x" * 200_000)
    reasons = list[str]()
    monkeypatch.setattr(
        ServiceStream, "_log_lost", lambda stream, why: stream._closing.is_set() or reasons.append(why)
    )
    with Scene(RejectingService(), large):
        while len(reasons) < 40:
            time.sleep(0.01)
    assert set(reasons) == {"the token is wrong"}


def test_an_outage_is_logged_at_growing_intervals_and_its_end_is_logged_once(monkeypatch, caplog) -> None:
    outages = OutageLog()
    assert outages.logs_return(0)
    logged = [
        now for now in range(700) if outages.logs(now, "refused" if now < 200 else "the token is wrong")
    ]
    assert logged == [0, 60, 180, 200, 420]
    assert [outages.logs_return(now) for now in (700, 700)] == [True, False]
    # A service that repeatedly comes back and fails again counts as one outage.
    assert [now for now in range(701, 1000) if outages.logs(now, "refused")] == [760, 820, 940]
    monkeypatch.setattr("worker_agent.stream._INITIAL_BACKOFF_SECONDS", 0.001)
    with caplog.at_level("INFO", logger="eplb.agent"), Scene(RejectingService()) as scene:
        while scene.service.calls < 3:
            time.sleep(0.01)
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [f"rank 1: no control stream to {scene.address}: the token is wrong"]


@pytest.mark.parametrize("stuck", ["beat", "installed"])
def test_a_stall_and_a_recovery_of_the_stream_are_each_logged_once(
    stuck: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("worker_agent.stream._STALL_SECONDS", 0.3)
    with Scene() as scene:
        scene.hear("heartbeat")
        goes_on = threading.Event()
        work = getattr(scene.stream, f"_{stuck}")
        setattr(scene.stream, f"_{stuck}", lambda: goes_on.wait(60) and work())
        scene.say_plan(encode(plan_of(0)))
        for reports in (1, 2):
            while len(caplog.records) < reports:
                scene.stream.keep_alive()
                time.sleep(0.01)
            goes_on.set()
        time.sleep(0.5)
        scene.stream.keep_alive()
    messages = [record.getMessage().partition(" for ")[0] for record in caplog.records]
    assert messages == [
        "rank 1: the control stream has been stalled",
        "rank 1: the control stream has resumed",
    ]


def test_a_full_outbox_drops_the_oldest_heat_and_counts_its_steps() -> None:
    outbox = Outbox(heat_reports=2)
    segments = [live.segment(first_step=step, steps=4) for step in (0, 4, 8)]
    for segment in segments:
        outbox.put(segment)
    assert outbox.dropped_steps == 4
    assert outbox.take(timeout=0) is segments[1]
    outbox.restore(segments[1])
    # Heat that is no longer requested is removed but not counted as dropped.
    outbox.thin(lambda report: report.first_step != 4)
    assert [outbox.take(timeout=0) for _ in range(2)] == [segments[2], None]
    assert outbox.dropped_steps == 4


INTERVAL = 2.0


HEAT = {"heat": True}
SILENCE = {"heat": False}
ONE_IN_FIVE = [True, *([False] * 4 + [True]) * 2, False]


@pytest.mark.parametrize(
    ("checks", "due"),
    [
        ([SILENCE] * 6, [True] * 6),
        ([HEAT] * 12, ONE_IN_FIVE),
        # Heat still replaces heartbeats if its reports are further apart than the interval.
        ([SILENCE, HEAT] * 6, ONE_IN_FIVE),
        # Changes, including recovery from an error, are sent immediately.
        (
            [*[HEAT] * 2, *[HEAT | {"error": "out of memory"}] * 2, *[HEAT] * 2, *[HEAT | {"epoch": 1}] * 2],
            [True, False] * 4,
        ),
        # After heat stops, heartbeats resume at the second check.
        ([*[HEAT] * 3, *[SILENCE] * 4], [True, False, False, False, True, True, True]),
    ],
)
def test_a_rank_sends_fewer_heartbeats_while_it_sends_heat(checks, due) -> None:
    """The schedule is checked every two seconds."""
    now = 100.0
    step = 0
    schedule = HeartbeatSchedule(now)
    sent = []
    for check in checks:
        assert schedule.seconds_left(now) == 0
        step += 40
        if check["heat"]:
            schedule.note_heat()
        epoch = check.get("epoch", 0)
        beat = Heartbeat(step=step, epoch=epoch, digest=epoch, error=check.get("error", ""))
        sent.append(schedule.is_due(now, beat, INTERVAL))
        assert schedule.seconds_left(now) == INTERVAL
        now += INTERVAL
    assert sent == due


def test_a_token_is_not_sent_in_plain_text_to_another_host(tmp_path: Path) -> None:
    for credentials in ({"auth_token": "sesame"}, {"auth_token_file": tmp_path / "token"}):
        with pytest.raises(ValueError, match="would be sent in plain text"):
            live.settings(service="eplb:50551", **credentials)
        live.settings(service="eplb:50551", tls_ca=tmp_path / "ca.pem", **credentials)
        live.settings(service="eplb:50551", plaintext_token=True, **credentials)
        live.settings(service="[::1]:50551", **credentials)


def test_a_token_file_is_read_at_every_connection(tmp_path: Path) -> None:
    path = tmp_path / "token"
    settings = live.settings(auth_token_file=path)
    for token in ("first", "second"):
        path.write_text(token + "\n")
        assert settings.token() == token
    with pytest.raises(ValueError, match="not both"):
        live.settings(auth_token_file=path, auth_token="third")
