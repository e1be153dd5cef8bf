"""A whole MoE block: router, experts without weights, expert-parallel layer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from eplb_service.wire.heat import StepPhase
from worker_agent.moe.layer import ExpertParallelMoE
from worker_agent.moe.router import Router, balanced_choices
from worker_agent.moe.shape import MicroBatch, masked_outputs


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
    """Split off the choices of free experts.

    Parameters
    ----------
    hidden_TH
        The tokens.
    topk_ids_TK, topk_weights_TK
        Their choices; ids from ``experts`` on are of free experts.
    experts
        How many logical experts have weights.
    kind
        What a free expert gives back.
    """
    active_TK = topk_ids_TK < experts
    ids_TK = topk_ids_TK.masked_fill(~active_TK, 0)
    if kind is FreeExpert.ZERO:
        return FreeChoices(ids_TK, active_TK, None)
    weight_T1 = topk_weights_TK.float().masked_fill(active_TK, 0.0).sum(dim=1, keepdim=True)
    return FreeChoices(ids_TK, active_TK, (hidden_TH * weight_T1).to(hidden_TH.dtype))


@dataclass(frozen=True)
class BlockBatch:
    """One rank's tokens of a step, or of one of a step's two parts; ``MoEBlock.forward`` describes them."""

    hidden: torch.Tensor
    logits: torch.Tensor
    active_T: torch.Tensor | None = None


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
        dispatcher: str | None = None,
        length: int | None = None,
        profile: bool = False,
    ) -> torch.Tensor:
        """Outputs in the shape of ``hidden``; raises ``ValueError`` as router and layer do.

        Parameters
        ----------
        hidden, logits
            ``[T, H]`` or ``[batch, T, H]``, and ``[..., E]`` with the free experts behind the others.
        active_T
            bool, over all tokens: which are real.
        phase, dispatcher, length
            As for ``ExpertParallelMoE.forward``.
        profile
            Choices are balanced instead of the router's, and are no heat.
        """
        batch = BlockBatch(hidden, logits, active_T)
        routed, free_TH = self._routed(batch, profile)
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
        return _finished(batch, out_TH, free_TH, phase)

    @torch.no_grad()
    def forward_two(
        self,
        first: BlockBatch,
        second: BlockBatch,
        *,
        phase: StepPhase | None = None,
        dispatcher: str | None = None,
        length: int | None = None,
        profile: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Two micro-batches as one step, as ``ExpertParallelMoE.forward_two`` takes them.

        Parameters
        ----------
        first, second
            The micro-batches.
        phase, dispatcher, length, profile
            As for ``forward``; ``length`` is that of either micro-batch.
        """
        batches = (first, second)
        routed, free = zip(*(self._routed(batch, profile) for batch in batches), strict=True)
        outputs = self.layer.forward_two(
            routed[0], routed[1], phase=phase, dispatcher=dispatcher, length=length, profile=profile
        )
        one, two = (
            _finished(batch, out_TH, free_TH, phase)
            for batch, out_TH, free_TH in zip(batches, outputs, free, strict=True)
        )
        return one, two

    def _routed(self, batch: BlockBatch, profile: bool) -> tuple[MicroBatch, torch.Tensor | None]:
        """What the layer is to work on, and what free experts add to it; ``None`` where that is nothing."""
        hidden_TH, logits_TE = batch.hidden.flatten(0, -2), batch.logits.flatten(0, -2)
        weights_TK, ids_TK = self.router(logits_TE)
        if profile:
            ids_TK = self._balanced(*ids_TK.shape)
        if self._free_experts is None:
            return MicroBatch(hidden_TH, ids_TK, weights_TK, batch.active_T), None
        free = take_out(hidden_TH, ids_TK, weights_TK, self.layer.shape.experts, self._free_experts)
        active_TK = free.active_TK
        if batch.active_T is not None:
            active_TK = active_TK & batch.active_T.unsqueeze(1)
        return MicroBatch(hidden_TH, free.topk_ids_TK, weights_TK, active_TK), free.out_TH

    def _balanced(self, tokens: int, top_k: int) -> torch.Tensor:
        """Choices of the layer's own experts, of each rank's group alike where experts are grouped."""
        layer = self.layer
        return balanced_choices(
            tokens,
            layer.shape.experts,
            top_k,
            layer.w13_weight.device,
            rank=layer.ep_rank,
            groups=layer.ep_size if layer.rank_bound else 1,
        )


def _finished(
    batch: BlockBatch, out_TH: torch.Tensor, free_TH: torch.Tensor | None, phase: StepPhase | None
) -> torch.Tensor:
    """A batch's outputs in the shape of its tokens, with what free experts add; zeros for padding."""
    if free_TH is not None:
        out_TH = out_TH + free_TH
    return masked_outputs(out_TH, batch.active_T, phase).view(batch.hidden.shape)
