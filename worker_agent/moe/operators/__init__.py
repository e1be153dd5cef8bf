"""The operators that MoE layers are made of, under torch_npu's own names and arguments."""

from __future__ import annotations

import importlib
from typing import cast

import torch

from worker_agent.moe.operators import reference
from worker_agent.moe.operators.contract import (
    DispatchQuantMode,
    GroupListType,
    Operators,
    QuantMode,
    count_ids,
    token_counts,
)

__all__ = [
    "DispatchQuantMode",
    "GroupListType",
    "Operators",
    "QuantMode",
    "count_ids",
    "operators_for",
    "reference",
    "token_counts",
]


def operators_for(device: torch.device) -> Operators:
    """The operators for tensors of ``device``; torch_npu is imported only where the device is an NPU."""
    if device.type == "npu":
        return cast(Operators, importlib.import_module("torch_npu"))
    return reference
