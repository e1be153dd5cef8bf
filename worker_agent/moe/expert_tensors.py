"""The expert tensors that a layer holds: as kernels read them, as balancing moves them, as checkpoints fill them."""

from __future__ import annotations

import torch

from worker_agent.moe.expert_parameter import ExpertParameter, Granularity
from worker_agent.moe.weights import ExpertWeights, movable_weights


class ExpertTensors(torch.nn.Module):
    """A layer's tensors of its S local slots. They keep their addresses: experts move by writing into them."""

    w13_weight: torch.Tensor
    """``[S, 2*I, H]``, the gate's rows before the up projection's; ``[S, I, H]`` where experts have no gate."""

    w2_weight: torch.Tensor
    """``[S, H, I]``."""

    w13_weight_scale: torch.Tensor | None
    """``[S, 2*I]`` where weights are int8, bfloat16 for tokens of that type and else float32; ``None`` otherwise."""

    w2_weight_scale: torch.Tensor | None
    """``[S, H]``, as ``w13_weight_scale``."""

    w13_bias: torch.Tensor | None
    """``[S, 2*I]`` where experts have biases, float32 for bfloat16 tokens and else of their type."""

    w2_bias: torch.Tensor | None
    """``[S, H]``, as ``w13_bias``."""

    def _hold(self, layer: int, weights: ExpertWeights, *, gated: bool) -> None:
        self._of_layer = layer
        self._gated = gated
        named = weights.named()
        for name in (
            "w13_weight",
            "w2_weight",
            "w13_weight_scale",
            "w2_weight_scale",
            "w13_bias",
            "w2_bias",
        ):
            self.register_buffer(name, named.get(name))

    def expert_weights(self) -> list[torch.Tensor]:
        """Every tensor that the expert kernels read, with the local slot as first dimension."""
        return self._weights().tensors()

    def get_expert_weights(self) -> list[torch.Tensor]:
        """The same tensors as one ``[S, -1]`` view each, in place: what balancing moves."""
        named = self._weights().named().items()
        return list(movable_weights(self._of_layer, self.w13_weight.shape[0], named).values())

    def checkpoint_parameters(self) -> dict[str, tuple[ExpertParameter, ExpertParameter]]:
        """What an ``ExpertLoader`` fills: by checkpoint suffix, the tensors of w1 and w3, and of w2."""
        found = {"weight": self._parameter(self.w13_weight, self.w2_weight, Granularity.WEIGHT)}
        if self.w13_weight_scale is not None and self.w2_weight_scale is not None:
            w13_S, w2_S = self.w13_weight_scale, self.w2_weight_scale
            found["weight_scale"] = self._parameter(w13_S, w2_S, Granularity.CHANNEL)
            # ModelSlim's checkpoints have offsets, all zero where tokens are quantized one by one.
            found["weight_offset"] = self._parameter(
                torch.empty_like(w13_S, device="meta"),
                torch.empty_like(w2_S, device="meta"),
                Granularity.CHANNEL,
                zeros=True,
            )
        if self.w13_bias is not None and self.w2_bias is not None:
            found["bias"] = self._parameter(self.w13_bias, self.w2_bias, Granularity.BIAS)
        return found

    def _parameter(
        self, w13_S: torch.Tensor, w2_S: torch.Tensor, granularity: Granularity, *, zeros: bool = False
    ) -> tuple[ExpertParameter, ExpertParameter]:
        w13 = ExpertParameter(w13_S, granularity, gated=self._gated, zeros=zeros)
        return w13, ExpertParameter(w2_S, granularity, gated=self._gated, zeros=zeros)

    def _weights(self) -> ExpertWeights:
        return ExpertWeights(
            self.w13_weight,
            self.w2_weight,
            self.w13_weight_scale,
            self.w2_weight_scale,
            self.w13_bias,
            self.w2_bias,
        )
