"""The tensors of a rank's experts, in floating point or W8A8: their sources, and a layer's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from eplb_lab.layer.shape import MoEShape

WEIGHT_NAMES = ("w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale", "w13_bias", "w2_bias")
"""Names of a layer's expert tensors, in the order of ``ExpertWeights``."""

ExpertSource = Callable[[int], tuple[torch.Tensor, torch.Tensor]]
"""Logical expert id -> (``w13 [2*I, H]``, ``w2 [H, I]``), the same on whichever rank it is called.

Of biases it is (``[2*I]``, ``[H]``).
"""


def seeded_experts(shape: MoEShape, seed: int = 0) -> ExpertSource:
    """Return random float32 experts that keep the scale of their input, drawn from seed, layer and expert id."""

    def draw(expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed((seed * 1_000_003 + shape.layer) * 1_000_003 + expert)
        w13_IH = torch.randn(2 * shape.intermediate, shape.hidden, generator=generator)
        w2_HI = torch.randn(shape.hidden, shape.intermediate, generator=generator)
        return w13_IH * shape.hidden**-0.5, w2_HI * shape.intermediate**-0.5

    return draw


Matrices = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""``[S, M, K]``, of int8 matrices scales ``[S, M]``, and biases ``[S, M]`` if there are any."""


@dataclass(frozen=True)
class ExpertWeights:
    """Every tensor that S experts read. With scales, weights are int8 and tokens are quantized as well."""

    w13_SIH: torch.Tensor
    """``[S, 2*I, H]``, the gate's rows before the up projection's."""

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
    def first(self) -> Matrices:
        """Gate and up projection."""
        return self.w13_SIH, self.w13_scale_SI, self.w13_bias_SI

    @property
    def second(self) -> Matrices:
        """Down projection."""
        return self.w2_SHI, self.w2_scale_SH, self.w2_bias_SH

    def named(self) -> dict[str, torch.Tensor]:
        """Return the tensors, each ``[S, ...]``, by the names that layers give them."""
        every = zip(WEIGHT_NAMES, vars(self).values(), strict=True)
        return {name: tensor for name, tensor in every if tensor is not None}

    @staticmethod
    def bias_dtype(dtype: torch.dtype) -> torch.dtype:
        """Return the type of biases for tokens of ``dtype``: as the grouped product of torch_npu wants them."""
        return torch.float32 if dtype == torch.bfloat16 else dtype


def fill_weights(
    weights: ExpertWeights,
    shape: MoEShape,
    logical_S: list[int],
    experts: ExpertSource,
    biases: ExpertSource | None = None,
) -> ExpertWeights:
    """Copy the expert of each slot into floating-point ``weights``; ``ValueError`` where a source gives another shape.

    Weights come from ``experts``, and biases, if there are any, from ``biases``; ``logical_S`` has the expert in each
    slot of this rank, in the ``shape`` of the layer.
    """
    _fill(shape.layer, logical_S, experts, {"w13": weights.w13_SIH, "w2": weights.w2_SHI})
    if biases is not None and weights.w13_bias_SI is not None and weights.w2_bias_SH is not None:
        both = {"w13 bias": weights.w13_bias_SI, "w2 bias": weights.w2_bias_SH}
        _fill(shape.layer, logical_S, biases, both)
    return weights


def _fill(layer: int, logical_S: list[int], source: ExpertSource, tensors: dict[str, torch.Tensor]) -> None:
    """Copy what a source gives for each slot's expert, which must have the shape of its place."""
    for slot, expert in enumerate(logical_S):
        for (name, tensor_S), given in zip(tensors.items(), source(expert), strict=True):
            if given.shape != tensor_S.shape[1:]:
                raise ValueError(
                    f"layer {layer}: {name} of expert {expert} must have the shape "
                    f"{list(tensor_S.shape[1:])}, got {list(given.shape)}"
                )
            if not tensor_S.is_floating_point():
                raise ValueError(
                    f"layer {layer}: int8 weights come from a checkpoint alone; use quantization w8a8"
                )
            tensor_S[slot].copy_(given)


class ExpertTensors(torch.nn.Module):
    """A layer's tensors of its S local slots, as ``ExpertWeights`` has them.

    They keep their addresses: experts move by writing into them.
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
        """Return every tensor that the expert kernels read, with the local slot as first dimension."""
        return list(self._weights().named().values())

    def _weights(self) -> ExpertWeights:
        return ExpertWeights(*(getattr(self, name) for name in WEIGHT_NAMES))
