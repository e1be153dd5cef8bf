"""Experts that every token goes to, split in two parts so that they run while tokens travel."""

from __future__ import annotations

from collections.abc import Callable

import torch

from eplb_lab.layer.operators import Operators
from eplb_lab.layer.quantization import quant_method
from eplb_lab.layer.rank_group import RankGroup
from eplb_lab.layer.shape import Activation
from eplb_lab.layer.weights import ExpertTensors, ExpertWeights

SharedModule = Callable[[torch.Tensor], torch.Tensor]
"""Shared experts as a whole: ``[T, H]`` -> ``[T, H]``."""


class SharedExperts(ExpertTensors):
    """A feed-forward network over all tokens, by the same ``quantization`` methods as a layer's experts.

    ``weights`` are one slot as it was loaded: w13 ``[1, 2*I, H]`` and w2 ``[1, H, I]``, I that of all shared experts
    together; with biases or without. Tokens are of ``dtype``. With ``gate_H`` outputs are multiplied by the sigmoid of
    its product with each token.

    Ranks of ``tp`` have the same tokens, and each a part of I: ``weights`` are this rank's, and the second part ends
    with an all-reduce. w2's bias counts on the first of them alone, so that all may hold it. ``whole`` is a host's own
    module, whose place the two parts take: ``verify`` holds them against it before they are used, on all these ranks
    together.

    Raises ``ValueError`` naming the ``layer`` where shapes do not fit, or the two parts are not the whole.
    """

    gate_H: torch.Tensor | None

    def __init__(
        self,
        layer: int,
        weights: ExpertWeights,
        operators: Operators,
        dtype: torch.dtype,
        gate_H: torch.Tensor | None = None,
        activation: Activation = Activation.SILU,
        tp: RankGroup | None = None,
        whole: SharedModule | None = None,
        quantization: str = "none",
    ) -> None:
        hidden = weights.w2_SHI.shape[1]
        if weights.w13_SIH.shape[0] != 1 or weights.w13_SIH.shape[2] != hidden:
            raise ValueError(
                f"layer {layer}: shared experts' w13 must have the shape [1, 2*I, {hidden}], "
                f"got {list(weights.w13_SIH.shape)}"
            )
        if gate_H is not None and gate_H.shape != (hidden,):
            raise ValueError(
                f"layer {layer}: shared experts' gate must have the shape [{hidden}], got {list(gate_H.shape)}"
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
        """Compute the first product: gate and up projection, ``[T, 2*I]``."""
        return self._method.linear(hidden_TH, self._weights().first)

    def part2(self, hidden_TH: torch.Tensor, gate_up_TI: torch.Tensor) -> torch.Tensor:
        """Compute activation, down projection and gate, ``[T, H]``; summed over tensor-parallel ranks."""
        weight_1HI, scale_1H, bias_1H = self._weights().second
        second = weight_1HI, scale_1H, bias_1H if self._tp.rank == 0 else None
        out_TH = self._tp.all_reduce(self._method.linear(self._method.activated(gate_up_TI), second))
        if self.gate_H is None:
            return out_TH
        return out_TH * torch.sigmoid(hidden_TH @ self.gate_H).unsqueeze(1)

    def start(self, hidden_TH: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Compute the first part; return what computes the second, for the kernel to run while tokens travel."""
        gate_up_TI = self.part1(hidden_TH)
        return lambda: self.part2(hidden_TH, gate_up_TI)

    @torch.no_grad()
    def verify(self, whole: SharedModule) -> None:
        """Hold the two parts against a host's own module on random tokens; again where other weights were loaded.

        Tensor-parallel ranks call it together, each with the same module. Raises ``ValueError`` naming the layer where
        their relative difference is past 1 %, and 5 % in W8A8: a module that does more than these two parts must not be
        split.
        """
        w2_1HI, tolerance = self.w2_weight, 5e-2 if self._method.quantizes_tokens else 1e-2
        generator = torch.Generator().manual_seed(self.layer_index)
        hidden_TH = torch.randn(8, w2_1HI.shape[1], generator=generator).to(w2_1HI.device, self._dtype)
        expected_TH = whole(hidden_TH).float()
        found_TH = self.part2(hidden_TH, self.part1(hidden_TH)).float()
        if found_TH.shape != expected_TH.shape:
            raise ValueError(
                f"layer {self.layer_index}: shared experts give the shape {list(expected_TH.shape)} as a whole and "
                f"{list(found_TH.shape)} in two parts"
            )
        difference = float((found_TH - expected_TH).norm() / expected_TH.norm().clamp(min=1e-20))
        if not difference <= tolerance:
            raise ValueError(
                f"layer {self.layer_index}: shared experts in two parts differ from the whole by {difference:.3g} "
                f"of its norm, past {tolerance:g}; run them unsplit, or mend the weights"
            )
