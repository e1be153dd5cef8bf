"""Quantization methods: expert tensors as a checkpoint has them, as a layer computes with them, and the products."""

from __future__ import annotations

import torch

from worker_agent.moe.experts import ExpertBatch, QuantMethod, activated, grouped_product
from worker_agent.moe.operators import Operators
from worker_agent.moe.shape import Activation, MoEShape
from worker_agent.moe.weights import ExpertWeights


class Unquantized:
    """Weights and tokens in floating point."""

    quantizes_tokens = False

    def create_weights(
        self, shape: MoEShape, slots: int, dtype: torch.dtype, device: torch.device, biased: bool
    ) -> ExpertWeights:
        """Make the tensors of as many ``slots``, on ``device``, for whoever loads them.

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

    def process_after_load(
        self, weights: ExpertWeights, _operators: Operators, _dtype: torch.dtype
    ) -> ExpertWeights:
        """Return what the layer computes with: the same."""
        return weights

    def apply(
        self,
        operators: Operators,
        batch: ExpertBatch,
        weights: ExpertWeights,
        activation: Activation,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Multiply, activate and multiply a ``batch`` of rows by ``operators``; ``weights`` are those of its slots.

        The outputs are of ``dtype``, with the ``activation`` between the two products.
        """
        first = weights.w13_SIH, weights.w13_scale_SI, weights.w13_bias_SI
        first_NI = grouped_product(operators, batch, batch.rows, batch.scale_N, *first, dtype)
        inner_NI, scale_N = self._requantized(operators, activated(operators, activation, first_NI))
        second = weights.w2_SHI, weights.w2_scale_SH, weights.w2_bias_SH
        return grouped_product(operators, batch, inner_NI, scale_N, *second, dtype)

    def _requantized(
        self, _operators: Operators, inner_NI: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows of the second product, and their scales if they have any."""
        return inner_NI, None


class W8A8(Unquantized):
    """int8 weights with a scale per output row; tokens are quantized at each call, with a scale each.

    Weights are loaded in floating point.
    """

    quantizes_tokens = True

    def process_after_load(
        self, weights: ExpertWeights, operators: Operators, dtype: torch.dtype
    ) -> ExpertWeights:
        """Return the weights in int8."""
        return weights if weights.quantized else weights.quantize(operators, dtype)

    def _requantized(
        self, _operators: Operators, inner_NI: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return _operators.npu_dynamic_quant(inner_NI)


_METHODS: dict[str, QuantMethod] = {"none": Unquantized(), "w8a8": W8A8()}


def quant_method(layer: int, name: str) -> QuantMethod:
    """Return the method of that ``name``; ``ValueError`` naming the ``layer`` where nothing computes with it."""
    if name not in _METHODS:
        raise ValueError(
            f"layer {layer}: nothing here computes with the quantization {name!r}; use one of {', '.join(_METHODS)}"
        )
    return _METHODS[name]
