"""A whole MoE block: router, experts without weights, expert-parallel layer."""

from __future__ import annotations

from enum import Enum

import torch

from eplb_service.wire.heat import StepPhase
from worker_agent.moe.layer import ExpertParallelMoE
from worker_agent.moe.router import Router, balanced_choices
from worker_agent.moe.shape import MicroBatch, masked_outputs


class FreeExpert(str, Enum):
    """The output of an expert without weights."""

    ZERO = "zero"
    IDENTITY = "identity"


class MoEBlock(torch.nn.Module):
    """Hidden states and router logits in, the block's output out: what a model calls.

    The ``router`` chooses among the layer's E experts, and free ones behind them where ``free_experts`` says what those
    do. Raises ``ValueError`` where the router knows more experts than the layer and this is not said, or the other way
    round.
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
        dispatcher: str | None = None,
        length: int | None = None,
        profile: bool = False,
    ) -> torch.Tensor:
        """Return outputs in the shape of ``hidden``; raises ``ValueError`` as router and layer do.

        ``hidden`` and ``logits`` are ``[T, H]`` or ``[batch, T, H]``, and ``[..., E]`` with the free experts behind the
        others; ``active_T``, bool over all tokens, marks the real ones. In a ``profile`` run choices are balanced
        instead of the router's, and are no heat. Arguments as for ``ExpertParallelMoE.forward`` otherwise.
        """
        routed, free_TH = self._routed(hidden, logits, active_T, profile)
        out_TH: torch.Tensor = self.layer(
            routed.hidden_TH,
            routed.topk_ids_TK,
            routed.topk_weights_TK,
            active=routed.active,
            phase=phase,
            dispatcher=dispatcher,
            length=length,
            profile=profile,
        )
        return _finished(out_TH, free_TH, active_T, phase).view(hidden.shape)

    @torch.no_grad()
    def forward_two(
        self,
        hidden: tuple[torch.Tensor, torch.Tensor],
        logits: tuple[torch.Tensor, torch.Tensor],
        *,
        active_T: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
        phase: StepPhase | None = None,
        dispatcher: str | None = None,
        length: int | None = None,
        profile: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run two micro-batches as one step; ``length`` is that of either. Arguments as for ``forward``, in pairs."""
        first, second = (
            self._routed(*batch, profile) for batch in zip(hidden, logits, active_T, strict=True)
        )
        outputs = self.layer.forward_two(
            first[0], second[0], phase=phase, dispatcher=dispatcher, length=length, profile=profile
        )
        one, two = (
            _finished(out_TH, free_TH, active, phase).view(own.shape)
            for out_TH, (_, free_TH), active, own in zip(
                outputs, (first, second), active_T, hidden, strict=True
            )
        )
        return one, two

    def _routed(
        self, hidden: torch.Tensor, logits: torch.Tensor, active_T: torch.Tensor | None, profile: bool
    ) -> tuple[MicroBatch, torch.Tensor | None]:
        """Return the layer's own tokens and choices, and the outputs of free experts, unless they are zeros."""
        hidden_TH = hidden.flatten(0, -2)
        weights_TK, ids_TK = self.router(logits.flatten(0, -2))
        if profile:
            # Of each rank's group alike where experts are grouped.
            layer = self.layer
            groups, device = layer.ep_size if layer.rank_bound else 1, layer.w13_weight.device
            experts, rank = layer.shape.experts, layer.ep_rank
            ids_TK = balanced_choices(
                ids_TK.shape[0], experts, ids_TK.shape[1], device, rank=rank, groups=groups
            )
        if self._free_experts is None:
            return MicroBatch(hidden_TH, ids_TK, weights_TK, active_T), None
        own_TK = ids_TK < self.layer.shape.experts
        free_TH = None
        if self._free_experts is FreeExpert.IDENTITY:
            weight_T1 = weights_TK.float().masked_fill(own_TK, 0.0).sum(dim=1, keepdim=True)
            free_TH = (hidden_TH * weight_T1).to(hidden_TH.dtype)
        active_TK = own_TK if active_T is None else own_TK & active_T.unsqueeze(1)
        return MicroBatch(hidden_TH, ids_TK.masked_fill(~own_TK, 0), weights_TK, active_TK), free_TH


def _finished(
    out_TH: torch.Tensor,
    free_TH: torch.Tensor | None,
    active_T: torch.Tensor | None,
    phase: StepPhase | None,
) -> torch.Tensor:
    """Add the outputs of free experts; zeros for padding."""
    return masked_outputs(out_TH if free_TH is None else out_TH + free_TH, active_T, phase)
