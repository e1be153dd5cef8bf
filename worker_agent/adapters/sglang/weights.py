"""The tensors that make up SGLang's experts: slot by slot, and whether they are still the ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from worker_agent.adapters.errors import UnsupportedEngineError


def expert_weights(tensors: Iterable[torch.Tensor], slots: int, layer: int) -> list[torch.Tensor]:
    """What SGLang's own EPLB would move of one layer, each as a contiguous ``[S, ...]`` over the same memory.

    Parameters
    ----------
    tensors
        ``routed_experts_weights_of_layer`` of the layer. Kernels may keep them transposed: scales, say, by column.
    slots
        S.
    layer
        For messages.

    Raises
    ------
    UnsupportedEngineError
        Where one has gaps between its elements, or does not have a slot in front.
    """
    found = [_by_slot(tensor, slots) for tensor in tensors]
    if not found or any(tensor is None for tensor in found):
        raise UnsupportedEngineError(
            f"the experts of layer {layer} in this format",
            f"Their tensors are not one part for each of {slots} slots without gaps between them",
            "Choose another quantisation or MoE runner backend",
        )
    return [tensor for tensor in found if tensor is not None]


def _by_slot(tensor: torch.Tensor, slots: int) -> torch.Tensor | None:
    """A view with the axes after the first in the order in which they are in memory."""
    if tensor.dim() == 0 or tensor.shape[0] != slots:
        return None
    inner = sorted(range(1, tensor.dim()), key=tensor.stride, reverse=True)
    view = tensor.permute(0, *inner)
    return view if view.is_contiguous() else None


def addresses_in(model: Any) -> set[int]:
    """Where the parameters of a model begin."""
    return {parameter.data_ptr() for parameter in model.parameters()}


def addresses_of(weights_by_layer: Iterable[Sequence[torch.Tensor]]) -> set[int]:
    """Where experts' weights begin."""
    return {weight.data_ptr() for weights in weights_by_layer for weight in weights}
