"""The expert computation: SwiGLU feed-forward networks, one per local slot, in floating point or W8A8."""

from __future__ import annotations

from typing import Any

import torch

from worker_agent.moe.dispatch import Dispatched
from worker_agent.moe.expert_weights import ExpertWeights
from worker_agent.moe.operators import Operators


def run_experts(
    operators: Operators, dispatched: Dispatched[Any], weights: ExpertWeights, dtype: torch.dtype
) -> torch.Tensor:
    """Run each group of rows through its slot's expert; ``[N, H]`` of ``dtype``."""

    def matmul(
        rows: torch.Tensor,
        scale: torch.Tensor | None,
        weight: torch.Tensor,
        weight_scale: torch.Tensor | None,
    ) -> torch.Tensor:
        scales: dict[str, Any] = {}
        if scale is not None and weight_scale is not None:
            scales = {"scale": [weight_scale], "per_token_scale": [scale], "output_dtype": dtype}
        (out,) = operators.npu_grouped_matmul(
            [rows],
            [weight.transpose(1, 2)],
            group_list=dispatched.group_list_S,
            split_item=2,
            group_type=0,
            group_list_type=dispatched.group_list_type,
            **scales,
        )
        return out

    gate_up_NI = matmul(dispatched.rows_NH, dispatched.dynamic_scale_N, weights.w13_SIH, weights.w13_scale_SI)
    inner_NI, inner_scale_N = operators.npu_swiglu(gate_up_NI), None
    if weights.w2_scale_SH is not None:
        inner_NI, inner_scale_N = operators.npu_dynamic_quant(inner_NI)
    return matmul(inner_NI, inner_scale_N, weights.w2_SHI, weights.w2_scale_SH)
