"""The ranks of one expert-parallel group, and the few exchanges that dispatchers need of them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group


class EpGroup:
    """R expert-parallel ranks as one of them sees them.

    ``group=None`` is a rank alone: every exchange is then the identity, and ``torch.distributed`` is not
    needed. All exchanges are all-to-alls, whose cost on gloo does not grow with the ring as that of its
    all-gather does.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    @classmethod
    def named(cls, name: str) -> EpGroup:
        """The group that has this ``name`` in this process."""
        return cls(_resolve_process_group(name) if name else None)  # type: ignore[arg-type] # newer torch: GroupName

    @property
    def name(self) -> str:
        """What fused operators call the group: HCCL's name of its communicator, elsewhere torch's of the group."""
        if self._group is None:
            return ""
        if dist.get_backend(self._group) == "hccl":
            backend = self._group._get_backend(torch.device("npu"))
            name: str = backend.get_hccl_comm_name(self.rank)  # type: ignore[attr-defined]
            return name
        return self._group.group_name

    def all_to_all(self, rows_NX: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """Send ``sent[r]`` consecutive rows to each rank ``r``; return all ranks' rows, in order of rank.

        ``received[r]`` is how many rows rank ``r`` sends here.
        """
        if self._group is None:
            return rows_NX
        arrived_MX = rows_NX.new_empty((sum(received), *rows_NX.shape[1:]))
        dist.all_to_all_single(arrived_MX, rows_NX.contiguous(), received, sent, group=self._group)
        return arrived_MX

    def exchange(self, rows_RX: torch.Tensor) -> torch.Tensor:
        """Send row ``r`` to rank ``r``; row ``r`` of the result is what rank ``r`` sent here."""
        ones = [1] * self.size
        return self.all_to_all(rows_RX, ones, ones)

    def all_gather(self, rows_TX: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        """The rows of all ranks, in order of rank; ``sizes[r]`` is how many rank ``r`` has."""
        repeats = (self.size, *[1] * (rows_TX.ndim - 1))
        return self.all_to_all(rows_TX.repeat(repeats), [rows_TX.shape[0]] * self.size, sizes)

    def reduce_scatter(self, rows_NX: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        """Sum all ranks' ``[N, ...]``, N the sum of ``sizes``, and return the rows that are this rank's.

        Ranks are summed in order, so that a result does not depend on who asks.
        """
        own = sizes[self.rank]
        parts_NX = self.all_to_all(rows_NX, sizes, [own] * self.size)
        return parts_NX.view(self.size, own, *rows_NX.shape[1:]).sum(dim=0)
