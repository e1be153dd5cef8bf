"""MoE layer without parallelism, used in tests as the reference for the expert-parallel layer."""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from eplb_lab.layer.operators import operators_for
from eplb_lab.layer.quantization import Unquantized
from eplb_lab.layer.shape import MoEShape
from eplb_lab.layer.weights import ExpertSource, ExpertTensors, fill_weights


class DenseMoE(ExpertTensors):
    """MoE layer that computes all E experts sequentially on one rank, in plain torch."""

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
        all_experts = list(range(shape.experts))
        method = Unquantized(operators_for(torch.device(device)))
        weights = method.create_weights(shape, shape.experts, dtype, torch.device(device), biases is not None)
        self._hold(shape.layer, fill_weights(weights, shape, all_experts, experts, biases))

    def forward(
        self, hidden_TH: torch.Tensor, topk_ids_TK: torch.Tensor, topk_weights_TK: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of each token's expert outputs, ``[T, H]``.

        The input is validated as in ``ExpertParallelMoE``.
        """
        w13 = self.w13_weight
        tokens = hidden_TH, topk_ids_TK, topk_weights_TK
        self.shape.check_tokens(*tokens, None, w13.dtype, w13.device, check_ids=True)
        out_TH = torch.zeros_like(hidden_TH, dtype=torch.float32)
        no_biases = [None] * self.shape.experts
        w13_bias = no_biases if self.w13_bias is None else self.w13_bias
        w2_bias = no_biases if self.w2_bias is None else self.w2_bias
        for expert in range(self.shape.experts):
            token, choice = (topk_ids_TK == expert).nonzero(as_tuple=True)
            first = linear(hidden_TH[token], w13[expert], w13_bias[expert])
            output = linear(self.shape.activation(first), self.w2_weight[expert], w2_bias[expert])
            out_TH.index_add_(0, token, output.float() * topk_weights_TK[token, choice].float().unsqueeze(-1))
        return out_TH.to(hidden_TH.dtype)
