"""The tensors that move with an expert, as balancing wants them: one flat row a slot, in place."""

from __future__ import annotations

from collections.abc import Iterable

import torch

NOT_OF_EXPERTS = ("e_score_correction_bias", "shared_experts.", "gate.")
"""Beginnings of names of parameters that belong to the router or the shared experts, and never move."""


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
