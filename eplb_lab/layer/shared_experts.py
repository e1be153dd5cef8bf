"""Shared experts, which process every token, in two parts that run while tokens are in transit."""

from __future__ import annotations

from collections.abc import Callable

import torch

from eplb_lab.layer.operators import Operators
from eplb_lab.layer.quantization import quant_method
from eplb_lab.layer.rank_group import RankGroup
from eplb_lab.layer.shape import Activation
from eplb_lab.layer.weights import ExpertTensors, ExpertWeights

SharedModule = Callable[[torch.Tensor], torch.Tensor]
"""Unsplit shared experts: a function from ``[T, H]`` to ``[T, H]``."""


class SharedExperts(ExpertTensors):
    """Feed-forward network over all tokens.

    Parameters
    ----------
    layer
        Layer index, for error messages.
    weights
        Weights as loaded, in one slot: w13 ``[1, 2*I, H]`` and w2 ``[1, H, I]``, with or without biases. I is the width
        of all shared experts together. With tensor parallelism, each rank passes its shard of I.
    operators
        Operators for the weights' device.
    dtype
        Data type of the tokens.
    gate_H
        Optional gate. Outputs are multiplied by the sigmoid of the gate's product with the token.
    activation
        Activation between the two products.
    tp
        Tensor-parallel ranks. They have the same tokens, and the second part ends with an all-reduce over them. Only
        the first rank applies the bias of w2, so every rank may pass it.
    whole
        The host's own module, which the two parts replace. If given, ``verify`` runs before the parts are used, on all
        tensor-parallel ranks together.
    quantization
        Quantisation method, as for a layer's experts.

    Raises
    ------
    ValueError
        If the shapes do not match, or if the outputs of the two parts differ from those of ``whole``.
    """

    gate_H: torch.Tensor | None

    def __init__(
        self,
        layer: int,
        weights: ExpertWeights,
        operators: Operators,
        dtype: torch.dtype,
        *,
        gate_H: torch.Tensor | None = None,
        activation: Activation = Activation.SILU,
        tp: RankGroup | None = None,
        whole: SharedModule | None = None,
        quantization: str = "none",
    ) -> None:
        hidden = weights.w2_SHI.shape[1]
        if weights.w13_SIH.shape[0] != 1 or weights.w13_SIH.shape[2] != hidden:
            raise ValueError(
                f"layer {layer}: shared experts' w13 must have shape [1, 2*I, {hidden}], "
                f"got {list(weights.w13_SIH.shape)}"
            )
        if gate_H is not None and gate_H.shape != (hidden,):
            raise ValueError(
                f"layer {layer}: shared experts' gate must have shape [{hidden}], got {list(gate_H.shape)}"
            )
        super().__init__()
        self._method = quant_method(layer, quantization, operators, activation)
        self._hold(layer, self._method.process_after_load(weights, dtype))
        self.register_buffer("gate_H", gate_H)
        self._dtype = dtype
        self._tp = RankGroup(None) if tp is None else tp
        if whole is not None:
            self.verify(whole)

    def part1(self, hidden_TH: torch.Tensor) -> torch.Tensor:
        """Return the gate and up projections, ``[T, 2*I]``."""
        return self._method.linear(hidden_TH, self._weights().first)

    def part2(self, hidden_TH: torch.Tensor, gate_up_TI: torch.Tensor) -> torch.Tensor:
        """Apply activation, down projection and gate. Return the sum over the tensor-parallel ranks, ``[T, H]``."""
        weight_1HI, scale_1H, bias_1H = self._weights().second
        second = weight_1HI, scale_1H, bias_1H if self._tp.rank == 0 else None
        out_TH = self._tp.all_reduce(self._method.linear(self._method.activated(gate_up_TI), second))
        if self.gate_H is None:
            return out_TH
        return out_TH * torch.sigmoid(hidden_TH @ self.gate_H).unsqueeze(1)

    def start(self, hidden_TH: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Compute the first part and return a function that computes the second.

        The kernel calls the function while outputs are in transit.
        """
        gate_up_TI = self.part1(hidden_TH)
        return lambda: self.part2(hidden_TH, gate_up_TI)

    @torch.no_grad()
    def verify(self, whole: SharedModule) -> None:
        """Compare the two parts with the host's own module on random tokens.

        Call this again after loading new weights. Tensor-parallel ranks call it together, each with the same module.
        Raises ``ValueError`` if the relative difference exceeds 1 %, or 5 % in W8A8, because a module that computes
        more than the two parts must not be split.
        """
        w2_1HI = self.w2_weight
        tolerance = 5e-2 if self._method.quantizes_tokens else 1e-2
        generator = torch.Generator().manual_seed(self.layer_index)
        hidden_TH = torch.randn(8, w2_1HI.shape[1], generator=generator).to(w2_1HI.device, self._dtype)
        expected_TH = whole(hidden_TH).float()
        out_TH = self.part2(hidden_TH, self.part1(hidden_TH)).float()
        if out_TH.shape != expected_TH.shape:
            raise ValueError(
                f"layer {self.layer_index}: shared experts return shape {list(expected_TH.shape)} when run whole, "
                f"but {list(out_TH.shape)} when split in two; do not split them"
            )
        difference = float((out_TH - expected_TH).norm() / expected_TH.norm().clamp(min=1e-20))
        # A NaN difference must fail as well.
        if not difference <= tolerance:
            raise ValueError(
                f"layer {self.layer_index}: split shared experts differ from the unsplit ones by {difference:.3g} of "
                f"their norm (at most {tolerance:g} is allowed); do not split them, or correct their weights"
            )
