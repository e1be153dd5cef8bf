"""Group of expert-, data- or tensor-parallel ranks, with the exchanges that a layer needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.nn.functional import pad


class RankGroup:
    """One rank's view of a group of R ranks.

    If ``group`` is ``None``, the rank is alone: exchanges return their input, and ``torch.distributed`` is not used.

    On a CPU all exchanges are all-to-alls, because the cost of gloo's all-gather grows with the length of its ring.
    Other devices use the backend's all-gather, which sends the rows once instead of R times.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    @classmethod
    def of(cls, group: dist.ProcessGroup | RankGroup | None) -> RankGroup:
        """Wrap a process group. A ``RankGroup`` is returned as is."""
        return group if isinstance(group, RankGroup) else cls(group)

    @classmethod
    def named(cls, name: str) -> RankGroup:
        """Return the group with this name in this process; an empty name means a single rank."""
        return cls(_resolve_process_group(name) if name else None)  # type: ignore[arg-type] # newer torch: GroupName

    @property
    def name(self) -> str:
        """Name of the group for fused operators: HCCL's communicator name, or torch's group name without HCCL."""
        if self._group is None:
            return ""
        # The name may list several backends, for example "cpu:gloo,npu:hccl".
        if "hccl" in dist.get_backend(self._group):
            backend = self._group._get_backend(torch.device("npu"))
            name: str = backend.get_hccl_comm_name(self.rank)  # type: ignore[attr-defined]
            return name
        return self._group.group_name

    def grid(self, tp: int) -> tuple[RankGroup, RankGroup]:
        """Divide the ranks into tensor-parallel groups of ``tp`` consecutive ranks, which share tokens.

        Returns this rank's data-parallel group and its tensor-parallel group. All processes of the default group must
        call this together. Raises ``ValueError`` if ``tp`` does not divide the number of ranks.

        Examples
        --------
        Of 8 ranks with ``tp=4``, rank 5 is in the data-parallel group (1, 5) and in the tensor-parallel group
        (4, 5, 6, 7).
        """
        if tp < 1 or self.size % tp:
            raise ValueError(
                f"{self.size} ranks cannot be split evenly into tensor-parallel groups of {tp} ranks"
            )
        if self._group is None or tp == 1:
            return self, RankGroup(None)
        ranks = dist.get_process_group_ranks(self._group)
        data = [ranks[first::tp] for first in range(tp)]
        tensor = [ranks[first : first + tp] for first in range(0, self.size, tp)]
        dp_group, tp_group = (dist.new_subgroups_by_enumeration(groups)[0] for groups in (data, tensor))
        return RankGroup(dp_group), RankGroup(tp_group)

    def start_all_to_all(
        self, rows_NX: torch.Tensor, sent: list[int], received: list[int]
    ) -> Callable[[], torch.Tensor]:
        """Start exchanging rows with all ranks, which must start their exchanges in the same order.

        Parameters
        ----------
        rows_NX
            Rows to send, ordered by receiving rank.
        sent
            Number of rows to send to each rank.
        received
            Number of rows to receive from each rank.

        Returns
        -------
        Callable
            Function that waits for the received rows and returns them in rank order. Call it only once. On an
            accelerator it only makes the stream wait for the rows. It keeps the sent rows alive until then.
        """
        if self._group is None:
            return lambda: rows_NX
        received_MX = rows_NX.new_empty((sum(received), *rows_NX.shape[1:]))
        # Use a list so that ``wait`` can drop the reference.
        send_buffer = [rows_NX.contiguous()]
        work = dist.all_to_all_single(
            received_MX, send_buffer[0], received, sent, group=self._group, async_op=True
        )

        def wait() -> torch.Tensor:
            if work is not None:
                work.wait()
            send_buffer.clear()
            return received_MX

        return wait

    def all_to_all(self, rows_NX: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """Exchange rows with all ranks and wait for them; see ``start_all_to_all``."""
        return self.start_all_to_all(rows_NX, sent, received)()

    def exchange(self, rows_RX: torch.Tensor) -> torch.Tensor:
        """Send row ``r`` to rank ``r``, for each rank, and return the received rows in rank order."""
        ones = [1] * self.size
        return self.all_to_all(rows_RX, ones, ones)

    def gather_numbers(self, *numbers: int, device: torch.device) -> list[list[int]]:
        """Return each rank's ``numbers``, in rank order."""
        # Fill the tensor on the device, because a copy from the host would wait for the device again.
        row = torch.stack([torch.full((), number, dtype=torch.int64, device=device) for number in numbers])
        numbers_R: list[list[int]] = self.exchange(row.repeat(self.size, 1)).tolist()
        return numbers_R

    def all_gather(self, rows_TX: torch.Tensor) -> torch.Tensor:
        """Gather the rows of all ranks, in rank order. Every rank must pass the same number of rows."""
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
        """Sum the rows ``[N, ...]`` over all ranks, and return this rank's shard of N/R rows."""
        share = rows_NX.shape[0] // self.size
        addends_NX = self.all_to_all(rows_NX, [share] * self.size, [share] * self.size)
        return addends_NX.view(self.size, share, *rows_NX.shape[1:]).sum(dim=0)

    def all_reduce(self, rows_NX: torch.Tensor) -> torch.Tensor:
        """Sum the rows ``[N, ...]`` over all ranks.

        The result is bitwise identical on all ranks, because each row is summed on only one rank.
        """
        if self.size == 1:
            return rows_NX
        rows = rows_NX.shape[0]
        padding = (0, 0) * (rows_NX.ndim - 1) + (0, -rows % self.size)
        return self.all_gather(self.reduce_scatter(pad(rows_NX, padding)))[:rows]

    def _gathers(self, device: torch.device) -> bool:
        """Return True if rows on the device are gathered with the backend's all-gather."""
        return self._group is not None and device.type != "cpu"


def pack_rows(columns: Sequence[torch.Tensor]) -> torch.Tensor:
    """Pack tensors ``[T, width]`` into one uint8 tensor ``[T, B]``."""
    # If a tensor has no rows or one column, ``contiguous()`` may keep a last stride that ``view`` rejects.
    dense = [
        column if column.stride(-1) == 1 else column.clone(memory_format=torch.contiguous_format)
        for column in columns
    ]
    return torch.cat([column.view(torch.uint8) for column in dense], dim=1)


def unpack_rows(packed_TB: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Undo ``pack_rows``.

    Parameters
    ----------
    packed_TB
        Packed rows.
    like
        Tensors with the dtypes and widths of the result.

    Examples
    --------
    >>> columns = [torch.tensor([[1, 2], [3, 4]], dtype=torch.int8), torch.tensor([[0.5], [1.5]])]
    >>> packed = pack_rows(columns)
    >>> packed.shape
    torch.Size([2, 6])
    >>> unpack_rows(packed, columns)
    [tensor([[1, 2],
            [3, 4]], dtype=torch.int8), tensor([[0.5000],
            [1.5000]])]
    """
    widths = [column.shape[1] * column.element_size() for column in like]
    slices = torch.split(packed_TB, widths, dim=1)
    # Always copy, because even a single row, which is contiguous, may start at an address that is misaligned for its
    # dtype.
    copies = [piece.clone(memory_format=torch.contiguous_format) for piece in slices]
    return [piece.view(column.dtype) for piece, column in zip(copies, like, strict=True)]
