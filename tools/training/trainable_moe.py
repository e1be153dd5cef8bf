"""An MoE layer with gradients, all experts in one place: what training uses for ``ExpertParallelMoE``."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from worker_agent.moe import MoEShape


class TrainableMoE(nn.Module):
    """E SwiGLU experts. Tokens are sorted by expert, so that each runs once over its own."""

    def __init__(self, shape: MoEShape, output_scale: float = 1.0) -> None:
        super().__init__()
        experts, hidden, inner = shape.experts, shape.hidden, shape.intermediate
        self.w13 = nn.Parameter(torch.randn(experts, 2 * inner, hidden) * hidden**-0.5)
        self.w2 = nn.Parameter(torch.randn(experts, hidden, inner) * inner**-0.5 * output_scale)

    def forward(
        self, hidden_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> torch.Tensor:
        """Tokens through their experts, ``[T, H]``."""
        choices = ids_TK.reshape(-1)
        order_N = choices.argsort(stable=True)
        sizes = torch.bincount(choices, minlength=self.w13.shape[0]).tolist()
        rows = hidden_TH[order_N // ids_TK.shape[1]].split(sizes)
        outputs = [
            functional.linear(_swiglu(functional.linear(part, w13)), w2)
            for part, w13, w2 in zip(rows, self.w13, self.w2, strict=True)
        ]
        weighted_NH = torch.cat(outputs) * weights_TK.reshape(-1)[order_N].unsqueeze(-1)
        return torch.zeros_like(hidden_TH).index_add(0, order_N // ids_TK.shape[1], weighted_NH)


def _swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up
