"""The NCCL and HCCL groups: their calls in order, and options that keep the libraries from killing the process."""

from __future__ import annotations

import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from worker_agent.swap.lane import Parcel, _HcclGroup, _NcclGroup, hccl_expansion_mode

CPU = torch.device("cpu")
OUT = Parcel(2, torch.zeros(3, dtype=torch.uint8))
IN = Parcel(1, torch.zeros(3, dtype=torch.uint8))


class FakeLibrary:
    """Fake process group that records its calls, and the environment variables that are set when it is constructed."""

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

    def __getattr__(self, name: str) -> Any:
        def called(*arguments: Any) -> Any:
            for tensors in (argument for argument in arguments if isinstance(argument, list)):
                assert all(item.storage_offset() == 0 for item in tensors if isinstance(item, torch.Tensor))
            scalars = [argument for argument in arguments if "tensor" not in str(argument)]
            self.log.append(" ".join(map(str, [name, *scalars])))
            return SimpleNamespace(wait=lambda: self.log.append(f"wait for {name}"))

        return called


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> type[FakeLibrary]:
    """Install fakes of both libraries and of their streams."""
    FakeLibrary.log = []
    stream = SimpleNamespace(synchronize=lambda: FakeLibrary.log.append("stream done"))
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeLibrary, raising=False)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    bindings = ModuleType("torch_npu._C._distributed_c10d")
    bindings.ProcessGroupHCCL = FakeLibrary
    for name in ("torch_npu", "torch_npu._C"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, bindings.__name__, bindings)
    monkeypatch.setattr(
        torch, "get_device_module", lambda _: SimpleNamespace(current_stream=lambda _: stream)
    )
    return FakeLibrary


def test_nccl_error_handling_and_timeouts_are_disabled(library, monkeypatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    _NcclGroup(dist.HashStore(), 1, 3, CPU)
    assert set(library.environment.values()) == {"0"}
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"
    assert "TORCH_NCCL_BLOCKING_WAIT" not in os.environ
    assert library.options._timeout.days > 100
    assert library.options.config.max_ctas <= 8


def test_the_error_for_a_torch_without_nccl_names_the_setting_to_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(RuntimeError, match="built without NCCL; set EPLB_AGENT_TRANSFER_BACKEND=gloo"):
        _NcclGroup(dist.HashStore(), 1, 3, CPU)


def test_nccl_connects_all_ranks_at_startup_and_coalesces_exchanges(
    library: type[FakeLibrary],
) -> None:
    group = _NcclGroup(dist.HashStore(), 1, 3, CPU)
    assert library.log == ["rank 1 of 3", "allreduce", "wait for allreduce", "stream done"]
    library.log.clear()
    group.exchange(OUT, IN)
    assert library.log[:4] == ["_start_coalescing", "send 2 0", "recv 1 0", "_end_coalescing"]
    assert library.log[4:] == ["wait for _end_coalescing"]
    assert group.abort()
    assert library.log[-1] == "abort"


def test_hccl_exchanges_in_one_batch_and_cannot_be_aborted(library: type[FakeLibrary]) -> None:
    group = _HcclGroup(dist.HashStore(), 1, 3, CPU)
    assert library.log == ["rank 1 of 3", "allreduce", "wait for allreduce", "stream done"]
    assert library.options._timeout.days > 100
    assert library.options.hccl_config == {"hccl_buffer_size": 100, "hccl_op_expansion_mode": 1}
    library.log.clear()
    group.exchange(OUT, IN)
    group.exchange(None, IN)
    batch = "batch_isend_irecv"
    assert library.log[::2] == [f"{batch} ['isend', 'irecv'] [2, 1]", f"{batch} ['irecv'] [1]"]
    assert not group.abort()
    group.release()
    assert library.log[-1].startswith("abort_hccl_comm")


@pytest.mark.parametrize(("device", "mode"), [("Ascend910B3", 1), ("Ascend910_9392", 2), ("", 1)])
def test_hccl_lanes_do_not_use_the_vector_cores(device: str, mode: int) -> None:
    assert hccl_expansion_mode(device) == mode
