"""Experts that compute nothing: their tokens need not travel."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch


class FreeExpert(str, Enum):
    """What an expert without weights gives back."""

    ZERO = "zero"
    IDENTITY = "identity"


@dataclass(frozen=True)
class FreeChoices:
    """A router's choices with those of free experts taken out."""

    topk_ids_TK: torch.Tensor
    """Ids below E; 0 in the places of free experts."""

    active_TK: torch.Tensor
    """bool: the choices of real experts."""

    out_TH: torch.Tensor | None
    """What the free experts add to each token's output; ``None`` where they are zeros."""


def take_out(
    hidden_TH: torch.Tensor,
    topk_ids_TK: torch.Tensor,
    topk_weights_TK: torch.Tensor,
    experts: int,
    kind: FreeExpert,
) -> FreeChoices:
    """Split off the choices of ids from ``experts`` on, which are of free experts."""
    active_TK = topk_ids_TK < experts
    ids_TK = topk_ids_TK.masked_fill(~active_TK, 0)
    if kind is FreeExpert.ZERO:
        return FreeChoices(ids_TK, active_TK, None)
    weight_T1 = topk_weights_TK.float().masked_fill(active_TK, 0.0).sum(dim=1, keepdim=True)
    return FreeChoices(ids_TK, active_TK, (hidden_TH * weight_T1).to(hidden_TH.dtype))
