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
    "check_dtype",
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


def check_dtype(layer: int, device_type: str, dtype: torch.dtype) -> None:
    """Raise ``ValueError`` naming the layer where the operators of a device take no tokens of ``dtype``."""
    if device_type == "npu" and dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(
            f"layer {layer}: on an NPU the tokens' dtype must be bfloat16 or float16, got {dtype}"
        )
