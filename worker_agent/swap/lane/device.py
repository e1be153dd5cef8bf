"""A lane from device to device, which nothing enters before both ends are there.

What waits on a device for a peer that never comes can hardly be taken back: it holds part of the device, and the
libraries end it by ending the process. So before every exchange both ends announce over the host that they take part,
and a rank that has failed shows there, by its broken link.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch

from worker_agent.device import Mark
from worker_agent.swap.lane.host import HostLane
from worker_agent.swap.lane.lane import Deadline, Parcel

_POLL_SECONDS = 0.0001


class DeviceGroup(Protocol):
    """What differs from one device's library to the other's."""

    sends_views: bool
    """Whether a tensor may begin in the middle of its storage."""

    def exchange(self, outgoing: Parcel | None, incoming: Parcel | None) -> None:
        """Queue both, after what the current stream holds and before what comes on it; never waits."""

    def release(self) -> None:
        """Give the links up; nothing is under way on them."""

    def abort(self) -> bool:
        """End what is under way on the device; whether no memory is read or written by it any more."""


class DeviceLane:
    """One device group and a host lane to meet on.

    Parameters
    ----------
    group
        The device's library.
    handshake
        The same ranks on the host.
    mark
        Marks a point in the current stream of the device.
    """

    def __init__(self, group: DeviceGroup, handshake: HostLane, mark: Callable[[], Mark]) -> None:
        self._group = group
        self._handshake = handshake
        self._mark = mark
        self._under_way = False
        self._touched: list[torch.Tensor] = []
        self._bounces: dict[str, torch.Tensor] = {}

    def exchange(self, outgoing: Parcel | None, incoming: Parcel | None, deadline: Deadline) -> None:
        """See ``Lane``; peers must be about to do the same, or it fails at the deadline with nothing begun."""
        self._shake_hands({parcel.peer for parcel in (outgoing, incoming) if parcel is not None}, deadline)
        leaving = outgoing and self._bounced("out", outgoing)
        arriving = incoming and self._bounced("in", incoming)
        if leaving is not None and outgoing is not None and leaving is not outgoing:
            leaving.data.copy_(outgoing.data)
        self._under_way = True
        self._touched = [parcel.data for parcel in (leaving, arriving) if parcel is not None]
        self._group.exchange(leaving, arriving)
        if arriving is not None and incoming is not None and arriving is not incoming:
            incoming.data.copy_(arriving.data)
        done = self._mark()
        while not done.passed():
            deadline.left()
            time.sleep(_POLL_SECONDS)
        self._under_way = False
        self._touched = []

    def retire(self) -> None:
        """See ``Lane``. Memory that a device may still write to is kept for ever rather than given to another."""
        self._handshake.retire()
        if not self._under_way:
            self._group.release()
        elif not self._group.abort():
            _STILL_WRITTEN.append(self)

    def _shake_hands(self, peers: set[int], deadline: Deadline) -> None:
        """Announce this rank to each peer, and wait for its announcement."""
        here, heard = torch.zeros(1, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
        for peer in sorted(peers):
            self._handshake.exchange(Parcel(peer, here), Parcel(peer, heard), deadline)

    def _bounced(self, way: str, parcel: Parcel) -> Parcel:
        """The parcel itself, or one that begins where its storage does."""
        if self._group.sends_views or parcel.data.storage_offset() == 0:
            return parcel
        bounce, size = self._bounces.get(way), parcel.data.numel()
        if bounce is None or bounce.numel() < size:
            bounce = self._bounces[way] = torch.empty_like(parcel.data)
        return Parcel(parcel.peer, bounce[:size])


_STILL_WRITTEN: list[DeviceLane] = []
