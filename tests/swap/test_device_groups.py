"""NCCL and HCCL are asked for what their interfaces have, in an order that cannot hang, and cannot end the process."""

from __future__ import annotations

import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from worker_agent.swap.lane import Parcel, _HcclGroup, _NcclGroup

HERE = torch.device("cpu")
OUT, IN = Parcel(2, torch.zeros(3, dtype=torch.uint8)), Parcel(1, torch.zeros(3, dtype=torch.uint8))


class FakeLibrary:
    """A process group's class that writes down what is asked of it, and of the environment that it is made in."""

    log: list[str] = []  # noqa: RUF012 - emptied by each test
    options: Any = None
    environment: dict[str, str | None] = {}  # noqa: RUF012

    class Options:
        def __init__(self) -> None:
            self.config = SimpleNamespace()

    def __init__(self, store: object, rank: int, size: int, options: Any) -> None:
        FakeLibrary.options = options
        names = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_BLOCKING_WAIT")
        FakeLibrary.environment = {name: os.environ.get(name) for name in names}
        self.log.append(f"rank {rank} of {size}")

    def _say(self, what: str) -> Any:
        self.log.append(what)
        return SimpleNamespace(wait=lambda: self.log.append(f"wait for {what}"))

    def allreduce(self, tensors: list[torch.Tensor]) -> Any:
        return self._say("allreduce")

    def _start_coalescing(self) -> None:
        self.log.append("group starts")

    def _end_coalescing(self) -> Any:
        return self._say("group")

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self.log.append(f"send to {peer}")

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self.log.append(f"receive from {peer}")

    def batch_isend_irecv(self, ways: list[str], tensors: list[torch.Tensor], peers: list[int]) -> Any:
        assert all(tensor.storage_offset() == 0 for tensor in tensors)
        return self._say(" ".join(f"{way} {peer}" for way, peer in zip(ways, peers, strict=True)))

    def abort(self) -> None:
        self.log.append("abort")

    def abort_hccl_comm(self, reason: str) -> None:
        self.log.append(f"abort_hccl_comm: {reason}")


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> type[FakeLibrary]:
    """Both libraries, and streams that can be waited for."""
    FakeLibrary.log = []
    stream = SimpleNamespace(synchronize=lambda: FakeLibrary.log.append("stream done"))
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeLibrary, raising=False)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    bindings = ModuleType("torch_npu._C._distributed_c10d")
    bindings.ProcessGroupHCCL = FakeLibrary  # type: ignore[attr-defined]
    for name in ("torch_npu", "torch_npu._C"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, bindings.__name__, bindings)
    monkeypatch.setattr(
        torch, "get_device_module", lambda _: SimpleNamespace(current_stream=lambda _: stream)
    )
    return FakeLibrary


def test_nccl_leaves_errors_and_deadlines_to_the_agent(
    library: type[FakeLibrary], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    _NcclGroup(dist.HashStore(), 1, 3, HERE)
    assert set(library.environment.values()) == {"0"}
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"
    assert "TORCH_NCCL_BLOCKING_WAIT" not in os.environ
    assert library.options._timeout.days > 100
    assert library.options.config.max_ctas <= 8


def test_a_torch_without_nccl_gets_a_message_with_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(RuntimeError, match="built without NCCL; ask for the transfer backend gloo"):
        _NcclGroup(dist.HashStore(), 1, 3, HERE)


def test_nccl_has_all_ranks_connected_before_some_exchange_in_one_group(library: type[FakeLibrary]) -> None:
    group = _NcclGroup(dist.HashStore(), 1, 3, HERE)
    assert library.log == ["rank 1 of 3", "allreduce", "wait for allreduce", "stream done"]
    library.log.clear()
    group.exchange(OUT, IN)
    assert library.log == ["group starts", "send to 2", "receive from 1", "group", "wait for group"]
    assert group.abort()
    assert library.log[-1] == "abort"


def test_hccl_exchanges_in_one_batch_and_is_never_called_back(library: type[FakeLibrary]) -> None:
    group = _HcclGroup(dist.HashStore(), 1, 3, HERE)
    assert library.log == ["rank 1 of 3", "allreduce", "wait for allreduce", "stream done"]
    assert library.options._timeout.days > 100
    library.log.clear()
    group.exchange(OUT, IN)
    group.exchange(None, IN)
    assert library.log[::2] == ["isend 2 irecv 1", "irecv 1"]
    assert not group.abort()
    group.release()
    assert library.log[-1].startswith("abort_hccl_comm")
