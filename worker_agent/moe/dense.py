"""The same MoE layer without any parallelism: what the expert-parallel one is held against."""

from __future__ import annotations

import torch
from torch.nn.functional import linear, silu

from worker_agent.moe.shape import MoEShape
from worker_agent.moe.weights import ExpertSource, build_weights


class DenseMoE(torch.nn.Module):
    """All E experts in one place, run one after the other in plain torch."""

    w13_weight: torch.Tensor
    w2_weight: torch.Tensor

    def __init__(
        self,
        shape: MoEShape,
        experts: ExpertSource,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.shape = shape
        weights = build_weights(shape, experts, list(range(shape.experts)), dtype, device)
        self.register_buffer("w13_weight", weights.w13_SIH)
        self.register_buffer("w2_weight", weights.w2_SHI)

    def forward(
        self, hidden_TH: torch.Tensor, topk_ids_TK: torch.Tensor, topk_weights_TK: torch.Tensor
    ) -> torch.Tensor:
        """Tokens through their experts, ``[T, H]``; takes and refuses what ``ExpertParallelMoE`` does."""
        w13 = self.w13_weight
        self.shape.check_tokens(
            hidden_TH, topk_ids_TK, topk_weights_TK, w13.dtype, w13.device, check_ids=True
        )
        out_TH = torch.zeros_like(hidden_TH, dtype=torch.float32)
        for expert in range(self.shape.experts):
            token, choice = (topk_ids_TK == expert).nonzero(as_tuple=True)
            gate, up = linear(hidden_TH[token], w13[expert]).chunk(2, dim=-1)
            output = linear(silu(gate) * up, self.w2_weight[expert]).float()
            out_TH.index_add_(0, token, output * topk_weights_TK[token, choice].float().unsqueeze(-1))
        return out_TH.to(hidden_TH.dtype)
