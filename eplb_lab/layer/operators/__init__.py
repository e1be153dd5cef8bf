"""Operators of the MoE layers, with the names and parameters of torch_npu."""

from __future__ import annotations

import importlib
from typing import cast

import torch

from eplb_lab.layer.operators import distribute, local
from eplb_lab.layer.operators.codes import DispatchQuantMode, GroupListType, QuantMode

__all__ = [
    "DispatchQuantMode",
    "GroupListType",
    "Operators",
    "QuantMode",
    "check_dtype",
    "operators_for",
    "reference",
]


class Operators:
    """The operators that layers call, implemented in plain torch.

    They accept only those parameters of their torch_npu counterparts that the layers use.
    """

    npu_moe_token_permute = staticmethod(local.npu_moe_token_permute)
    npu_moe_token_unpermute = staticmethod(local.npu_moe_token_unpermute)
    npu_moe_init_routing_v2 = staticmethod(local.npu_moe_init_routing_v2)
    npu_grouped_matmul = staticmethod(local.npu_grouped_matmul)
    npu_moe_distribute_dispatch_v2 = staticmethod(distribute.npu_moe_distribute_dispatch_v2)
    npu_moe_distribute_combine_v2 = staticmethod(distribute.npu_moe_distribute_combine_v2)
    npu_dynamic_quant = staticmethod(local.npu_dynamic_quant)
    npu_swiglu = staticmethod(local.npu_swiglu)


reference = Operators()
"""Operators for CPU and CUDA tensors."""


def operators_for(device: torch.device) -> Operators:
    """Return the operators for tensors on ``device``; torch_npu is imported only for an NPU."""
    return cast(Operators, importlib.import_module("torch_npu")) if device.type == "npu" else reference


def check_dtype(layer: int, device_type: str, dtype: torch.dtype) -> None:
    """Raise ``ValueError`` if the operators of the device do not support tokens of ``dtype``."""
    if device_type == "npu" and dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(
            f"layer {layer}: on an NPU the tokens' dtype must be bfloat16 or float16, got {dtype}"
        )
