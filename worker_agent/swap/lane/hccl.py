"""HCCL's side of a device lane, by way of torch_npu."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from worker_agent.swap.lane.lane import Parcel

_BUFFER_MIB = 100
"""HCCL takes twice this of device memory for a communicator; its default of 200 is meant for the model's own."""
_NEVER = timedelta(days=365)


class HcclGroup:
    """One communicator of the ranks of ``store``; making it is a collective, takes long, and uses the current stream.

    HCCL reads a tensor that begins in the middle of its storage wrongly in some formats, so it is given none.
    """

    sends_views = False

    def __init__(self, store: dist.Store, rank: int, size: int, device: torch.device) -> None:
        from torch_npu._C._distributed_c10d import ProcessGroupHCCL

        options: Any = ProcessGroupHCCL.Options()
        # Deadlines are the transfer's own: torch_npu's watchdog ends the process where one passes.
        options._timeout = _NEVER
        options.hccl_config = {"hccl_buffer_size": _BUFFER_MIB}
        self._group: Any = ProcessGroupHCCL(store, rank, size, options)
        self._group.allreduce([torch.zeros(1, device=device)]).wait()
        torch.get_device_module(device).current_stream(device).synchronize()

    def exchange(self, outgoing: Parcel | None, incoming: Parcel | None) -> None:
        """See ``DeviceGroup``."""
        asked = [("isend", outgoing), ("irecv", incoming)]
        present = [(way, parcel) for way, parcel in asked if parcel is not None]
        work = self._group.batch_isend_irecv(
            [way for way, _ in present],
            [parcel.data for _, parcel in present],
            [parcel.peer for _, parcel in present],
        )
        work.wait()

    def release(self) -> None:
        """See ``DeviceGroup``."""
        self._group.abort_hccl_comm("the lane is retired")

    def abort(self) -> bool:
        """See ``DeviceGroup``: HCCL cannot end what a device is at without ending all that the device is at."""
        return False
