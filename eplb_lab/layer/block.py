"""MoE block of a model: a router, an expert-parallel layer, and experts without weights."""

from __future__ import annotations

from enum import Enum

import torch

from eplb_core.heat.phase import StepPhase
from eplb_lab.layer.layer import ExpertParallelMoE
from eplb_lab.layer.router import Router, balanced_choices
from eplb_lab.layer.shape import masked_outputs


class FreeExpert(str, Enum):
    """Output of an expert without weights."""

    ZERO = "zero"
    IDENTITY = "identity"


class MoEBlock(torch.nn.Module):
    """Module that a model calls with hidden states and router logits.

    Parameters
    ----------
    router
        Router over the layer's E experts, followed by the free experts, if there are any.
    layer
        The expert-parallel layer.
    free_experts
        Kind of free experts, which have no weights.

    Raises
    ------
    ValueError
        If the router has fewer experts than the layer, if it has more but ``free_experts`` is not given, or if
        ``free_experts`` is given but both have the same number.
    """

    def __init__(
        self, router: Router, layer: ExpertParallelMoE, free_experts: FreeExpert | None = None
    ) -> None:
        super().__init__()
        shape = layer.shape
        if (router.experts > shape.experts) != (free_experts is not None) or router.experts < shape.experts:
            raise ValueError(
                f"layer {shape.layer}: the router chooses among {router.experts} experts, but the layer has "
                f"{shape.experts}; pass free_experts if, and only if, the router has additional experts without weights"
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
        """Return the block's outputs in the shape of ``hidden``.

        Raises ``ValueError`` if the input does not match the router or the layer.

        Parameters
        ----------
        hidden
            ``[T, H]`` or ``[batch, T, H]``.
        logits
            Router logits ``[..., E]``; the free experts' logits come last.
        active_T
            Mask of the real tokens, bool.
        phase
            Kind of the step.
        dispatcher
            Dispatcher for this step, by default the layer's first.
        length
            Common length that ranks pad their tokens to; see ``ExpertParallelMoE.forward``.
        profile
            True to use balanced choices instead of the router's, and to record no heat.
        """
        layer = self.layer
        hidden_TH = hidden.flatten(0, -2)
        weights_TK, ids_TK = self.router(logits.flatten(0, -2))
        experts = layer.shape.experts
        if profile:
            # Grouped experts require the same number of choices from each rank's group.
            groups = layer.ep_size if layer.rank_bound else 1
            size = ids_TK.shape[0], experts, ids_TK.shape[1]
            ids_TK = balanced_choices(*size, ids_TK.device, rank=layer.ep_rank, groups=groups)
        has_weights_TK = ids_TK < experts
        active_TK = has_weights_TK if active_T is None else has_weights_TK & active_T.unsqueeze(1)
        out_TH: torch.Tensor = layer(
            hidden_TH,
            ids_TK.masked_fill(~has_weights_TK, 0),
            weights_TK,
            active=active_T if self._free_experts is None else active_TK,
            phase=phase,
            dispatcher=dispatcher,
            length=length,
            profile=profile,
        )
        if self._free_experts is FreeExpert.IDENTITY:
            weight_T1 = weights_TK.float().masked_fill(has_weights_TK, 0.0).sum(dim=1, keepdim=True)
            out_TH = out_TH + (hidden_TH * weight_T1).to(hidden_TH.dtype)
        return masked_outputs(out_TH, active_T, phase).view(hidden.shape)
