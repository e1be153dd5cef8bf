"""What carries experts follows from where they are; whatever it is, they arrive whole by the deadline or not at all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from eplb_service.wire.plan_codec import WireLayer
from tests.agent import live
from tests.ranks import run_ranks
from tests.swap.device_like import DeviceLikeLanes
from worker_agent import meeting
from worker_agent.agent import Agent
from worker_agent.device import Mark, SideStream
from worker_agent.swap import transfer
from worker_agent.swap.budget import ByteBudget
from worker_agent.swap.group import AgentGroup, MeetingError
from worker_agent.swap.lane import device
from worker_agent.swap.lane.backend import Backend, choose_backend
from worker_agent.swap.lane.device import DeviceLane
from worker_agent.swap.lane.lane import Deadline, Parcel
from worker_agent.swap.lane.lanes import Lanes
from worker_agent.swap.machine import StartTransfer
from worker_agent.swap.staging import install
from worker_agent.swap.transfer import TransferLimits, TransferWorker

RANKS, SLOTS = 3, 4
HERE = torch.device("cpu")


# Which library


@pytest.mark.parametrize(
    ("asked", "device_type", "chosen"),
    [
        ("auto", "cpu", Backend.GLOO),
        ("auto", "cuda", Backend.NCCL),
        ("auto", "npu", Backend.HCCL),
        ("auto", "xpu", Backend.GLOO),
        ("gloo", "cuda", Backend.GLOO),
        ("gloo", "npu", Backend.GLOO),
        ("nccl", "cuda", Backend.NCCL),
        ("hccl", "npu", Backend.HCCL),
    ],
)
def test_the_device_chooses_the_library(asked: Any, device_type: str, chosen: Backend) -> None:
    assert choose_backend(asked, device_type) is chosen


@pytest.mark.parametrize(
    ("asked", "device_type", "reached"),
    [("nccl", "npu", "cuda"), ("hccl", "cuda", "npu"), ("nccl", "cpu", "cuda")],
)
def test_a_library_that_cannot_reach_the_experts_is_refused(
    asked: Any, device_type: str, reached: str
) -> None:
    with pytest.raises(
        ValueError, match=f"between {reached} devices, these are on {device_type}; ask for auto"
    ):
        choose_backend(asked, device_type)


def _ask_for_nccl() -> str:
    layers = live.layers_of(1, live.linear_RS(2))
    with pytest.raises(MeetingError) as caught:
        Agent.start(layers, dist.group.WORLD, live.settings(transfer_backend="nccl"))
    return str(caught.value)


def test_all_ranks_are_told_that_a_backend_does_not_fit() -> None:
    told = run_ranks(2, _ask_for_nccl)
    assert told[0] == told[1]
    assert told[0].startswith("rank 0: transfer_backend nccl moves experts between cuda devices")


# Experts arrive


class PlainLayer:
    """The weights of one layer; rank ``r``'s slot ``s`` holds ``100 r + s`` and its own noise."""

    def __init__(self, rank: int, where: torch.device = HERE) -> None:
        fill = (100.0 * rank + torch.arange(SLOTS)).reshape(-1, 1, 1)
        self._weights = [
            (fill + torch.rand(SLOTS, 3, 5)).to(where),
            (fill + torch.rand(SLOTS, 7, 1)).to(torch.float16).to(where),
        ]

    def expert_weights(self) -> list[torch.Tensor]:
        return self._weights


MOVES = [(0, 1, 1, 0, 5), (1, 2, 2, 3, 6), (2, 0, 0, 2, 7), (0, 3, 2, 1, 8)]
"""A ring and one more: source rank and slot, destination rank and slot, expert."""


def _order(generation: int, *moves: tuple[int, ...]) -> StartTransfer:
    none = np.zeros(0, dtype=np.int32)
    return StartTransfer(WireLayer(0, none, none, (), np.array(moves, dtype=np.int32)), generation, 0)


def exchange_experts(make: Callable[[AgentGroup], Lanes], where: torch.device = HERE) -> None:
    """Two transfers over ``RANKS`` ranks, with checksums and odd chunks; what is staged is what its source holds."""
    group, _ = AgentGroup.meet(dist.group.WORLD, "here", "127.0.0.1", None)
    layer = PlainLayer(group.rank, where)
    every: list[Any] = [None] * group.size
    dist.all_gather_object(every, [weight.cpu() for weight in layer.expert_weights()])
    lanes = make(group)
    lanes.open_first()
    limits = TransferLimits(timedelta(seconds=20), chunk_bytes=17, verify=True)
    budget = ByteBudget(1 << 20)
    budget.refill()
    worker = TransferWorker(lanes, limits, budget)
    for generation in (1, 2):
        worker.start(_order(generation, *MOVES), layer)  # type: ignore[arg-type]
        while (result := worker.poll()) is None:
            time.sleep(0.001)
        assert result.error is None, result.error
        incoming = [move for move in MOVES if move[2] == group.rank]
        assert result.slots == [slot for _, _, _, slot, _ in incoming]
        for tensor, staged in enumerate(result.staged):
            assert staged.device.type == where.type
            for row, (source, slot, _, _, _) in enumerate(incoming):
                assert torch.equal(staged[row].cpu(), every[source][tensor][slot])
    worker.close()
    dist.barrier()


def _over_gloo() -> None:
    exchange_experts(lambda group: Lanes(group, Backend.GLOO, HERE, timedelta(seconds=20)))


def _over_a_device() -> None:
    exchange_experts(lambda group: DeviceLikeLanes(group, Backend.HCCL, HERE, timedelta(seconds=20)))


@pytest.mark.parametrize("over", [_over_gloo, _over_a_device])
def test_experts_arrive_whole_over_every_kind_of_lane(over: Callable[[], None]) -> None:
    run_ranks(RANKS, over)


def _switch_over_a_device() -> dict[str, Any]:
    meeting.Lanes = DeviceLikeLanes  # type: ignore[misc]
    layers, still = (live.layers_of(1, live.linear_RS(RANKS)) for _ in range(2))
    agent = Agent.start(
        layers, dist.group.WORLD, live.settings(transfer_timeout_seconds=2, verify_transfers=True)
    )
    target = live.keep_staying_slots(live.linear_RS(RANKS), live.shuffled_RS(RANKS, seed=1))
    if agent.identity.rank == 2:
        reserve = agent._switch.transfers.staging.reserve

        def fail_once(*_: Any) -> Any:
            agent._switch.transfers.staging.reserve = reserve  # type: ignore[method-assign]
            raise MemoryError("no room to stage")

        agent._switch.transfers.staging.reserve = fail_once  # type: ignore[method-assign]

    def between(step: int) -> None:
        if step in (2, 120):
            agent._stream.plans.put(live.plan_for(agent, {0: target}, plan_id=1 + step))
        time.sleep(0.005)

    worst = live.drive(agent, layers, still, 200, between)
    facts = {"worst": worst, "aborted": agent.stats.plans_aborted, "epoch": agent.installed.epoch}
    agent.close()
    return {**facts, "halted": agent.halted, "seconds": agent.stats.transfer_seconds}


def test_a_transfer_that_fails_on_one_rank_fails_on_all_before_any_device_waits() -> None:
    """The others learn of it where they meet on the host; the next plan goes through on a new lane."""
    facts = run_ranks(RANKS, _switch_over_a_device)
    assert max(fact["worst"] for fact in facts) < 1e-5
    assert [(fact["aborted"], fact["epoch"], fact["halted"]) for fact in facts] == [(1, 1, None)] * RANKS


# Order, deadlines, memory


class FakeGroup:
    """Writes down what is asked of it."""

    def __init__(self, log: list[str], *, sends_views: bool = True, aborts: bool = True) -> None:
        self.sends_views = sends_views
        self._log, self._aborts = log, aborts

    def exchange(self, outgoing: Parcel | None, incoming: Parcel | None) -> None:
        self._log.append("exchange")
        if incoming is not None:
            incoming.data.fill_(7)

    def release(self) -> None:
        self._log.append("release")

    def abort(self) -> bool:
        self._log.append("abort")
        return self._aborts


class FakeHost:
    """A meeting at which every peer is."""

    def __init__(self, log: list[str], *, absent: bool = False) -> None:
        self._log, self._absent = log, absent

    def exchange(self, outgoing: Parcel | None, incoming: Parcel | None, deadline: Deadline) -> None:
        assert outgoing is not None
        if self._absent:
            raise TimeoutError("nobody came")
        self._log.append(f"meet {outgoing.peer}")

    def retire(self) -> None:
        self._log.append("leave")


class FakeMark(Mark):
    """A point that the device gets to when ``reached`` says so."""

    def __init__(self, log: list[str], reached: Callable[[], bool]) -> None:
        self._log, self._reached = log, reached
        log.append("mark")

    def passed(self) -> bool:
        if reached := self._reached():
            self._log.append("passed")
        return reached

    def hold_current_stream(self) -> None:
        self._log.append("hold")


def _lane(log: list[str], reached: Callable[[], bool] = lambda: True, **changes: Any) -> DeviceLane:
    absent = changes.pop("absent", False)
    return DeviceLane(FakeGroup(log, **changes), FakeHost(log, absent=absent), lambda: FakeMark(log, reached))  # type: ignore[arg-type]


def test_a_device_exchange_is_done_only_when_the_device_is() -> None:
    log: list[str] = []
    looks = iter([False, False, True])
    lane = _lane(log, lambda: next(looks))
    lane.exchange(
        Parcel(2, torch.zeros(4, dtype=torch.uint8)),
        Parcel(1, torch.zeros(4, dtype=torch.uint8)),
        Deadline(5),
    )
    assert log == ["meet 1", "meet 2", "exchange", "mark", "passed"]
    lane.retire()
    assert log[-2:] == ["leave", "release"]


def test_what_begins_in_the_middle_of_its_storage_goes_by_a_bounce() -> None:
    staging = torch.zeros(12, dtype=torch.uint8)
    lane = _lane([], sends_views=False)
    for chunk in staging.split(5):
        lane.exchange(None, Parcel(1, chunk), Deadline(5))
    assert staging.tolist() == [7] * 12


def test_nothing_is_queued_on_the_device_for_a_peer_that_does_not_come() -> None:
    log: list[str] = []
    lane = _lane(log, absent=True)
    with pytest.raises(TimeoutError):
        lane.exchange(Parcel(1, torch.zeros(4, dtype=torch.uint8)), None, Deadline(5))
    lane.retire()
    assert log == ["leave", "release"]


@pytest.mark.parametrize("aborts", [True, False])
def test_memory_that_a_device_may_still_write_to_is_never_given_back(
    aborts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[DeviceLane] = []
    monkeypatch.setattr(device, "_STILL_WRITTEN", kept)
    log: list[str] = []
    lane = _lane(log, lambda: False, aborts=aborts)
    with pytest.raises(TimeoutError, match=r"not done within 0\.01 s"):
        lane.exchange(None, Parcel(1, torch.zeros(4, dtype=torch.uint8)), Deadline(0.01))
    lane.retire()
    assert log == ["meet 1", "exchange", "mark", "leave", "abort"]
    assert kept == ([] if aborts else [lane])


class OneLane:
    """The lanes of rank 0, all the same one."""

    rank, device = 0, HERE

    def __init__(self, log: list[str], lane: DeviceLane) -> None:
        self._log, self._lane = log, lane

    def lane(self, number: int) -> DeviceLane:
        return self._lane

    def retire(self) -> None:
        self._log.append("retire")


def test_a_thread_that_hangs_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_LATE_SECONDS", 0.0)
    hung = threading.Event()
    limits = TransferLimits(timedelta(seconds=0.02), 4096)
    worker = TransferWorker(OneLane([], _lane([])), limits, ByteBudget(None))  # type: ignore[arg-type]
    monkeypatch.setattr(worker.staging, "reserve", lambda *_: hung.wait(20) or [])
    worker.start(_order(1, (1, 0, 0, 2, 5)), PlainLayer(0))  # type: ignore[arg-type]
    assert worker.failing is None
    time.sleep(0.1)
    assert worker.failing == "the transfer thread has missed its deadline and does not answer"
    hung.set()
    worker.close()
    assert worker.failing == "the transfer thread has died"


class LoggedStream(SideStream):
    """Writes down when work is queued on it."""

    log: list[str] = []  # noqa: RUF012 - one test's

    def current(self) -> Any:
        self.log.append("side stream")
        return super().current()


def test_staging_is_written_only_after_what_the_model_had_queued_and_told_of_only_when_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So a commit that has just been queued reads the old staging, and the next one finds all of the new."""
    log = LoggedStream.log = []
    arrived = [False]
    monkeypatch.setattr(transfer, "Mark", lambda where: FakeMark(log, lambda: True))
    monkeypatch.setattr(transfer, "SideStream", LoggedStream)

    lanes = OneLane(log, _lane(log, lambda: arrived[0]))
    worker = TransferWorker(lanes, TransferLimits(timedelta(seconds=20), 4096), ByteBudget(None))  # type: ignore[arg-type]
    worker.start(_order(1, (1, 0, 0, 2, 5)), PlainLayer(0))  # type: ignore[arg-type]
    time.sleep(0.05)
    assert worker.poll() is None
    assert log == ["mark", "side stream", "hold", "meet 1", "exchange", "mark"]
    arrived[0] = True
    while (result := worker.poll()) is None:
        time.sleep(0.001)
    worker.close()
    assert (result.error, result.slots) == (None, [2])
    assert all(bool((staged.view(torch.uint8) == 7).all()) for staged in result.staged)
    assert log[-1] == "retire"


def test_a_transfer_that_is_late_fails_on_a_rank_that_had_nothing_to_carry_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []
    limits = TransferLimits(timedelta(seconds=0.05), 4096)
    worker = TransferWorker(OneLane(log, _lane(log)), limits, ByteBudget(None))  # type: ignore[arg-type]
    monkeypatch.setattr(worker.staging, "reserve", lambda *_: time.sleep(0.1) or [])
    worker.start(_order(1, (1, 0, 2, 2, 5)), PlainLayer(0))  # type: ignore[arg-type]
    while (result := worker.poll()) is None:
        time.sleep(0.001)
    worker.close()
    assert result.error == "transfer of layer 0 failed: not done within 0.05 s"
    assert log == ["retire", "retire"]


def test_weights_that_were_loaded_in_inference_mode_can_be_replaced() -> None:
    class Loaded(PlainLayer):
        def __init__(self) -> None:
            with torch.inference_mode():
                super().__init__(0)
                self.expert_map, self.log2phy = (
                    torch.zeros(2, dtype=torch.int32),
                    torch.zeros(2, dtype=torch.int32),
                )

    layer = Loaded()
    assert layer.expert_weights()[0].is_inference()
    staged = [torch.ones_like(weight[:1]) for weight in layer.expert_weights()]
    table = torch.ones(2, dtype=torch.int32)
    install(layer, staged, [3], table, table)  # type: ignore[arg-type]
    assert all(bool((weight[3] == 1).all()) for weight in layer.expert_weights())
    assert layer.log2phy.tolist() == [1, 1]
