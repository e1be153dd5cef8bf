"""NCCL's side of a device lane."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from worker_agent.swap.lane.lane import Parcel

_MOST_BLOCKS = 4
"""Thread blocks that a transfer may hold: it runs beside the model's kernels, some of which need all of the rest."""
_NEVER = timedelta(days=365)


class NcclGroup:
    """One communicator of the ranks of ``store``; making it is a collective, takes long, and uses the current stream.

    Single sends would make a communicator for every pair of ranks; grouped ones use the group's, which exists once all
    ranks have gone through a first collective.
    """

    sends_views = True

    def __init__(self, store: dist.Store, rank: int, size: int, device: torch.device) -> None:
        if not dist.is_nccl_available():
            raise RuntimeError("this torch was built without NCCL; ask for the transfer backend gloo")
        # torch's stubs know these classes only where torch was built with NCCL.
        library: Any = dist.ProcessGroupNCCL
        options = library.Options()
        # Deadlines are the transfer's own: NCCL's watchdog ends the process where one passes.
        options._timeout = _NEVER
        options.config.max_ctas = _MOST_BLOCKS
        with _errors_left_to_us():
            self._group: Any = library(store, rank, size, options)
        self._group.allreduce([torch.zeros(1, device=device)]).wait()
        torch.cuda.current_stream(device).synchronize()

    def exchange(self, outgoing: Parcel | None, incoming: Parcel | None) -> None:
        """See ``DeviceGroup``."""
        self._group._start_coalescing()
        if outgoing is not None:
            self._group.send([outgoing.data], outgoing.peer, 0)
        if incoming is not None:
            self._group.recv([incoming.data], incoming.peer, 0)
        # Makes the current stream wait, not this thread.
        self._group._end_coalescing().wait()

    def release(self) -> None:
        """See ``DeviceGroup``."""
        self.abort()

    def abort(self) -> bool:
        """See ``DeviceGroup``: NCCL's kernels look whether they were aborted."""
        end = getattr(self._group, "abort", None) or self._group._shutdown  # the latter before torch 2.6
        end()
        return True


@contextlib.contextmanager
def _errors_left_to_us() -> Iterator[None]:
    """While a group is made: it reads here whether an error of a peer ends the process, as is the default."""
    ours = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_BLOCKING_WAIT": "0"}
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
