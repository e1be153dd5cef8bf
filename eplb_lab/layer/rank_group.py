"""The ranks of one group, be it expert-, data- or tensor-parallel, and the few exchanges that a layer needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.nn.functional import pad


class RankGroup:
    """R ranks as one of them sees them.

    ``group=None`` is a rank alone: every exchange is then the identity, and ``torch.distributed`` is not
    needed. On a CPU all exchanges are all-to-alls, whose cost on gloo does not grow with the ring as that of its
    all-gather does; on a device gathers are the backend's own, which sends one copy of the rows and not R.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    @classmethod
    def of(cls, group: dist.ProcessGroup | RankGroup | None) -> RankGroup:
        """Return the ranks of a process group, or the same where ``group`` has them already."""
        return group if isinstance(group, RankGroup) else cls(group)

    @classmethod
    def named(cls, name: str) -> RankGroup:
        """Return the group that has this ``name`` in this process."""
        return cls(_resolve_process_group(name) if name else None)  # type: ignore[arg-type] # newer torch: GroupName

    @property
    def name(self) -> str:
        """The group's name for fused operators: HCCL's name of its communicator, elsewhere torch's of the group."""
        if self._group is None:
            return ""
        # A group of several backends is called "cpu:gloo,npu:hccl".
        if "hccl" in dist.get_backend(self._group):
            backend = self._group._get_backend(torch.device("npu"))
            name: str = backend.get_hccl_comm_name(self.rank)  # type: ignore[attr-defined]
            return name
        return self._group.group_name

    def grid(self, tp: int) -> tuple[RankGroup, RankGroup]:
        """Return this rank's data-parallel and tensor-parallel group; ``tp`` ranks after one another share tokens.

        All ranks that there are call it together. Raises ``ValueError`` where the ranks do not divide into such groups.
        """
        if tp < 1 or self.size % tp:
            raise ValueError(f"{self.size} ranks do not divide into tensor-parallel groups of {tp}")
        if self._group is None or tp == 1:
            return self, RankGroup(None)
        ranks = dist.get_process_group_ranks(self._group)
        data = [ranks[first::tp] for first in range(tp)]
        tensor = [ranks[first : first + tp] for first in range(0, self.size, tp)]
        dp_group, tp_group = (dist.new_subgroups_by_enumeration(parts)[0] for parts in (data, tensor))
        return RankGroup(dp_group), RankGroup(tp_group)

    def start_all_to_all(
        self, rows_NX: torch.Tensor, sent: list[int], received: list[int]
    ) -> Callable[[], torch.Tensor]:
        """Send ``sent[r]`` consecutive rows to each rank ``r``; all ranks' rows will arrive, in order of rank.

        ``received[r]`` is how many rows rank ``r`` sends here. All ranks start their exchanges in one order. Returns
        what waits for the rows, on an accelerator until its stream may use them, and keeps alive what is being sent
        until then. To be called once.
        """
        if self._group is None:
            return lambda: rows_NX
        arrived_MX = rows_NX.new_empty((sum(received), *rows_NX.shape[1:]))
        sending = [rows_NX.contiguous()]
        work = dist.all_to_all_single(
            arrived_MX, sending[0], received, sent, group=self._group, async_op=True
        )

        def wait() -> torch.Tensor:
            if work is not None:
                work.wait()
            sending.clear()
            return arrived_MX

        return wait

    def all_to_all(self, rows_NX: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """``start_all_to_all``, and wait for it."""
        return self.start_all_to_all(rows_NX, sent, received)()

    def exchange(self, rows_RX: torch.Tensor) -> torch.Tensor:
        """Send row ``r`` to rank ``r``; row ``r`` of the result is what rank ``r`` sent here."""
        ones = [1] * self.size
        return self.all_to_all(rows_RX, ones, ones)

    def gather_numbers(self, *numbers: int, device: torch.device) -> list[list[int]]:
        """Exchange each rank's ``numbers``, in order of rank."""
        # Filled in on the device: a copy from the host would wait for it once more.
        own = torch.stack([torch.full((), number, dtype=torch.int64, device=device) for number in numbers])
        numbers_R: list[list[int]] = self.exchange(own.repeat(self.size, 1)).tolist()
        return numbers_R

    def all_gather(self, rows_TX: torch.Tensor) -> torch.Tensor:
        """Gather the rows of all ranks, in order of rank; every rank gives equally many."""
        if self._group is None and self.size == 1:
            return rows_TX
        if self._gathers(rows_TX.device):
            rows_NX = rows_TX.new_empty((self.size * rows_TX.shape[0], *rows_TX.shape[1:]))
            dist.all_gather_into_tensor(rows_NX, rows_TX.contiguous(), group=self._group)
            return rows_NX
        repeats = (self.size, *[1] * (rows_TX.ndim - 1))
        sizes = [rows_TX.shape[0]] * self.size
        return self.all_to_all(rows_TX.repeat(repeats), sizes, sizes)

    def reduce_scatter(self, rows_NX: torch.Tensor) -> torch.Tensor:
        """Sum all ranks' ``[N, ...]`` and return this rank's N/R rows of it."""
        own = rows_NX.shape[0] // self.size
        parts_NX = self.all_to_all(rows_NX, [own] * self.size, [own] * self.size)
        return parts_NX.view(self.size, own, *rows_NX.shape[1:]).sum(dim=0)

    def all_reduce(self, rows_NX: torch.Tensor) -> torch.Tensor:
        """Sum all ranks' ``[N, ...]``, the same bits on all ranks: each row is summed on one of them."""
        if self.size == 1:
            return rows_NX
        rows = rows_NX.shape[0]
        padding = (0, 0) * (rows_NX.ndim - 1) + (0, -rows % self.size)
        return self.all_gather(self.reduce_scatter(pad(rows_NX, padding)))[:rows]

    def _gathers(self, device: torch.device) -> bool:
        """Return whether the backend's own gather is used for rows of a device."""
        return self._group is not None and device.type != "cpu"


def pack_rows(columns: Sequence[torch.Tensor]) -> torch.Tensor:
    """Pack tensors ``[T, width]`` into one uint8 ``[T, B]``."""
    # ``contiguous`` keeps the strides of rows without a choice of them: of none, or of one value each.
    dense = [
        column if column.stride(-1) == 1 else column.clone(memory_format=torch.contiguous_format)
        for column in columns
    ]
    return torch.cat([column.view(torch.uint8) for column in dense], dim=1)


def unpack_rows(packed_TB: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors that ``pack_rows`` packed, with the dtypes and widths of ``like``."""
    widths = [column.shape[1] * column.element_size() for column in like]
    parts = torch.split(packed_TB, widths, dim=1)
    # Always copied: even a lone row, which is contiguous, may begin where no value of its dtype can.
    copies = [part.clone(memory_format=torch.contiguous_format) for part in parts]
    return [part.view(column.dtype) for part, column in zip(copies, like, strict=True)]
