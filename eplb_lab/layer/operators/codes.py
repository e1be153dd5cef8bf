"""Integer codes used by torch_npu's operators, and a function that counts ids."""

from __future__ import annotations

from enum import IntEnum

import torch


class GroupListType(IntEnum):
    """Encoding of a group list ``[groups]``, which gives the number of rows in each group."""

    CUMULATIVE = 0
    COUNTS = 1

    def counts(self, group_list: torch.Tensor) -> torch.Tensor:
        """Return the number of rows of each group.

        Examples
        --------
        >>> GroupListType.CUMULATIVE.counts(torch.tensor([3, 3, 7]))
        tensor([3, 0, 4])
        """
        if self is GroupListType.COUNTS:
            return group_list
        return torch.diff(group_list, prepend=group_list.new_zeros(1))


class QuantMode(IntEnum):
    """Quantisation of the rows that ``npu_moe_init_routing_v2`` returns."""

    NONE = -1
    DYNAMIC = 1
    """int8, with one scale per row."""


class DispatchQuantMode(IntEnum):
    """Quantisation of the rows that ``npu_moe_distribute_dispatch_v2`` sends."""

    NONE = 0
    DYNAMIC = 2
    """int8, with one scale per row."""
