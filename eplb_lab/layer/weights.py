"""Expert tensors of a layer, in floating point or W8A8, and the sources of their values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from eplb_lab.layer.shape import MoEShape

WEIGHT_NAMES = ("w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale", "w13_bias", "w2_bias")
"""Names of a layer's expert tensors, in the order of ``ExpertWeights``."""

ExpertSource = Callable[[int], tuple[torch.Tensor, torch.Tensor]]
"""Function that returns a logical expert's weights, ``w13 [2*I, H]`` and ``w2 [H, I]``, the same on every rank.

A source of biases returns ``[2*I]`` and ``[H]``.
"""


def seeded_experts(shape: MoEShape, seed: int = 0) -> ExpertSource:
    """Return a source of random float32 experts that roughly preserve the scale of their input.

    The weights depend only on the seed, the layer and the expert.
    """

    def draw(expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed((seed * 1_000_003 + shape.layer) * 1_000_003 + expert)
        w13_IH = torch.randn(2 * shape.intermediate, shape.hidden, generator=generator)
        w2_HI = torch.randn(shape.hidden, shape.intermediate, generator=generator)
        return w13_IH * shape.hidden**-0.5, w2_HI * shape.intermediate**-0.5

    return draw


Matrices = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""Matrices ``[S, M, K]`` of one projection, their scales ``[S, M]`` if they are int8, and any biases ``[S, M]``."""


@dataclass(frozen=True)
class ExpertWeights:
    """All tensors of S experts. If there are scales, weights are int8 and tokens are quantised as well."""

    w13_SIH: torch.Tensor
    """``[S, 2*I, H]``: rows of the gate, then rows of the up projection."""

    w2_SHI: torch.Tensor
    w13_scale_SI: torch.Tensor | None = None
    """float32 or bfloat16 ``[S, 2*I]``."""

    w2_scale_SH: torch.Tensor | None = None
    """float32 or bfloat16 ``[S, H]``."""

    w13_bias_SI: torch.Tensor | None = None
    """``[S, 2*I]`` of ``bias_dtype``. Either both products have biases or neither has."""

    w2_bias_SH: torch.Tensor | None = None
    """``[S, H]`` of ``bias_dtype``."""

    @property
    def first(self) -> Matrices:
        """Gate and up projections."""
        return self.w13_SIH, self.w13_scale_SI, self.w13_bias_SI

    @property
    def second(self) -> Matrices:
        """Down projection."""
        return self.w2_SHI, self.w2_scale_SH, self.w2_bias_SH

    def named(self) -> dict[str, torch.Tensor]:
        """Return the existing tensors, each ``[S, ...]``, keyed by name in the layer."""
        pairs = zip(WEIGHT_NAMES, vars(self).values(), strict=True)
        return {name: tensor for name, tensor in pairs if tensor is not None}

    @staticmethod
    def bias_dtype(dtype: torch.dtype) -> torch.dtype:
        """Return the data type of biases that torch_npu's grouped product requires for tokens of ``dtype``."""
        return torch.float32 if dtype == torch.bfloat16 else dtype


def fill_weights(
    weights: ExpertWeights,
    shape: MoEShape,
    logical_S: list[int],
    experts: ExpertSource,
    biases: ExpertSource | None = None,
) -> ExpertWeights:
    """Copy each slot's expert into ``weights``, and return ``weights``.

    Parameters
    ----------
    weights
        Floating-point tensors to fill.
    shape
        Dimensions of the layer.
    logical_S
        Logical expert of each slot of this rank.
    experts
        Source of the weights.
    biases
        Source of the biases, if the experts have any.

    Raises
    ------
    ValueError
        If a source returns tensors of the wrong shape, or if ``weights`` are int8.
    """
    _fill(shape.layer, logical_S, experts, {"w13": weights.w13_SIH, "w2": weights.w2_SHI})
    if biases is not None and weights.w13_bias_SI is not None and weights.w2_bias_SH is not None:
        bias_tensors = {"w13 bias": weights.w13_bias_SI, "w2 bias": weights.w2_bias_SH}
        _fill(shape.layer, logical_S, biases, bias_tensors)
    return weights


def _fill(layer: int, logical_S: list[int], source: ExpertSource, tensors: dict[str, torch.Tensor]) -> None:
    """Copy the expert of each slot from its source into ``tensors``."""
    for slot, expert in enumerate(logical_S):
        for (name, tensor_S), value in zip(tensors.items(), source(expert), strict=True):
            if value.shape != tensor_S.shape[1:]:
                raise ValueError(
                    f"layer {layer}: {name} of expert {expert} must have shape "
                    f"{list(tensor_S.shape[1:])}, got {list(value.shape)}"
                )
            if not tensor_S.is_floating_point():
                raise ValueError(
                    f"layer {layer}: int8 weights can only be loaded from a checkpoint; use quantization w8a8"
                )
            tensor_S[slot].copy_(value)


class ExpertTensors(torch.nn.Module):
    """Module with the tensors of S local slots, in the layout of ``ExpertWeights``.

    The tensors keep their addresses, because experts are moved by writing into them.
    """

    w13_weight: torch.Tensor
    w2_weight: torch.Tensor
    w13_weight_scale: torch.Tensor | None
    w2_weight_scale: torch.Tensor | None
    w13_bias: torch.Tensor | None
    w2_bias: torch.Tensor | None

    layer_index: int

    def _hold(self, layer: int, weights: ExpertWeights) -> None:
        self.layer_index = layer
        named = weights.named()
        for name in WEIGHT_NAMES:
            self.register_buffer(name, named.get(name))

    def expert_weights(self) -> list[torch.Tensor]:
        """Return all tensors that the expert kernels read; their first dimension is the local slot."""
        return list(self._weights().named().values())

    def _weights(self) -> ExpertWeights:
        return ExpertWeights(*(getattr(self, name) for name in WEIGHT_NAMES))
