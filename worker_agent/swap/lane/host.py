"""A lane over gloo, from host memory to host memory; what is on a device is copied through it."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from worker_agent.swap.lane.lane import Deadline, Parcel


class HostLane:
    """One gloo group.

    Parameters
    ----------
    group
        Used for nothing else.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group: dist.ProcessGroup | None = group

    def exchange(self, outgoing: Parcel | None, incoming: Parcel | None, deadline: Deadline) -> None:
        """See ``Lane``. Copies to and from a device run on the current stream, and are done when this returns."""
        if self._group is None:
            raise RuntimeError("this rank has retired the lane")
        works, arriving = [], None
        if incoming is not None:
            on_host = incoming.data.device.type == "cpu"
            arriving = incoming.data if on_host else torch.empty(incoming.data.shape, dtype=torch.uint8)
            works.append(self._group.recv([arriving], incoming.peer, 0))
        if outgoing is not None:
            works.append(self._group.send([outgoing.data.cpu()], outgoing.peer, 0))
        for work in works:
            work.wait(timedelta(seconds=deadline.left()))
        if incoming is not None and arriving is not None and arriving is not incoming.data:
            incoming.data.copy_(arriving)

    def retire(self) -> None:
        """See ``Lane``: the links close with the group."""
        self._group = None
