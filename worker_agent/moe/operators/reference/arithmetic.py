"""The arithmetic of experts, in plain torch; ``contract`` says what each operator does."""

from __future__ import annotations

import torch
from torch.nn.functional import silu

from worker_agent.moe.operators.contract import token_counts
from worker_agent.moe.operators.reference.requirement import require


def npu_grouped_matmul(
    x: list[torch.Tensor],
    weight: list[torch.Tensor],
    *,
    scale: list[torch.Tensor] | None = None,
    per_token_scale: list[torch.Tensor] | None = None,
    group_list: torch.Tensor,
    split_item: int = 0,
    group_type: int | None = None,
    group_list_type: int = 0,
    output_dtype: torch.dtype | None = None,
) -> list[torch.Tensor]:
    """Multiply group by group, skipping empty ones; see ``Operators.npu_grouped_matmul``."""
    require(split_item in (2, 3) and group_type == 0, "only rows in groups, in one tensor, are supported")
    (rows_NK,), (weight_GKM,) = x, weight
    quantized = rows_NK.dtype == torch.int8
    require(
        quantized == (scale is not None and per_token_scale is not None),
        "int8 rows, and only they, need scales",
    )
    out_NM = torch.zeros(
        (rows_NK.shape[0], weight_GKM.shape[2]), dtype=output_dtype or rows_NK.dtype, device=rows_NK.device
    )
    end = 0
    for group, count in enumerate(token_counts(group_list, group_list_type).tolist()):
        start, end = end, end + count
        if not count:
            continue
        rows, matrix = rows_NK[start:end], weight_GKM[group]
        if scale is not None and per_token_scale is not None:
            out_NM[start:end] = (
                _exact_product(rows, matrix) * scale[0][group] * per_token_scale[0][start:end, None]
            )
        else:
            torch.mm(rows, matrix, out=out_NM[start:end])
    return [out_NM]


def npu_dynamic_quant(input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize each row to -127..127 by its largest magnitude; a row of zeros stays one."""
    wide_NH = input.float()
    scale_N = wide_NH.abs().amax(dim=-1) / 127
    steps_NH = wide_NH / scale_N.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(-1)
    return steps_NH.round().to(torch.int8), scale_N


def npu_swiglu(input: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """SiLU of the first half of ``dim`` times the second half."""
    gate, up = input.chunk(2, dim=dim)
    return silu(gate) * up


def _exact_product(rows_NK: torch.Tensor, matrix_KM: torch.Tensor) -> torch.Tensor:
    """The product of int8 matrices, in float64: exact, as on hardware that sums in int32."""
    return rows_NK.double() @ matrix_KM.double()
