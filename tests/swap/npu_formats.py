"""Fakes for NPU formats: tagged tensors, and a process group that sends them as torch_npu does.

``getNumelForHCCL`` (torch_npu/csrc/distributed, Ascend/pytorch): a tensor that is not in a base format must begin at
the start of its storage. The whole storage is then sent, including the padding. A view has the format of its storage.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.swap.carried import LateMark
from worker_agent import device as device_module
from worker_agent.adapters.vllm_ascend import weights as weights_module
from worker_agent.swap import lane as lane_module
from worker_agent.swap.lane import Lane, Lanes, Parcel, _DeviceLane, _HostLane

ND = 2
NZ = 29
_TAGS: dict[int, int] = {}
"""Format of each tagged storage, by address. All other storages are in ND format."""
_PADDING = 64


def tagged(tensor: torch.Tensor, number: int = NZ) -> torch.Tensor:
    """Return a copy of the tensor at the start of a padded storage in this format."""
    padded = torch.zeros(tensor.numel() + _PADDING, dtype=tensor.dtype)
    # Tags are keyed by address, so keep the storage alive. Otherwise, a new storage could reuse its address.
    _TAGS[padded.untyped_storage().data_ptr()] = number
    _KEPT.append(padded)
    return padded[: tensor.numel()].view(tensor.shape).copy_(tensor)


_KEPT: list[torch.Tensor] = []


def format_of(tensor: torch.Tensor) -> int:
    """Return the tensor's format, as ``torch_npu.get_npu_format`` does."""
    return _TAGS.get(tensor.untyped_storage().data_ptr(), ND)


def install() -> None:
    """Patch this process to use these formats, with an ``empty_like`` that preserves them, like that of torch_npu."""
    for module in (device_module, lane_module, weights_module):
        module.format_of = format_of
    device_module.in_order = lambda tensor: tensor.clone() if device_module.in_blocks(tensor) else tensor
    empty_like = torch.empty_like

    def empty_like_in_format(tensor: torch.Tensor, **options: Any) -> torch.Tensor:
        number = format_of(tensor)
        empty = empty_like(tensor, **options)
        return empty if number == ND else tagged(empty, number)

    torch.empty_like = empty_like_in_format


def sent_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements that torch_npu passes to HCCL for a tensor."""
    if format_of(tensor) == ND:
        return tensor
    if tensor.storage_offset():
        raise RuntimeError("For a tensor of internal format, it's storage_offset must be 0")
    return torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())


class FakeHccl:
    """HCCL group over gloo, with only the methods that lanes use."""

    sends_views = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group: dist.ProcessGroup | None = group

    def exchange(self, outgoing: Parcel | None, incoming: Parcel | None) -> None:
        works = []
        if incoming is not None:
            works.append(self._group.recv([sent_of(incoming.data)], incoming.peer, 0))
        if outgoing is not None:
            works.append(self._group.send([sent_of(outgoing.data)], outgoing.peer, 0))
        for work in works:
            work.wait(timedelta(seconds=60))

    def release(self) -> None:
        self._group = None

    def abort(self) -> bool:
        """Do nothing: HCCL cannot interrupt a device."""
        return False


class FakeHcclLanes(Lanes):
    """Lanes between fake NPUs."""

    def _open_lane(self, number: int) -> Lane:
        host = _HostLane(self._group.process_group(f"rendezvous/{number}", self._timeout))
        group = FakeHccl(self._group.process_group(f"device/{number}", self._timeout))
        return _DeviceLane(group, host, lambda: LateMark(self.device))
