"""A device lane on CPUs: gloo takes the place of the device's library, and keeps to what HCCL asks for."""

from __future__ import annotations

import torch.distributed as dist

from worker_agent.device import Mark
from worker_agent.swap.lane.device import DeviceLane
from worker_agent.swap.lane.host import HostLane
from worker_agent.swap.lane.lane import Lane, Parcel
from worker_agent.swap.lane.lanes import Lanes


class GlooAsDevice:
    """Refuses what HCCL would read wrongly; ``LateMark`` finds the work done a few looks later."""

    sends_views = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group: dist.ProcessGroup | None = group

    def exchange(self, outgoing: Parcel | None, incoming: Parcel | None) -> None:
        assert self._group is not None
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

    def _opened(self, number: int) -> Lane:
        host = HostLane(self._group.process_group(f"rendezvous/{number}", self._timeout))
        group = GlooAsDevice(self._group.process_group(f"device/{number}", self._timeout))
        return DeviceLane(group, host, lambda: LateMark(self.device))
