"""Who serves the operators: torch_npu on an NPU, the reference implementations everywhere else."""

from __future__ import annotations

import importlib
from typing import cast

import torch

from worker_agent.moe.operators import reference
from worker_agent.moe.operators.contract import Operators


def operators_for(device: torch.device) -> Operators:
    """The operators for tensors of ``device``; torch_npu is imported only where the device is an NPU."""
    if device.type == "npu":
        return cast(Operators, importlib.import_module("torch_npu"))
    return reference
