"""The tensors of a rank's experts, in floating point or W8A8: where they come from, and what moves with an expert."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from worker_agent.moe.operators import Operators
from worker_agent.moe.shape import MoEShape

ExpertSource = Callable[[int], tuple[torch.Tensor, torch.Tensor]]
"""Logical expert id -> (``w13 [2*I, H]``, ``w2 [H, I]``), the same on whichever rank it is called.

Of biases it is (``[2*I]``, ``[H]``). Without a gate the first has I rows.
"""


def seeded_experts(shape: MoEShape, seed: int = 0) -> ExpertSource:
    """Random float32 experts that keep the scale of their input, drawn from seed, layer and expert id."""

    def draw(expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed((seed * 1_000_003 + shape.layer) * 1_000_003 + expert)
        w13_IH = torch.randn(shape.first_rows, shape.hidden, generator=generator)
        w2_HI = torch.randn(shape.hidden, shape.intermediate, generator=generator)
        return w13_IH * shape.hidden**-0.5, w2_HI * shape.intermediate**-0.5

    return draw


def seeded_biases(shape: MoEShape, seed: int = 0) -> ExpertSource:
    """Random float32 biases, drawn from seed, layer and expert id."""

    def draw(expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed((seed * 1_000_003 + shape.layer) * 1_000_003 - 1 - expert)
        first_I, second_H = (
            torch.randn(rows, generator=generator) for rows in (shape.first_rows, shape.hidden)
        )
        return first_I, second_H

    return draw


@dataclass(frozen=True)
class ExpertWeights:
    """Every tensor that S experts read. With scales, weights are int8 and tokens are quantized as well."""

    w13_SIH: torch.Tensor
    """``[S, 2*I, H]``, the gate's rows before the up projection's; ``[S, I, H]`` without a gate."""

    w2_SHI: torch.Tensor
    w13_scale_SI: torch.Tensor | None = None
    """float32 or bfloat16 ``[S, 2*I]``."""

    w2_scale_SH: torch.Tensor | None = None
    """float32 or bfloat16 ``[S, H]``."""

    w13_bias_SI: torch.Tensor | None = None
    """``[S, 2*I]`` of ``bias_dtype``; either both products have biases or neither."""

    w2_bias_SH: torch.Tensor | None = None
    """``[S, H]``."""

    @property
    def quantized(self) -> bool:
        """Whether the weights are int8."""
        return self.w13_scale_SI is not None

    def named(self) -> dict[str, torch.Tensor]:
        """All tensors that there are, each ``[S, ...]``, by the names that layers give them."""
        every = {
            "w13_weight": self.w13_SIH,
            "w2_weight": self.w2_SHI,
            "w13_weight_scale": self.w13_scale_SI,
            "w2_weight_scale": self.w2_scale_SH,
            "w13_bias": self.w13_bias_SI,
            "w2_bias": self.w2_bias_SH,
        }
        return {name: tensor for name, tensor in every.items() if tensor is not None}

    def tensors(self) -> list[torch.Tensor]:
        """The same without names."""
        return list(self.named().values())

    def quantize(self, operators: Operators, dtype: torch.dtype = torch.float32) -> ExpertWeights:
        """The same weights in int8 with one scale per output row, for tokens of ``dtype``.

        Scales are of that dtype where it is bfloat16, as the grouped product of torch_npu wants, and else float32.
        """
        w13_SIH, w13_scale_SI = _quantized_matrices(operators, self.w13_SIH, dtype)
        w2_SHI, w2_scale_SH = _quantized_matrices(operators, self.w2_SHI, dtype)
        return ExpertWeights(w13_SIH, w2_SHI, w13_scale_SI, w2_scale_SH, self.w13_bias_SI, self.w2_bias_SH)


def bias_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of biases for tokens of ``dtype``: as the grouped product of torch_npu wants them."""
    return torch.float32 if dtype == torch.bfloat16 else dtype


def build_weights(
    shape: MoEShape,
    experts: ExpertSource,
    logical_S: list[int],
    dtype: torch.dtype,
    device: torch.device | str,
    biases: ExpertSource | None = None,
) -> ExpertWeights:
    """The weights of the expert in each slot; raises ``ValueError`` where a source gives another shape.

    Parameters
    ----------
    shape
        Of the layer.
    experts, biases
        Where weights come from, and biases, if there are any.
    logical_S
        The expert in each slot of this rank.
    dtype, device
        Type of the weights, and where they are.
    """
    slots, rows, hidden = len(logical_S), shape.first_rows, shape.hidden
    w13_SIH = torch.empty(slots, rows, hidden, dtype=dtype, device=device)
    w2_SHI = torch.empty(slots, hidden, shape.intermediate, dtype=dtype, device=device)
    _fill(shape.layer, logical_S, experts, {"w13": w13_SIH, "w2": w2_SHI})
    if biases is None:
        return ExpertWeights(w13_SIH, w2_SHI)
    w13_bias_SI = torch.empty(slots, rows, dtype=bias_dtype(dtype), device=device)
    w2_bias_SH = torch.empty(slots, hidden, dtype=bias_dtype(dtype), device=device)
    _fill(shape.layer, logical_S, biases, {"w13 bias": w13_bias_SI, "w2 bias": w2_bias_SH})
    return ExpertWeights(w13_SIH, w2_SHI, w13_bias_SI=w13_bias_SI, w2_bias_SH=w2_bias_SH)


def _fill(layer: int, logical_S: list[int], source: ExpertSource, stacked: dict[str, torch.Tensor]) -> None:
    """Copy what a source gives for each slot's expert, in order, into tensors ``[S, ...]``."""
    for slot, expert in enumerate(logical_S):
        for (name, tensor_S), given in zip(stacked.items(), source(expert), strict=True):
            if given.shape != tensor_S.shape[1:]:
                raise ValueError(
                    f"layer {layer}: {name} of expert {expert} must have the shape "
                    f"{list(tensor_S.shape[1:])}, got {list(given.shape)}"
                )
            tensor_S[slot].copy_(given)


def _quantized_matrices(
    operators: Operators, weight_SMK: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    rows_NK = weight_SMK.flatten(0, 1)
    int8_NK, scale_N = operators.npu_dynamic_quant(rows_NK)
    if dtype == torch.bfloat16:
        # Quantized again by the rounded scale, so that its rounding is not in every weight of the row.
        scale_N = scale_N.to(dtype)
        steps_NK = rows_NK.float() / scale_N.float().clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1)
        int8_NK = steps_NK.round().clamp(-127, 127).to(torch.int8)
    return int8_NK.view(weight_SMK.shape), scale_N.view(weight_SMK.shape[:2])


NOT_OF_EXPERTS = ("e_score_correction_bias", "shared_experts.", "_shared_experts.", "gate.", "_gate.")
"""Beginnings of names of parameters that belong to the router or the shared experts, as engines call them; they never
move."""


def movable_weights(
    layer: int, slots: int, named: Iterable[tuple[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """One ``[S, -1]`` view of each expert tensor, sharing its memory; others (router, shared experts) left out.

    A tensor ``[S, a, b]`` that is contiguous only when its inner dimensions are swapped (a transposed scale)
    is viewed that way. Raises ``ValueError`` where a tensor has another number of slots or no such view
    exists.
    """
    return {
        name: _flat_rows(layer, slots, name, tensor)
        for name, tensor in named
        if not name.startswith(NOT_OF_EXPERTS)
    }


def _flat_rows(layer: int, slots: int, name: str, tensor_S: torch.Tensor) -> torch.Tensor:
    if tensor_S.ndim == 0 or tensor_S.shape[0] != slots:
        raise ValueError(
            f"layer {layer}: {name} must have the shape [{slots}, ...], got {list(tensor_S.shape)}"
        )
    if not tensor_S.is_contiguous() and tensor_S.ndim == 3:
        tensor_S = tensor_S.transpose(1, 2)
    if not tensor_S.is_contiguous():
        raise ValueError(
            f"layer {layer}: {name} must be contiguous, up to a swap of its inner dimensions; "
            f"its strides are {list(tensor_S.stride())} for the shape {list(tensor_S.shape)}"
        )
    return tensor_S.view(slots, -1)
