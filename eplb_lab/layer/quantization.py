"""Quantization methods: expert tensors as a checkpoint has them, as a layer computes with them, and the products."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import linear

from eplb_lab.layer.experts import ActivationFormat, ExpertBatch
from eplb_lab.layer.operators import GroupListType, Operators
from eplb_lab.layer.shape import Activation, MoEShape
from eplb_lab.layer.weights import ExpertWeights, Matrices


class Unquantized:
    """Weights and tokens in floating point; ``Experts`` by the operators of an NPU.

    ``operators`` compute, with ``activation`` between the two products. Other methods are its subclasses.
    """

    format = ActivationFormat.STANDARD
    quantizes_tokens = False
    """Experts want int8 rows, with a scale each."""

    def __init__(self, operators: Operators, activation: Activation = Activation.SILU) -> None:
        self._operators, self._activation = operators, activation

    def create_weights(
        self, shape: MoEShape, slots: int, dtype: torch.dtype, device: torch.device, biased: bool
    ) -> ExpertWeights:
        """Make the tensors that a checkpoint has of as many ``slots``, on ``device``.

        ``shape`` is the layer's; its tokens are of ``dtype``. Biases have tensors where ``biased``.
        """
        rows, inner = 2 * shape.intermediate, shape.intermediate

        def empty(*sizes: int, of: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(slots, *sizes, dtype=of, device=device)

        weights = empty(rows, shape.hidden), empty(shape.hidden, inner)
        if not biased:
            return ExpertWeights(*weights)
        wide = ExpertWeights.bias_dtype(dtype)
        return ExpertWeights(
            *weights, w13_bias_SI=empty(rows, of=wide), w2_bias_SH=empty(shape.hidden, of=wide)
        )

    def process_after_load(self, weights: ExpertWeights, _dtype: torch.dtype) -> ExpertWeights:
        """Return what the layer holds and computes with, for tokens of ``dtype``: the same."""
        return weights

    def apply(self, batch: ExpertBatch, weights: ExpertWeights, dtype: torch.dtype) -> torch.Tensor:
        """Multiply, activate and multiply group by group; nothing is called for no rows."""
        if not batch.rows.shape[0]:
            return batch.rows.to(dtype)
        first_NI = self._product(batch, batch.rows, batch.scale_N, weights.first, dtype)
        inner_NI, scale_N = self._requantized(self.activated(first_NI))
        return self._product(batch, inner_NI, scale_N, weights.second, dtype)

    def activated(self, first_NI: torch.Tensor) -> torch.Tensor:
        """Return the activation of a first product, ``[N, I]``; by the fused operator where there is one, and rows."""
        if self._activation is Activation.SILU and first_NI.shape[0]:
            return self._operators.npu_swiglu(first_NI)
        return self._activation(first_NI)

    def linear(self, rows_TK: torch.Tensor, matrix: Matrices) -> torch.Tensor:
        """Multiply floating-point rows by the one matrix of shared experts and add its bias, ``[T, M]``."""
        weight_1MK, _, bias_1M = matrix
        bias_M = None if bias_1M is None else bias_1M[0].to(rows_TK.dtype)
        return linear(rows_TK, weight_1MK[0].to(rows_TK.dtype), bias_M)

    def _requantized(self, inner_NI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows of the second product, and their scales if they have any."""
        return inner_NI, None

    def _product(
        self,
        batch: ExpertBatch,
        rows_NK: torch.Tensor,
        scale_N: torch.Tensor | None,
        matrices: Matrices,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Multiply each row, in the order of the batch's, by the matrix of its slot and add its bias: ``[N, M]``."""
        weight_SMK, weight_scale_SM, bias_SM = matrices
        more: dict[str, Any] = {}
        if scale_N is not None and weight_scale_SM is not None:
            more = {"scale": [weight_scale_SM], "per_token_scale": [scale_N], "output_dtype": dtype}
        elif bias_SM is not None:
            more = {"bias": [bias_SM]}
        # One count is its own cumulative sum, and the operator takes no list of one count.
        alone = batch.group_list_S.shape[0] == 1
        (out_NM,) = self._operators.npu_grouped_matmul(
            [rows_NK],
            [weight_SMK.transpose(1, 2)],
            group_list=batch.group_list_S,
            split_item=2,
            group_type=0,
            group_list_type=GroupListType.CUMULATIVE if alone else batch.group_list_type,
            **more,
        )
        if bias_SM is not None and "bias" not in more:
            # Of int8 rows the operator takes biases that it scales with the product, in int32 alone.
            row_N = torch.arange(rows_NK.shape[0], device=rows_NK.device)
            slot_N = torch.searchsorted(batch.counts_S.cumsum(0), row_N, right=True)
            out_NM += bias_SM.index_select(0, slot_N.clamp(max=bias_SM.shape[0] - 1))
        return out_NM


class W8A8(Unquantized):
    """int8 weights with a scale per output row; tokens are quantized at each call, with a scale each.

    Weights are loaded in floating point.
    """

    quantizes_tokens = True

    def process_after_load(self, weights: ExpertWeights, dtype: torch.dtype) -> ExpertWeights:
        """Return the weights in int8, as they may be already."""
        if weights.w13_scale_SI is not None:
            return weights
        w13_SIH, w13_scale_SI = _quantized(self._operators, weights.w13_SIH, dtype)
        w2_SHI, w2_scale_SH = _quantized(self._operators, weights.w2_SHI, dtype)
        scales = {"w13_scale_SI": w13_scale_SI, "w2_scale_SH": w2_scale_SH}
        return replace(weights, w13_SIH=w13_SIH, w2_SHI=w2_SHI, **scales)

    def linear(self, rows_TK: torch.Tensor, matrix: Matrices) -> torch.Tensor:
        """Quantize the rows, and multiply them as one group."""
        if not rows_TK.shape[0]:
            return rows_TK.new_empty(0, matrix[0].shape[1])
        int8_TK, scale_T = self._operators.npu_dynamic_quant(rows_TK)
        count_1 = torch.full((1,), rows_TK.shape[0], dtype=torch.int64, device=rows_TK.device)
        batch = ExpertBatch(int8_TK, count_1, GroupListType.CUMULATIVE)
        return self._product(batch, int8_TK, scale_T, matrix, rows_TK.dtype)

    def _requantized(self, inner_NI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._operators.npu_dynamic_quant(inner_NI)


class W8A8Dynamic(W8A8):
    """W8A8 of weights that are loaded in int8, with their scales, as ModelSlim writes them."""

    def create_weights(
        self, shape: MoEShape, slots: int, dtype: torch.dtype, device: torch.device, biased: bool
    ) -> ExpertWeights:
        """Make int8 tensors and scales; arguments as for ``Unquantized``."""
        weights = super().create_weights(shape, slots, dtype, device, biased)
        w13_SIH, w2_SHI = (torch.empty_like(of, dtype=torch.int8) for of in (weights.w13_SIH, weights.w2_SHI))
        w13_scale_SI, w2_scale_SH = (of[:, :, 0].to(_scale_dtype(dtype)) for of in (w13_SIH, w2_SHI))
        scales = {"w13_scale_SI": w13_scale_SI, "w2_scale_SH": w2_scale_SH}
        return replace(weights, w13_SIH=w13_SIH, w2_SHI=w2_SHI, **scales)


def _scale_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type of weights' scales for tokens of ``dtype``, as the grouped product of torch_npu wants them."""
    return dtype if dtype == torch.bfloat16 else torch.float32


def _quantized(
    operators: Operators, weight_SMK: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    rows_NK = weight_SMK.flatten(0, 1)
    int8_NK, scale_N = operators.npu_dynamic_quant(rows_NK)
    if _scale_dtype(dtype) != scale_N.dtype:
        # Quantized again by the rounded scale, so that its rounding is not in every weight of the row.
        scale_N = scale_N.to(dtype)
        steps_NK = rows_NK.float() / scale_N.float().clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1)
        int8_NK = steps_NK.round().clamp(-127, 127).to(torch.int8)
    return int8_NK.view(weight_SMK.shape), scale_N.view(weight_SMK.shape[:2])


_METHODS = {"none": Unquantized, "w8a8": W8A8, "w8a8_dynamic": W8A8Dynamic}


def quant_method(layer: int, name: str, operators: Operators, activation: Activation) -> Unquantized:
    """Return the method of that ``name``; ``ValueError`` naming the ``layer`` where nothing computes with it.

    ``operators`` and ``activation`` are its arguments.
    """
    if name not in _METHODS:
        raise ValueError(
            f"layer {layer}: nothing here computes with the quantization {name!r}; use one of {', '.join(_METHODS)}"
        )
    return _METHODS[name](operators, activation)
