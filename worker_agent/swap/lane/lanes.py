"""The lanes of a group of ranks: one at a time, each new one after a transfer that failed on the last."""

from __future__ import annotations

import queue
import threading
from datetime import timedelta

import torch
import torch.distributed as dist

from worker_agent.device import Mark
from worker_agent.swap.group import AgentGroup
from worker_agent.swap.lane.backend import Backend
from worker_agent.swap.lane.device import DeviceGroup, DeviceLane
from worker_agent.swap.lane.hccl import HcclGroup
from worker_agent.swap.lane.host import HostLane
from worker_agent.swap.lane.lane import Lane
from worker_agent.swap.lane.nccl import NcclGroup


class Lanes:
    """Opens lanes by number; every rank asks for the same numbers, each in its own time.

    Opening one waits for all ranks, on a device for seconds, and so does the current stream: never done on the model's
    thread, nor on its stream, while it serves.

    Parameters
    ----------
    group
        The ranks.
    backend, device
        What carries them, and where the experts are.
    timeout
        Longest wait for the other ranks.
    """

    def __init__(self, group: AgentGroup, backend: Backend, device: torch.device, timeout: timedelta) -> None:
        self.rank = group.rank
        self.device = device
        self._group = group
        self._backend = backend
        self._timeout = timeout
        self._open: tuple[int, Lane] | None = None

    def lane(self, number: int) -> Lane:
        """The lane of this number; raises ``RuntimeError`` where it cannot be opened."""
        if self._open is None or self._open[0] != number:
            self.retire()
            self._open = (number, self._opened(number))
        return self._open[1]

    def open_first(self) -> None:
        """Open lane 0 before anything is served: memory or links that are lacking show here, not at the first plan.

        Raises ``RuntimeError`` where it cannot be opened, also where that takes longer than the timeout.
        """
        answers: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

        def open_it() -> None:
            try:
                self.lane(0)
                answers.put(None)
            except Exception as error:
                answers.put(error)

        # The libraries wait for a missing rank without end.
        threading.Thread(target=open_it, name="eplb-first-lane", daemon=True).start()
        seconds = self._timeout.total_seconds()
        try:
            failure = answers.get(timeout=seconds)
        except queue.Empty:
            raise RuntimeError(
                f"no {self._backend.value} lane could be opened within {seconds:g} s"
            ) from None
        if failure is not None:
            raise RuntimeError(f"no {self._backend.value} lane could be opened: {failure}") from failure

    def retire(self) -> None:
        """Give up the lane that is open, if one is: it is never used again."""
        present, self._open = self._open, None
        if present is not None:
            present[1].retire()

    def _opened(self, number: int) -> Lane:
        host = HostLane(self._group.process_group(f"lane/{number}", self._timeout))
        if self._backend is Backend.GLOO:
            return host
        store = dist.PrefixStore(f"eplb/lane/{number}/{self._backend.value}", self._group.store)
        library = NcclGroup if self._backend is Backend.NCCL else HcclGroup
        group: DeviceGroup = library(store, self._group.rank, self._group.size, self.device)
        return DeviceLane(group, host, lambda: Mark(self.device))
