"""Device lanes preserve order, meet deadlines, and never reuse memory that the device may still access."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.agent import live
from tests.swap.carried import CPU, PlainLayer, order
from worker_agent.device import Mark, SideStream
from worker_agent.swap import lane as lane_module
from worker_agent.swap import transfer
from worker_agent.swap.lane import Deadline, Parcel, _DeviceLane, check_announced
from worker_agent.swap.staging import copy_into
from worker_agent.swap.transfer import ByteBudget, TransferResult, TransferWorker


class FakeGroup:
    """Device group that records its calls."""

    sends_views = True

    def __init__(self, log: list[str], *, aborts: bool = True) -> None:
        self._log = log
        self._aborts = aborts

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
    """Fake host lane whose handshake every peer joins. If ``absent`` is true, the handshake times out."""

    def __init__(self, log: list[str], *, absent: bool = False) -> None:
        self._log = log
        self._absent = absent
        self.sends: int | None = None

    def meet(self, outgoing: list[Parcel], incoming: list[Parcel], deadline: Deadline) -> None:
        if self._absent:
            raise TimeoutError("no peer joined")
        self._log += [f"meet {peer}" for peer in sorted({parcel.peer for parcel in (*outgoing, *incoming)})]
        if self.sends is not None:
            check_announced(incoming[0].peer, torch.tensor([self.sends, 0]), incoming)

    def retire(self) -> None:
        self._log.append("leave")


class FakeMark(Mark):
    """Mark that the device reaches once ``reached`` returns True."""

    def __init__(self, log: list[str], reached: Callable[[], bool]) -> None:
        self._log = log
        self._reached = reached
        log.append("mark")

    def passed(self) -> bool:
        if reached := self._reached():
            self._log.append("passed")
        return reached

    def hold_current_stream(self) -> None:
        self._log.append("hold")


def _parcel(peer: int) -> Parcel:
    return Parcel(peer, torch.zeros(4, dtype=torch.uint8))


def _lane(log: list[str], reached: Callable[[], bool] = lambda: True, **changes: Any) -> _DeviceLane:
    """Return a lane whose peers announce the sizes that this rank expects."""
    host = FakeHost(log, absent=changes.pop("absent", False))
    return _DeviceLane(FakeGroup(log, **changes), host, lambda: FakeMark(log, reached))


def test_an_exchange_returns_only_after_the_device_has_passed_its_mark() -> None:
    log: list[str] = []
    polls = iter([False, False, True])
    lane = _lane(log, lambda: next(polls))
    lane.exchange([_parcel(2)], [_parcel(1)], Deadline(5))
    assert log == ["meet 1", "meet 2", "exchange", "mark", "passed"]
    lane.retire()
    assert log[-2:] == ["leave", "release"]


def test_no_device_work_is_queued_if_a_peer_is_absent() -> None:
    log: list[str] = []
    lane = _lane(log, absent=True)
    with pytest.raises(TimeoutError):
        lane.exchange([_parcel(1)], [], Deadline(5))
    lane.retire()
    assert log == ["leave", "release"]


@pytest.mark.parametrize("aborts", [True, False])
def test_a_lane_that_cannot_be_aborted_keeps_its_memory(aborts, monkeypatch) -> None:
    kept: list[_DeviceLane] = []
    monkeypatch.setattr(lane_module, "_LOST_LANES", kept)
    log: list[str] = []
    lane = _lane(log, lambda: False, aborts=aborts)
    with pytest.raises(TimeoutError, match=r"did not finish within 0\.3 s"):
        lane.exchange([], [_parcel(1)], Deadline(0.3))
    lane.retire()
    assert log == ["meet 1", "exchange", "mark", "leave", "abort"]
    assert kept == ([] if aborts else [lane])


class OneLane:
    """Stand-in for rank 0's ``Lanes``, whose ``lane`` always returns the same lane."""

    rank = 0
    device = CPU

    def __init__(self, log: list[str], lane: _DeviceLane) -> None:
        self._log = log
        self._lane = lane

    def lane(self, number: int) -> _DeviceLane:
        return self._lane

    def retire(self) -> None:
        self._log.append("retire")


def _worker(log: list[str], lane: _DeviceLane, **settings: Any) -> TransferWorker:
    # The fake peers send no checksums, so transfers cannot be verified.
    settings = {"verify_transfers": False, **settings}
    return TransferWorker(OneLane(log, lane), live.settings(**settings), ByteBudget(None))


def _start(worker: TransferWorker, generation: int, *move: int) -> None:
    worker.start(order(generation, move), [PlainLayer(0)])


def _result(worker: TransferWorker) -> TransferResult:
    while (result := worker.poll()) is None:
        time.sleep(0.001)
    return result


def test_a_hanging_transfer_thread_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    hung = threading.Event()
    worker = _worker([], _lane([]), transfer_timeout_seconds=0.02)
    monkeypatch.setattr(worker.staging, "reserve", lambda *_: hung.wait(20) or [])
    _start(worker, 1, 1, 0, 0, 2, 5)
    assert worker.failing is None
    hung.set()
    _result(worker)
    hung.clear()
    monkeypatch.setattr(transfer, "_LATE_SECONDS", 0.0)
    _start(worker, 2, 1, 0, 0, 2, 5)
    time.sleep(0.1)
    assert worker.failing == "the transfer thread has missed its deadline and does not respond"
    hung.set()
    worker.close()
    assert worker.failing == "the transfer thread has died"


class LoggedStream(SideStream):
    """Side stream that logs when work is queued on it."""

    log: list[str] = []  # noqa: RUF012 - reset by its test

    def current(self) -> Any:
        self.log.append("side stream")
        return super().current()


def test_staging_is_written_after_the_queued_model_work_and_reported_when_complete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A commit that is queued before the transfer reads the old experts.

    The next commit reads the complete new ones.
    """
    log = LoggedStream.log = []
    arrived = [False]
    monkeypatch.setattr(transfer, "Mark", lambda _: FakeMark(log, lambda: True))
    monkeypatch.setattr(transfer, "SideStream", LoggedStream)
    worker = _worker(log, _lane(log, lambda: arrived[0]))
    _start(worker, 1, 1, 0, 0, 2, 5)
    expected = ["mark", "side stream", "hold", "meet 1", "exchange", "exchange", "mark"]
    while len(log) < len(expected):
        time.sleep(0.001)
    assert worker.poll() is None
    assert log == expected
    arrived[0] = True
    result = _result(worker)
    worker.close()
    assert (result.error, result.layers[0].slots) == (None, [2])
    assert all(bool((staged.view(torch.uint8) == 7).all()) for staged in result.layers[0].staged)
    assert log[-1] == "retire"


def test_a_late_transfer_also_fails_on_a_rank_without_moves(monkeypatch) -> None:
    log: list[str] = []
    worker = _worker(log, _lane(log), transfer_timeout_seconds=0.05)
    monkeypatch.setattr(worker.staging, "reserve", lambda *_: time.sleep(0.1) or [[]])
    _start(worker, 1, 1, 0, 2, 2, 5)
    result = _result(worker)
    worker.close()
    assert result.error == "transfer of layer 0 failed: did not finish within 0.05 s"
    assert log == ["retire", "retire"]


def test_weights_loaded_in_inference_mode_can_be_replaced() -> None:
    class Loaded(PlainLayer):
        def __init__(self) -> None:
            with torch.inference_mode():
                super().__init__(0)
                self.expert_map, self.log2phy = (torch.zeros(2, dtype=torch.int32) for _ in range(2))

    layer = Loaded()
    assert layer.expert_weights()[0].is_inference()
    staged = [torch.ones_like(weight[:1]) for weight in layer.expert_weights()]
    table = torch.ones(2, dtype=torch.int32)
    copy_into(layer, staged, [3], table, table)
    assert all(bool((weight[3] == 1).all()) for weight in layer.expert_weights())
    assert layer.log2phy.tolist() == [1, 1]


def test_a_peer_with_a_different_size_is_rejected_before_device_work_is_queued() -> None:
    log: list[str] = []
    host = FakeHost(log)
    host.sends = 5
    lane = _DeviceLane(FakeGroup(log), host, lambda: FakeMark(log, lambda: True))
    with pytest.raises(ValueError, match="expected 4 bytes from rank 1, but it announced 5"):
        lane.exchange([_parcel(2)], [_parcel(1)], Deadline(5))
    assert log == ["meet 1", "meet 2"]
