"""Tokens as int8 with one scale each, before they travel."""

from __future__ import annotations

import torch

from worker_agent.moe.dispatch.interface import DispatchRequest
from worker_agent.moe.operators import Operators


def travelling_tokens(
    operators: Operators, request: DispatchRequest
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The request's tokens as they are to be sent, and their scales where they are int8."""
    if request.quantized and request.scale_T is None:
        return operators.npu_dynamic_quant(request.hidden_TH)
    return request.hidden_TH, request.scale_T
