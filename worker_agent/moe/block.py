"""A whole MoE block: router, experts without weights, expert-parallel layer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from eplb_service.wire.heat import StepPhase
from worker_agent.moe.layer import ExpertParallelMoE
from worker_agent.moe.router import Router, balanced_choices
from worker_agent.moe.shape import masked_outputs


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


class MoEBlock(torch.nn.Module):
    """What a model calls: hidden states and router logits in, the block's output out.

    Parameters
    ----------
    router
        Over the layer's E experts, and over free ones behind them where ``free_experts`` says what those do.
    layer
        The expert-parallel layer, with its shared experts where it has any.
    free_experts
        The meaning of ids from E on. Raises ``ValueError`` where the router knows more experts than the layer and
        this is not said, or the other way round.
    """

    def __init__(
        self, router: Router, layer: ExpertParallelMoE, free_experts: FreeExpert | None = None
    ) -> None:
        super().__init__()
        shape = layer.shape
        if (router.experts > shape.experts) != (free_experts is not None) or router.experts < shape.experts:
            raise ValueError(
                f"layer {shape.layer}: the router chooses among {router.experts} experts, the layer has "
                f"{shape.experts}; only free experts, whose kind is given, can make up the difference"
            )
        self.router = router
        self.layer = layer
        self._free_experts = free_experts

    @torch.no_grad()
    def forward(
        self,
        hidden: torch.Tensor,
        logits: torch.Tensor,
        *,
        active_T: torch.Tensor | None = None,
        phase: StepPhase | None = None,
        profile: bool = False,
    ) -> torch.Tensor:
        """Outputs in the shape of ``hidden``, which is ``[T, H]`` or ``[batch, T, H]``; logits ``[..., E]``.

        ``active_T`` and ``phase`` are those of ``ExpertParallelMoE.forward``, over all tokens. With ``profile`` the
        choices are balanced instead of the router's, and are no heat. Raises ``ValueError`` as router and layer do.
        """
        hidden_TH, logits_TE = hidden.flatten(0, -2), logits.flatten(0, -2)
        weights_TK, ids_TK = self.router(logits_TE)
        if profile:
            tokens, top_k = ids_TK.shape
            rank = self.layer.ep_rank
            ids_TK = balanced_choices(tokens, self.layer.shape.experts, top_k, ids_TK.device, rank=rank)
        if self._free_experts is None:
            out_TH: torch.Tensor = self.layer(
                hidden_TH, ids_TK, weights_TK, active=active_T, phase=phase, profile=profile
            )
            return out_TH.view(hidden.shape)
        free = take_out(hidden_TH, ids_TK, weights_TK, self.layer.shape.experts, self._free_experts)
        active_TK = free.active_TK if active_T is None else free.active_TK & active_T.unsqueeze(1)
        out_TH = self.layer(
            hidden_TH, free.topk_ids_TK, weights_TK, active=active_TK, phase=phase, profile=profile
        )
        if free.out_TH is not None:
            out_TH = out_TH + free.out_TH
        return masked_outputs(out_TH, active_T, phase).view(hidden.shape)
