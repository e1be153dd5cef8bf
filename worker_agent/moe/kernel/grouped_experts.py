"""Experts as grouped matrix products of torch_npu's operators, in floating point or W8A8."""

from __future__ import annotations

from typing import Any

import torch

from worker_agent.moe.expert_batch import ActivationFormat, ExpertBatch
from worker_agent.moe.kernel.experts_part import Scratch, apply_row_weights
from worker_agent.moe.operators import Operators
from worker_agent.moe.weights.expert_weights import ExpertWeights


class GroupedExperts:
    """What runs on an NPU. The operators return memory of their own, so that no scratch is used."""

    format = ActivationFormat.STANDARD
    chunks = True
    needs_scratch = False
    quantized: bool | None = None

    def __init__(self, operators: Operators, *, weighs: bool = False) -> None:
        self._operators = operators
        self.weighs = weighs

    def run(self, batch: ExpertBatch, weights: ExpertWeights, scratch: Scratch) -> torch.Tensor:
        """See ``ExpertsPart.run``."""
        dtype = scratch.wide.dtype
        gate_up_NI = grouped_product(
            self._operators, batch, batch.rows, batch.scale, weights.w13_SIH, weights.w13_scale_SI, dtype
        )
        inner_NI, inner_scale_N = self._operators.npu_swiglu(gate_up_NI), None
        if weights.quantized:
            inner_NI, inner_scale_N = self._operators.npu_dynamic_quant(inner_NI)
        out_NH = grouped_product(
            self._operators, batch, inner_NI, inner_scale_N, weights.w2_SHI, weights.w2_scale_SH, dtype
        )
        return apply_row_weights(out_NH, batch) if self.weighs else out_NH


def grouped_product(
    operators: Operators,
    batch: ExpertBatch,
    rows_NK: torch.Tensor,
    scale_N: torch.Tensor | None,
    weight_SMK: torch.Tensor,
    weight_scale_SM: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Each row times the matrix of its slot, ``[N, M]``: rows stand as ``batch``'s do."""
    scales: dict[str, Any] = {}
    if scale_N is not None and weight_scale_SM is not None:
        scales = {"scale": [weight_scale_SM], "per_token_scale": [scale_N], "output_dtype": dtype}
    (out_NM,) = operators.npu_grouped_matmul(
        [rows_NK],
        [weight_SMK.transpose(1, 2)],
        group_list=batch.group_list_S,
        split_item=2,
        group_type=0,
        group_list_type=batch.group_list_type,
        **scales,
    )
    return out_NM
