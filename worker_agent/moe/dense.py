"""MoE layers and shared experts without any parallelism: twins that the expert-parallel ones are held against."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import linear

from worker_agent.moe.shape import SWIGLUOAI_LIMIT, SWIGLUOAI_SLOPE, Activation, MoEShape
from worker_agent.moe.weights import ExpertSource, ExpertTensors, build_weights

SharedModule = Callable[[torch.Tensor], torch.Tensor]
"""Shared experts as a whole: ``[T, H]`` -> ``[T, H]``."""


class DenseMoE(ExpertTensors):
    """All E experts in one place, run one after the other in plain torch."""

    def __init__(
        self,
        shape: MoEShape,
        experts: ExpertSource,
        *,
        biases: ExpertSource | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.shape = shape
        weights = build_weights(shape, experts, list(range(shape.experts)), dtype, device, biases)
        self._hold(shape.layer, weights, gated=shape.activation.gated)

    def forward(
        self, hidden_TH: torch.Tensor, topk_ids_TK: torch.Tensor, topk_weights_TK: torch.Tensor
    ) -> torch.Tensor:
        """Put tokens through their experts, ``[T, H]``; takes and refuses what ``ExpertParallelMoE`` does."""
        w13 = self.w13_weight
        self.shape.check_tokens(
            hidden_TH, topk_ids_TK, topk_weights_TK, w13.dtype, w13.device, check_ids=True
        )
        out_TH = torch.zeros_like(hidden_TH, dtype=torch.float32)
        for expert in range(self.shape.experts):
            token, choice = (topk_ids_TK == expert).nonzero(as_tuple=True)
            first = linear(hidden_TH[token], w13[expert])
            if self.w13_bias is not None:
                first += self.w13_bias[expert]
            output = linear(_plain_activation(self.shape.activation, first), self.w2_weight[expert])
            if self.w2_bias is not None:
                output += self.w2_bias[expert]
            out_TH.index_add_(0, token, output.float() * topk_weights_TK[token, choice].float().unsqueeze(-1))
        return out_TH.to(hidden_TH.dtype)


def _plain_activation(activation: Activation, first: torch.Tensor) -> torch.Tensor:
    """Compute an activation by its formula alone; ``[..., I]``."""
    up = first
    if activation.gated:
        first, up = first.chunk(2, dim=-1)
    if activation in (Activation.SILU, Activation.SILU_NO_MUL):
        inner = first / (1 + torch.exp(-first))
    elif activation in (Activation.GELU, Activation.GELU_NO_MUL):
        inner = first * (1 + torch.erf(first / 2**0.5)) / 2
    elif activation is Activation.RELU2_NO_MUL:
        inner = torch.where(first > 0, first * first, 0.0)
    else:
        gate, up = first.clamp(max=SWIGLUOAI_LIMIT), up.clamp(-SWIGLUOAI_LIMIT, SWIGLUOAI_LIMIT) + 1
        inner = gate / (1 + torch.exp(-SWIGLUOAI_SLOPE * gate))
    return inner * up if activation.gated else inner


def dense_shared_experts(
    w13_IH: torch.Tensor,
    w2_HI: torch.Tensor,
    gate_H: torch.Tensor | None = None,
    activation: Activation = Activation.SILU,
) -> SharedModule:
    """Make shared experts without biases in plain torch."""

    def whole(hidden_TH: torch.Tensor) -> torch.Tensor:
        out_TH = linear(_plain_activation(activation, linear(hidden_TH, w13_IH)), w2_HI)
        return out_TH if gate_H is None else out_TH * torch.sigmoid(hidden_TH @ gate_H).unsqueeze(1)

    return whole
