"""Fixtures for lane tests: layers with distinguishable weights, transfer orders, and device lanes over gloo."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from eplb_core.wire.plan import RankLayer, sources_of
from worker_agent.device import Mark
from worker_agent.swap.lane import Lane, Lanes, Parcel, _DeviceLane, _HostLane
from worker_agent.swap.machine import StartTransfer

RANKS = 3
SLOTS = 4
CPU = torch.device("cpu")


class PlainLayer:
    """A layer's weights. Slot ``s`` of rank ``r`` holds ``100 r + s`` plus random noise."""

    def __init__(self, rank: int, device: torch.device = CPU) -> None:
        fill = (100.0 * rank + torch.arange(SLOTS)).reshape(-1, 1, 1)
        self._weights = [
            (fill + torch.rand(SLOTS, 3, 5)).to(device),
            (fill + torch.rand(SLOTS, 7, 1)).to(torch.float16).to(device),
        ]

    def expert_weights(self) -> list[torch.Tensor]:
        return self._weights


def order(generation: int, *moves: tuple[int, ...]) -> StartTransfer:
    """Return the order to transfer layer 0 on lane 0 with these moves, which are rows of ``moves_M5``."""
    moves_M5 = np.array(moves, dtype=np.int32)
    zeros_RS = np.zeros((RANKS, SLOTS), dtype=np.int32)
    source_RS = sources_of(moves_M5, RANKS, SLOTS)
    return StartTransfer((RankLayer(0, zeros_RS, source_RS, zeros_RS[0], ()),), generation, 0)


class GlooAsDevice:
    """Gloo-backed device group that rejects tensors that HCCL would read incorrectly."""

    sends_views = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group: dist.ProcessGroup | None = group

    def exchange(self, outgoing: Parcel | None, incoming: Parcel | None) -> None:
        for parcel in (outgoing, incoming):
            assert parcel is None or parcel.data.storage_offset() == 0, (
                "the tensor does not begin at the start of its storage"
            )
        works = []
        if incoming is not None:
            works.append(self._group.recv([incoming.data], incoming.peer, 0))
        if outgoing is not None:
            works.append(self._group.send([outgoing.data], outgoing.peer, 0))
        # A stream would run operations in order. There is no stream here, so the data must arrive before the lane
        # copies it.
        for work in works:
            work.wait()

    def release(self) -> None:
        self._group = None

    def abort(self) -> bool:
        self._group = None
        return True


class LateMark(Mark):
    """Mark that counts as reached at the third poll."""

    polls = 0

    def passed(self) -> bool:
        self.polls += 1
        return self.polls > 2


class DeviceLikeLanes(Lanes):
    """Lanes that use a device lane with gloo in place of NCCL or HCCL."""

    def _open_lane(self, number: int) -> Lane:
        host = _HostLane(self._group.process_group(f"rendezvous/{number}", self._timeout))
        group = GlooAsDevice(self._group.process_group(f"device/{number}", self._timeout))
        return _DeviceLane(group, host, lambda: LateMark(self.device))
