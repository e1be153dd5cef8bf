"""A whole MoE block: router, experts without weights, expert-parallel layer."""

from __future__ import annotations

from enum import Enum

import torch

from eplb_core.heat.phase import StepPhase
from eplb_lab.layer.layer import ExpertParallelMoE
from eplb_lab.layer.router import Router, balanced_choices
from eplb_lab.layer.shape import masked_outputs


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
        hidden_TH, layer = hidden.flatten(0, -2), self.layer
        weights_TK, ids_TK = self.router(logits.flatten(0, -2))
        experts = layer.shape.experts
        if profile:
            # Of each rank's group alike where experts are grouped.
            groups = layer.ep_size if layer.rank_bound else 1
            size = ids_TK.shape[0], experts, ids_TK.shape[1]
            ids_TK = balanced_choices(*size, ids_TK.device, rank=layer.ep_rank, groups=groups)
        own_TK = ids_TK < experts
        active_TK = own_TK if active_T is None else own_TK & active_T.unsqueeze(1)
        out_TH: torch.Tensor = layer(
            hidden_TH,
            ids_TK.masked_fill(~own_TK, 0),
            weights_TK,
            active=active_T if self._free_experts is None else active_TK,
            phase=phase,
            dispatcher=dispatcher,
            length=length,
            profile=profile,
        )
        if self._free_experts is FreeExpert.IDENTITY:
            weight_T1 = weights_TK.float().masked_fill(own_TK, 0.0).sum(dim=1, keepdim=True)
            out_TH = out_TH + (hidden_TH * weight_T1).to(hidden_TH.dtype)
        return masked_outputs(out_TH, active_T, phase).view(hidden.shape)
