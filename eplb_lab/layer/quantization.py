"""Quantisation methods: the tensors to load, their conversion after loading, and the experts' matrix products."""

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
    """Method with floating-point weights and tokens. It is the base class of the other methods.

    It implements ``Experts`` with the operators of an NPU, in the standard format.

    Parameters
    ----------
    operators
        Operators for the device.
    activation
        Activation between the two products.
    """

    format = ActivationFormat.STANDARD
    quantizes_tokens = False
    """True if the experts require int8 rows with one scale each."""

    def __init__(self, operators: Operators, activation: Activation = Activation.SILU) -> None:
        self._operators = operators
        self._activation = activation

    def create_weights(
        self, shape: MoEShape, slots: int, dtype: torch.dtype, device: torch.device, biased: bool
    ) -> ExpertWeights:
        """Create empty tensors in checkpoint format.

        Parameters
        ----------
        shape
            Dimensions of the layer.
        slots
            Number of local slots.
        dtype
            Data type of the tokens.
        device
            Device of the tensors.
        biased
            True if the experts have biases.
        """
        rows = 2 * shape.intermediate

        def empty(*sizes: int, tensor_dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(slots, *sizes, dtype=tensor_dtype, device=device)

        weights = empty(rows, shape.hidden), empty(shape.hidden, shape.intermediate)
        if not biased:
            return ExpertWeights(*weights)
        bias_dtype = ExpertWeights.bias_dtype(dtype)
        return ExpertWeights(
            *weights,
            w13_bias_SI=empty(rows, tensor_dtype=bias_dtype),
            w2_bias_SH=empty(shape.hidden, tensor_dtype=bias_dtype),
        )

    def process_after_load(self, weights: ExpertWeights, _dtype: torch.dtype) -> ExpertWeights:
        """Convert loaded weights to the format that ``apply`` uses for tokens of ``_dtype``. Here, this is a no-op."""
        return weights

    def apply(self, batch: ExpertBatch, weights: ExpertWeights, dtype: torch.dtype) -> torch.Tensor:
        """Compute the experts with grouped products. If there are no rows, no operator is called."""
        if not batch.rows.shape[0]:
            return batch.rows.to(dtype)
        first_NI = self._product(batch, batch.rows, batch.scale_N, weights.first, dtype)
        inner_NI, scale_N = self._requantized(self.activated(first_NI))
        return self._product(batch, inner_NI, scale_N, weights.second, dtype)

    def activated(self, first_NI: torch.Tensor) -> torch.Tensor:
        """Apply the activation to a first product and return ``[N, I]``. Uses the fused operator if there is one."""
        # The operator does not support empty tensors.
        if self._activation is Activation.SILU and first_NI.shape[0]:
            return self._operators.npu_swiglu(first_NI)
        return self._activation(first_NI)

    def linear(self, rows_TK: torch.Tensor, matrix: Matrices) -> torch.Tensor:
        """Return floating-point rows times the single matrix of shared experts, plus its bias, ``[T, M]``."""
        weight_1MK, _, bias_1M = matrix
        bias_M = None if bias_1M is None else bias_1M[0].to(rows_TK.dtype)
        return linear(rows_TK, weight_1MK[0].to(rows_TK.dtype), bias_M)

    def _requantized(self, inner_NI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the input rows of the second product, and their scales if the rows are quantised."""
        return inner_NI, None

    def _product(
        self,
        batch: ExpertBatch,
        rows_NK: torch.Tensor,
        scale_N: torch.Tensor | None,
        matrices: Matrices,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Return each row times its slot's matrix, plus the slot's bias, ``[N, M]``.

        ``rows_NK`` and ``scale_N`` are in the order of the batch's rows.
        """
        weight_SMK, weight_scale_SM, bias_SM = matrices
        options: dict[str, Any] = {}
        if scale_N is not None and weight_scale_SM is not None:
            options = {"scale": [weight_scale_SM], "per_token_scale": [scale_N], "output_dtype": dtype}
        elif bias_SM is not None:
            options = {"bias": [bias_SM]}
        # The operator does not support a list of one count. A single count equals its cumulative sum, so it is
        # passed as a cumulative list.
        single_slot = batch.group_list_S.shape[0] == 1
        (out_NM,) = self._operators.npu_grouped_matmul(
            [rows_NK],
            [weight_SMK.transpose(1, 2)],
            group_list=batch.group_list_S,
            split_item=2,
            group_type=0,
            group_list_type=GroupListType.CUMULATIVE if single_slot else batch.group_list_type,
            **options,
        )
        if bias_SM is not None and "bias" not in options:
            # For int8 rows, the operator supports only int32 biases, which it scales together with the product.
            row_N = torch.arange(rows_NK.shape[0], device=rows_NK.device)
            slot_N = torch.searchsorted(batch.counts_S.cumsum(0), row_N, right=True)
            out_NM += bias_SM.index_select(0, slot_N.clamp(max=bias_SM.shape[0] - 1))
        return out_NM


class W8A8(Unquantized):
    """int8 weights with one scale per output row, and tokens quantised on each call with one scale per token.

    Weights are loaded in floating point and quantised afterwards.
    """

    quantizes_tokens = True

    def process_after_load(self, weights: ExpertWeights, dtype: torch.dtype) -> ExpertWeights:
        """Quantise the weights unless they are already int8."""
        if weights.w13_scale_SI is not None:
            return weights
        w13_SIH, w13_scale_SI = _quantized(self._operators, weights.w13_SIH, dtype)
        w2_SHI, w2_scale_SH = _quantized(self._operators, weights.w2_SHI, dtype)
        scales = {"w13_scale_SI": w13_scale_SI, "w2_scale_SH": w2_scale_SH}
        return replace(weights, w13_SIH=w13_SIH, w2_SHI=w2_SHI, **scales)

    def linear(self, rows_TK: torch.Tensor, matrix: Matrices) -> torch.Tensor:
        """Quantise the rows, multiply them as one group, and return the product, ``[T, M]``."""
        if not rows_TK.shape[0]:
            return rows_TK.new_empty(0, matrix[0].shape[1])
        int8_TK, scale_T = self._operators.npu_dynamic_quant(rows_TK)
        count_1 = torch.full((1,), rows_TK.shape[0], dtype=torch.int64, device=rows_TK.device)
        batch = ExpertBatch(int8_TK, count_1, GroupListType.CUMULATIVE)
        return self._product(batch, int8_TK, scale_T, matrix, rows_TK.dtype)

    def _requantized(self, inner_NI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._operators.npu_dynamic_quant(inner_NI)


class W8A8Dynamic(W8A8):
    """W8A8 with weights that are loaded as int8 together with their scales, as in ModelSlim checkpoints."""

    def create_weights(
        self, shape: MoEShape, slots: int, dtype: torch.dtype, device: torch.device, biased: bool
    ) -> ExpertWeights:
        """Create empty int8 tensors and their scales; arguments as for ``Unquantized``."""
        weights = super().create_weights(shape, slots, dtype, device, biased)
        w13_SIH, w2_SHI = (
            torch.empty_like(weight, dtype=torch.int8) for weight in (weights.w13_SIH, weights.w2_SHI)
        )
        w13_scale_SI, w2_scale_SH = (weight[:, :, 0].to(_scale_dtype(dtype)) for weight in (w13_SIH, w2_SHI))
        scales = {"w13_scale_SI": w13_scale_SI, "w2_scale_SH": w2_scale_SH}
        return replace(weights, w13_SIH=w13_SIH, w2_SHI=w2_SHI, **scales)


def _scale_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the data type of weight scales that torch_npu's grouped product requires for tokens of ``dtype``."""
    return dtype if dtype == torch.bfloat16 else torch.float32


def _quantized(
    operators: Operators, weight_SMK: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    rows_NK = weight_SMK.flatten(0, 1)
    int8_NK, scale_N = operators.npu_dynamic_quant(rows_NK)
    if _scale_dtype(dtype) != scale_N.dtype:
        # Quantise again with the rounded scale. Otherwise its rounding error affects all weights of the row.
        scale_N = scale_N.to(dtype)
        steps_NK = rows_NK.float() / scale_N.float().clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1)
        int8_NK = steps_NK.round().clamp(-127, 127).to(torch.int8)
    return int8_NK.view(weight_SMK.shape), scale_N.view(weight_SMK.shape[:2])


_METHODS = {"none": Unquantized, "w8a8": W8A8, "w8a8_dynamic": W8A8Dynamic}


def quant_method(layer: int, name: str, operators: Operators, activation: Activation) -> Unquantized:
    """Return the quantisation method called ``name``, for these operators and this activation.

    Raises ``ValueError`` if there is no such method.
    """
    if name not in _METHODS:
        raise ValueError(
            f"layer {layer}: quantization {name!r} is not supported; use one of {', '.join(_METHODS)}"
        )
    return _METHODS[name](operators, activation)
