"""Codes that torch_npu's operators take."""

from __future__ import annotations

from enum import IntEnum

import torch


class GroupListType(IntEnum):
    """The code of a group list ``[groups]`` for the rows of each group."""

    CUMULATIVE = 0
    COUNTS = 1

    def counts(self, group_list: torch.Tensor) -> torch.Tensor:
        """Return the rows of each group."""
        if self is GroupListType.COUNTS:
            return group_list
        return torch.diff(group_list, prepend=group_list.new_zeros(1))


class QuantMode(IntEnum):
    """Quantization of the rows that ``npu_moe_init_routing_v2`` returns."""

    NONE = -1
    DYNAMIC = 1
    """int8, with one scale per row."""


class DispatchQuantMode(IntEnum):
    """Quantization of the rows that ``npu_moe_distribute_dispatch_v2`` sends."""

    NONE = 0
    DYNAMIC = 2
    """int8, with one scale per row."""
