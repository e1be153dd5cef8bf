"""Weights that a transfer carries in tests of lanes, the order to carry them, and lanes as a device would have them."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from eplb_core.wire.plan import RankLayer, sources_of
from worker_agent.device import Mark
from worker_agent.swap.lane import Lane, Lanes, Parcel, _DeviceLane, _HostLane
from worker_agent.swap.machine import StartTransfer

RANKS, SLOTS = 3, 4
HERE = torch.device("cpu")


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


def order(generation: int, *moves: tuple[int, ...]) -> StartTransfer:
    moves_M5 = np.array(moves, dtype=np.int32)
    none_RS = np.zeros((RANKS, SLOTS), dtype=np.int32)
    source_RS = sources_of(moves_M5, RANKS, SLOTS)
    return StartTransfer((RankLayer(0, none_RS, source_RS, none_RS[0], ()),), generation, 0)


class GlooAsDevice:
    """Refuses what HCCL would read wrongly; ``LateMark`` finds the work done a few looks later."""

    sends_views = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group: dist.ProcessGroup | None = group

    def exchange(self, outgoing: Parcel | None, incoming: Parcel | None) -> None:
        for parcel in (outgoing, incoming):
            assert parcel is None or parcel.data.storage_offset() == 0, (
                "a tensor begins in its storage's middle"
            )
        works = []
        if incoming is not None:
            works.append(self._group.recv([incoming.data], incoming.peer, 0))
        if outgoing is not None:
            works.append(self._group.send([outgoing.data], outgoing.peer, 0))
        # A stream keeps what is queued in order; here the lane's own copy back must find the bytes.
        for work in works:
            work.wait()

    def release(self) -> None:
        self._group = None

    def abort(self) -> bool:
        self._group = None
        return True


class LateMark(Mark):
    """A mark that is not passed at the first look."""

    looks = 0

    def passed(self) -> bool:
        self.looks += 1
        return self.looks > 2


class DeviceLikeLanes(Lanes):
    """Lanes as a device would have them."""

    def _open_lane(self, number: int) -> Lane:
        host = _HostLane(self._group.process_group(f"rendezvous/{number}", self._timeout))
        group = GlooAsDevice(self._group.process_group(f"device/{number}", self._timeout))
        return _DeviceLane(group, host, lambda: LateMark(self.device))
